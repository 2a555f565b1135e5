"""Whether a GPU may be used again after a worker on it died: the driver's own records, and a computation.

A worker that dies of its own fault (an illegal address, a kill) takes its context along and leaves the device well. A
device that lost data, fell off the bus or computes wrongly does not become well by being used again. NVML tells which
it was; the canary looks at what NVML cannot see.
"""

from __future__ import annotations

import threading
from typing import Any

from belayer.engine.memory import _cuda_driver
from belayer.errors import ConfigError

# Xids that a program causes by itself; the device goes on. Source: NVIDIA's Xid catalogue; its Kubernetes device plugin
# leaves out the same ones. 45 follows every kill of a process whose kernels run.
OF_PROGRAMS = frozenset({13, 31, 43, 45, 68, 109})
SIZE = 96  # of the canary's matrices; sums of products of integers below 16 stay exact in float32


class CudaHealth:
    """`belayer.engine.device.DeviceHealth` of one GPU. Counts from when this object was made.

    It costs a CUDA context in this process, for the canary.
    """

    def __init__(self, ordinal: int = 0) -> None:
        """Raises `ConfigError` where the device's health cannot be known, because then nothing may rely on it."""
        try:
            import pynvml  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ConfigError(
                "the health of a GPU is read with nvidia-ml-py, which is not installed",
                next_step="pip install 'belayer[gpu]'",
            ) from None
        self._nvml: Any = pynvml
        self._lock = threading.Lock()
        self._xids: list[int] = []
        try:
            uuid = _uuid(ordinal)
            pynvml.nvmlInit()
            self._device = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except (_cuda_driver.CudaError, pynvml.NVMLError) as error:
            raise ConfigError(f"the health of CUDA device {ordinal} cannot be read: {error}") from None
        self._events = self._register()
        self._before = self._counters()
        self._canary = Canary(ordinal)

    def check(self) -> str | None:
        """None: well. Otherwise why nothing on the device may be used again, for a person to read."""
        with self._lock:
            try:
                self._collect_xids()
                counters = self._counters()
            except self._nvml.NVMLError as error:
                return f"the GPU's driver does not answer: {error}"
            serious = sorted(set(self._xids) - OF_PROGRAMS)
        if serious:
            return f"the GPU reported Xid {', '.join(map(str, serious))}"
        for what, count in counters.items():
            if count > self._before.get(what, 0):
                return f"the GPU had {count - self._before.get(what, 0)} {what} since the engine started"
        return self._canary.check()

    def _register(self) -> Any:
        """An event set that keeps Xids until they are asked for; None where the device reports none (MIG)."""
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(self._device, nvml.nvmlEventTypeXidCriticalError, events)
        except nvml.NVMLError:
            return None
        return events

    def _collect_xids(self) -> None:
        while self._events is not None:
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except self._nvml.NVMLError as error:
                if error.value == self._nvml.NVML_ERROR_TIMEOUT:
                    return
                raise
            self._xids.append(int(event.eventData))

    def _counters(self) -> dict[str, int]:
        """What only grows when memory is damaged. A device without one of them simply lacks it."""
        nvml = self._nvml
        counters: dict[str, int] = {}

        def read(what: str, *call: Any) -> Any:
            try:
                return call[0](self._device, *call[1:])
            except nvml.NVMLError as error:
                if error.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_NO_PERMISSION):
                    return None
                raise

        uncorrected = read(
            "ecc", nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
        if uncorrected is not None:
            counters["uncorrectable memory error(s)"] = uncorrected
        rows = read("rows", nvml.nvmlDeviceGetRemappedRows)
        if rows is not None:
            counters["row(s) remapped after uncorrectable errors"] = rows[1]
            counters["failed row remapping(s)"] = int(rows[3])
        return counters


class Canary:
    """A computation whose result is known, on the device's arithmetic and memory; some tenths of a millisecond."""

    def __init__(self, ordinal: int = 0) -> None:
        import torch

        self._torch = torch
        self._device = torch.device("cuda", ordinal)
        left = (torch.arange(SIZE * SIZE) * 7 % 16).view(SIZE, SIZE)
        right = (torch.arange(SIZE * SIZE) * 11 % 13).view(SIZE, SIZE)
        self._product = (left @ right).float()  # in integers, on the CPU
        self._left, self._right = left.float(), right.float()
        self._pattern = torch.arange(1 << 18, dtype=torch.int32).mul_(-1640531527)
        self._first = self.check()  # loads kernels, which takes a while the first time

    def check(self) -> str | None:
        """None: as it must be. Any error of the device is a finding, not an exception."""
        torch = self._torch
        try:
            # on a stream of its own: the answer must not wait for what this process computes besides
            with torch.cuda.stream(torch.cuda.Stream(self._device)):
                product = (self._left.to(self._device) @ self._right.to(self._device)).cpu()
                pattern = self._pattern.to(self._device).clone().bitwise_not_().cpu()
        except RuntimeError as error:
            return f"the GPU does not compute: {str(error).splitlines()[0]}"
        if not torch.equal(product, self._product):
            return "the GPU gave a wrong product of two small matrices"
        if not torch.equal(pattern, ~self._pattern):
            return "the GPU gave other content back than was written to its memory"
        return None


def _uuid(ordinal: int) -> str:
    """NVML's name for the device that CUDA calls `ordinal`, whatever CUDA_VISIBLE_DEVICES says."""
    raw = bytes(_cuda_driver.call("cuDeviceGetUuid", _cuda_driver.device(ordinal)).bytes)
    text = raw.hex()
    return "GPU-" + "-".join([text[:8], text[8:12], text[12:16], text[16:20], text[20:]])
