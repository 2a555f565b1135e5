"""The few calls of the CUDA driver that memory needs, with their errors as `OSError`.

Through `cuda.bindings.driver` and nothing else: the owner loads this, and neither torch nor the CUDA runtime. Checked
against cuda-bindings 12.9 and 13.5.
"""

from __future__ import annotations

import threading
from typing import Any

_lock = threading.Lock()
_driver: Any = None
_devices: dict[int, Any] = {}
_contexts: dict[int, Any] = {}


class CudaError(OSError):
    """A call of the CUDA driver failed; the message names the call and the driver's error."""


def load() -> Any:
    """`cuda.bindings.driver`, initialised. Raises `CudaError` with the reason where there is no usable driver.

    A process that has called this must not be forked.
    """
    global _driver
    with _lock:
        if _driver is None:
            try:
                from cuda.bindings import driver  # pyright: ignore[reportMissingImports]
            except ImportError as error:
                raise CudaError(f"cuda-bindings is not installed: {error}") from None
            try:
                status = driver.cuInit(0)[0]
            except Exception as error:  # the bindings' own types: no driver library, or one without a symbol
                raise CudaError(f"no CUDA driver: {error}") from None
            if int(status) != 0:
                raise CudaError(f"no CUDA driver: cuInit: {_describe(driver, status)}")
            _driver = driver
    return _driver


def call(name: str, *arguments: Any) -> Any:
    """Call the driver's function `name`; returns its one result, or a tuple of several, or None."""
    driver = load()
    try:
        status, *results = getattr(driver, name)(*arguments)
    except RuntimeError as error:  # the bindings': this driver has no such function
        raise CudaError(f"{name}: {error}") from None
    if int(status) != 0:
        raise CudaError(f"{name}: {_describe(driver, status)}")
    if len(results) > 1:
        return tuple(results)
    return results[0] if results else None


def _describe(driver: Any, status: Any) -> str:
    name, text = driver.cuGetErrorName(status), driver.cuGetErrorString(status)
    parts = [part[1].decode() if isinstance(part[1], bytes) else str(part[1]) for part in (name, text)]
    return f"{parts[0]} ({parts[1]})"


def device(ordinal: int) -> Any:
    """The device's handle. Creates no context."""
    if ordinal not in _devices:
        _devices[ordinal] = call("cuDeviceGet", ordinal)
    return _devices[ordinal]


def enter(ordinal: int) -> None:
    """Make the device's primary context, which torch uses as well, current in this thread."""
    if ordinal not in _contexts:
        _contexts[ordinal] = call("cuDevicePrimaryCtxRetain", device(ordinal))
    call("cuCtxSetCurrent", _contexts[ordinal])


def idle(ordinal: int) -> None:
    """Wait until the device has done everything this process asked of it. Raises `CudaError` for a sticky error."""
    enter(ordinal)
    call("cuCtxSynchronize")
