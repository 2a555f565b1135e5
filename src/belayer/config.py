"""Typed configuration: TOML file, then environment (`BELAYER_ENGINE__STANDBY=none`), then flags.

An unknown key is an error that names the nearest known one; nothing is ever ignored silently.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from belayer.errors import ConfigError


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


VersionPolicy = Literal["allow", "finish_on_old", "restart_turn"]


class EngineConfig(_Section):
    """The rollout engine: which model, how it is protected."""

    backend: Literal["vllm", "transformers"] = Field(default="vllm", description="What computes tokens.")
    device: Literal["cpu", "cuda"] = Field(
        default="cpu", description="Where weights, KV arena and computation are; CUDA_VISIBLE_DEVICES picks the GPU."
    )
    model: Path | None = Field(default=None, description="Hugging Face style model folder (config.json + safetensors).")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32",
        description="Of weights and KV cache; float32 continues a request exactly, bfloat16 on some CPUs.",
    )
    max_model_len: int = Field(default=2048, ge=16, description="Longest prompt + completion, in tokens.")
    max_num_seqs: int = Field(default=16, ge=1, description="Requests decoded together.")
    kv_bytes: int = Field(default=256 << 20, ge=1 << 20, description="Size of the KV arena in bytes.")
    standby: Literal["process", "image", "none"] = Field(
        default="process",
        description="Keep a warmed-up shadow; or only its image, which costs no memory; or cold start.",
    )
    images: bool = Field(
        default=True, description="Start workers from a checkpointed one where that works, and make such images."
    )
    images_bytes: int = Field(default=8 << 30, ge=1 << 20, description="Disk budget of all engine images.")
    hang_s: float = Field(
        default=2.0, gt=0, description="A decode step that takes longer, with work queued, is a hang."
    )
    prefill_hang_s: float = Field(default=60.0, gt=0, description="The same for a step that prefills or compiles.")
    start_timeout_s: float = Field(default=180.0, gt=0, description="Deadline of a worker start.")
    promote_timeout_s: float = Field(default=10.0, gt=0, description="Deadline of a promotion; past it, cold start.")
    version_policy: VersionPolicy = Field(
        default="allow",
        description="May a trajectory span policy versions? If not: finish it on the old one, or restart the turn.",
    )
    update_timeout_s: float = Field(
        default=120.0, gt=0, description="Deadline of a weights update; past it the old version serves on."
    )
    scrub_s: float = Field(
        default=30.0,
        gt=0,
        description="How often the shadow checks the weights' digest; rarer where that would take 0.5% of a core.",
    )
    adopt_sealed_blocks: bool = Field(
        default=False,
        description="A promoted shadow takes over KV blocks whose seals verify, instead of computing them again.",
    )
    threads: int = Field(default=0, ge=0, description="Compute threads of a worker; 0: one per core.")
    batch_invariant: bool = Field(
        default=True,
        description="A request's tokens do not depend on what is decoded beside it (float32; bfloat16 on some CPUs).",
    )


class SandboxConfig(_Section):
    """The environments: which image, how it is kept."""

    runtime: Literal["native", "podman"] = Field(
        default="native", description="What runs containers; podman is slower, for hosts where they must be podman's."
    )
    image: str = Field(default="base", description="Name of an image in the store; set-up makes `base`.")
    store: Path | None = Field(
        default=None, description="Folder of the sandbox store; default: below the cache folder."
    )
    store_kind: Literal["auto", "btrfs", "overlay"] = Field(
        default="auto", description="What the store is made of; auto: btrfs, or overlayfs where btrfs is not to be had."
    )
    store_bytes: int = Field(
        default=16 << 30, ge=1 << 30, description="Size of the (sparse) store file, where one is made."
    )
    memory_bytes: int = Field(default=1 << 30, ge=16 << 20, description="Memory limit of one sandbox.")
    pids: int = Field(default=512, ge=16, description="Process limit of one sandbox.")
    cpus: float = Field(default=0.0, ge=0.0, description="Processors' time of one sandbox; 0: no limit.")
    disk_bytes: int = Field(
        default=0, ge=0, description="What one sandbox may write; 0: a quarter of the store. Needs a store file."
    )
    allow_level: Literal["full", "fs+shell", "fs"] = Field(
        default="full",
        description="The lowest level of checkpoints that this run accepts; below full, processes do not come back.",
    )
    exec_timeout_s: float = Field(default=60.0, gt=0, description="Default limit of one command.")
    output_bytes: int = Field(
        default=1 << 20, ge=1024, description="Output kept of one command; the rest is truncated, visibly."
    )
    max_running: int = Field(default=64, ge=1, description="Sandboxes alive at once.")
    max_dumps: int = Field(default=2, ge=1, description="Checkpoints taken at once on this host.")
    images_bytes: int = Field(default=4 << 30, ge=64 << 20, description="Budget of memory-backed checkpoint images.")
    checkpoints_bytes: int = Field(
        default=64 << 30, ge=1 << 20, description="Budget of a run's checkpoint images in memory and on disk together."
    )
    drain_s: float = Field(
        default=30.0, ge=0, description="How long closing waits for background writes (run.durability = host)."
    )


class PolicyConfig(_Section):
    """When to checkpoint."""

    name: Literal["adaptive", "always", "never", "every-n", "young-daly", "paper"] = Field(
        default="adaptive", description="Who decides; docs/policy.md compares them."
    )
    every: int = Field(default=2, ge=1, description="For `every-n`: actions between checkpoints.")
    mtbf_s: float = Field(
        default=3600.0, gt=0, description="Time between failures of an environment to believe in until some were seen."
    )


class RecoveryConfig(_Section):
    """How often to try again, and when to give up visibly."""

    infra_retries: int = Field(default=8, ge=0, description="Sandbox recoveries of one attempt before it fails.")
    attempts: int = Field(
        default=2, ge=1, description="Attempts of a rollout that infrastructure made fail, the first included."
    )
    agent_retries: int = Field(
        default=0, ge=0, description="Fresh starts of a rollout whose own function raised; infrastructure is apart."
    )
    deaths_per_action: int = Field(
        default=3, ge=1, description="Deaths of the environment during one action before the rollout is set aside."
    )
    group: Literal["fail", "replace"] = Field(
        default="fail",
        description="What follows when a rollout failed for good: its group fails, or gets another draw instead.",
    )
    replacements: int = Field(default=2, ge=1, description="For `replace`: draws that one group may get instead.")
    quarantine: int = Field(
        default=3, ge=1, description="Rollouts of one task or image that fail for good before the rest are not tried."
    )
    breaker: int = Field(
        default=20, ge=1, description="Consecutive infrastructure failures without progress that stop the run."
    )
    no_progress_s: float = Field(
        default=600.0, gt=0, description="Nothing journalled for so long although rollouts are under way: stop."
    )
    restore_timeout_s: float = Field(default=30.0, gt=0, description="Deadline of one restore, or one new container.")


class RunConfig(_Section):
    """One run: where it lives and how durable it is."""

    seed: int = Field(default=0, description="What every rollout's own seed is derived from.")
    max_concurrent: int = Field(default=32, ge=1, description="Rollouts in flight.")
    durability: Literal["process", "host"] = Field(
        default="process", description="process: survives SIGKILL of every process. host: also a reboot (fsync)."
    )
    retention: Literal["keep", "archive", "drop"] = Field(
        default="keep",
        description="Tool outputs of acknowledged rollouts: kept, moved to compressed files, or deleted.",
    )
    segment_bytes: int = Field(
        default=64 << 20, ge=4096, description="Size of a journal segment; retention goes over those that are full."
    )


class TrainConfig(_Section):
    """The training job of `belayer train`."""

    task: str = Field(description="`file.py:Name` of the task, relative to the configuration file.")
    model: str = Field(default="", description="`file.py:function` that makes the model folder, or a folder.")
    steps: int = Field(default=30, ge=1)
    groups: int = Field(default=8, ge=1, description="Prompts per optimiser step.")
    group_size: int = Field(default=4, ge=2, description="Rollouts per prompt.")
    learning_rate: float = Field(default=5e-4, gt=0)
    temperature: float = Field(default=1.0, gt=0, description="What the task's function samples with.")
    threads: int = Field(
        default=1, ge=1, description="Compute threads of the trainer. Another number gives other roundings."
    )
    warm_start_steps: int = Field(default=0, ge=0, description="Supervised steps before RL.")
    warm_start_batch: int = Field(default=32, ge=1, description="Demonstrations per supervised step.")
    warm_start_learning_rate: float = Field(default=3e-3, gt=0)


class ObserveConfig(_Section):
    """Who may watch a run, and what its events are sent to."""

    record: bool = Field(
        default=True, description="Keep every event in the run's folder (metrics.jsonl): status and reports need them."
    )
    metrics_port: int | None = Field(
        default=None, ge=0, le=65535, description="Serve Prometheus metrics here; 0: any free port; unset: nowhere."
    )
    metrics_host: str = Field(
        default="127.0.0.1", description="Address to serve metrics on. They are open to all who reach it."
    )
    exporters: tuple[Literal["opentelemetry", "tensorboard", "wandb"], ...] = Field(
        default=(), description="Send the events to these too; each needs its package."
    )


class FaultsConfig(_Section):
    """What `--inject` does, at seeded random moments spread over the run."""

    inject: bool = False
    worker_kill: int = Field(default=4, ge=0, description="SIGKILL of the serving worker.")
    worker_stop: int = Field(default=2, ge=0, description="SIGSTOP of the serving worker.")
    sandbox_kill: int = Field(default=8, ge=0, description="SIGKILL of a sandbox's init.")
    sandbox_damage: int = Field(default=4, ge=0, description="rm -rf of system folders from outside the sandbox.")


class Config(_Section):
    """Everything. Each section has its own class above."""

    run: RunConfig = Field(default_factory=RunConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    sandbox: SandboxConfig = Field(default_factory=SandboxConfig)
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    recovery: RecoveryConfig = Field(default_factory=RecoveryConfig)
    train: TrainConfig | None = None
    faults: FaultsConfig = Field(default_factory=FaultsConfig)
    observe: ObserveConfig = Field(default_factory=ObserveConfig)


def load_config(path: Path | None = None, overrides: dict[str, Any] | None = None) -> Config:
    """Read `path` (TOML), apply `BELAYER_<SECTION>__<KEY>` variables, then `overrides` ({"engine.standby": "none"}).

    Raises `ConfigError` that names the file, the key, what was wrong and, for an unknown key, the nearest known one.
    """
    data: dict[str, Any] = {}
    if path is not None:
        try:
            data = tomllib.loads(path.read_text())
        except FileNotFoundError:
            raise ConfigError(f"no configuration file at {path}", next_step="check the path") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
            raise ConfigError(f"{path} cannot be read as TOML: {error}") from None
    for name, value in os.environ.items():
        if name.startswith("BELAYER_") and "__" in name:
            section, _, key = name.removeprefix("BELAYER_").lower().partition("__")
            _put(data, f"{section}.{key}", value)
    for dotted, value in (overrides or {}).items():
        if value is not None:
            _put(data, dotted, value)
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_explain(error, path)) from None


def _put(data: dict[str, Any], dotted: str, value: Any) -> None:
    section, _, key = dotted.partition(".")
    table = data.setdefault(section, {})
    if not isinstance(table, dict):
        raise ConfigError(f"[{section}] must be a table")
    table[key] = value


def _explain(error: ValidationError, path: Path | None) -> str:
    where = str(path) if path else "the configuration"
    problems = []
    for item in error.errors():
        dotted = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            near = _nearest(dotted)
            hint = f"; did you mean `{near}`?" if near else f"; known here: {_siblings(dotted)}"
            problems.append(f"unknown key `{dotted}`{hint}")
        else:
            problems.append(f"`{dotted}`: {item['msg']} (got {item['input']!r})")
    return f"{where}: " + "; ".join(problems)


def _nearest(dotted: str) -> str | None:
    """The known key that was probably meant: one of the same section, else the same name in another section."""
    section, _, name = dotted.rpartition(".")
    names = [key.rpartition(".")[2] for key in _known_keys() if key.rpartition(".")[0] == section]
    if close := difflib.get_close_matches(name, names, n=1, cutoff=0.6):
        return f"{section}.{close[0]}" if section else close[0]
    return next((key for key in _known_keys() if key.rpartition(".")[2] == name), None)


def _known_keys() -> list[str]:
    keys = []
    for section, field in Config.model_fields.items():
        keys.append(section)
        keys.extend(f"{section}.{name}" for name in _section_class(section, field.annotation).model_fields)
    return keys


def _section_class(section: str, annotation: Any) -> type[_Section]:
    return TrainConfig if section == "train" else annotation


def _siblings(dotted: str) -> str:
    section = dotted.partition(".")[0]
    inside = [key for key in _known_keys() if key.startswith(f"{section}.")]
    return ", ".join(inside or list(Config.model_fields))
