"""What makes an image usable: everything that a process once decided on, and could not notice if it had changed.

An image is found by a hash of these parts. The source files that the imaged process had imported are recorded with the
image instead (`sources`), because only the process itself knows which they are.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from pathlib import Path

import msgspec

from belayer.config import EngineConfig
from belayer.engine.images import _criu
from belayer.versions import versions

FORMAT = 2  # of the folder and of what the restored process expects to be told
PACKAGE = Path(__file__).resolve().parents[2]
_BAKED = ("PYTHON", "LD_", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "GOMP_", "VLLM_", "TORCH", "HF_HUB_", "MALLOC_")
_BAKED += ("GLIBC_TUNABLES", "CUDA_", "BELAYER_FAILPOINTS")
_HARMLESS = ("PATH", "HOME", "LANG", "LC_", "TZ")
# libraries set these when they are imported: whether the program has imported them must not decide which image it gets
_LIBRARIES = ("TORCHINDUCTOR_CACHE_DIR", "CUDA_MODULE_LOADING")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")


class Key(msgspec.Struct, frozen=True):
    """The parts by name; two equal keys can share an image."""

    parts: dict[str, str]

    @property
    def name(self) -> str:
        """A file name for it."""
        return hashlib.blake2b(msgspec.json.encode(sorted(self.parts.items())), digest_size=12).hexdigest()


def unsupported(config: EngineConfig) -> str | None:
    """Why engines with this configuration have no images; None: they may."""
    if config.backend != "vllm":
        return f"the {config.backend} backend has no images"
    if config.device != "cpu":
        return f"no images of processes that use {config.device}"
    return None


def key_of(config: EngineConfig, env: dict[str, str]) -> Key:
    """The key of workers with this configuration and environment. Raises `CriuFailed` where CRIU does not work."""
    assert config.model is not None
    program = _criu.program()
    facts = program.stat()
    model = (config.model.expanduser().absolute() / "config.json").read_bytes()
    settings = ("backend", "dtype", "device", "max_model_len", "max_num_seqs", "kv_bytes", "batch_invariant", "threads")
    settings += ("adopt_sealed_blocks",)
    baked = {name: value for name, value in template_environment(env).items() if name.startswith(_BAKED)}
    return Key(
        {
            "format": str(FORMAT),
            "python": f"{sys.executable} {sys.version}",
            "packages": msgspec.json.encode(versions(), order="sorted").decode(),
            "belayer": str(PACKAGE),
            "criu": f"{program} {facts.st_size} {facts.st_mtime_ns}",
            "kernel": f"{platform.release()} {platform.version()}",
            # clocks begin anew at a boot, and so might what a process believes of time
            "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            "cpu": _cpu(),
            "settings": repr([(name, getattr(config, name)) for name in settings]),
            "environment": repr(sorted(baked.items())),
            "model": hashlib.blake2b(model, digest_size=16).hexdigest(),
        }
    )


def template_environment(env: dict[str, str]) -> dict[str, str]:
    """The part of a worker's environment that goes into an image: what matters to it, and no secret."""
    return {
        name: value
        for name, value in env.items()
        if name.startswith((*_BAKED, *_HARMLESS))
        and name not in _LIBRARIES
        and not any(word in name.upper() for word in _SECRET)
    }


def _cpu() -> str:
    """Model, features and number of the processors; an image holds code that was chosen for them."""
    wanted = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "flags", "Features", "CPU part"):
            wanted.setdefault(name.strip(), value.strip())
    digest = hashlib.blake2b(repr(sorted(wanted.items())).encode(), digest_size=16).hexdigest()
    return f"{wanted.get('model name', '?')} x{os.cpu_count()} {digest}"


def sources() -> dict[str, str]:
    """The files of this package that this process has imported, below the package, with a digest of each."""
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        path = Path(file).resolve() if file and name.partition(".")[0] in (PACKAGE.name, "__main__") else None
        if path is not None and path.is_relative_to(PACKAGE):
            found[str(path.relative_to(PACKAGE))] = _digest(path)
    return found


def changed_source(recorded: dict[str, str]) -> str | None:
    """The first recorded source file that is another one now, or None."""
    for name, digest in recorded.items():
        try:
            if _digest(PACKAGE / name) != digest:
                return name
        except OSError:
            return name
    return None


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
