"""One workload of `belayer bench env`: kill and restore, again and again, and between two kills its baselines."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from belayer.checkpoint.manifest import Manifest
from belayer.errors import BelayerError
from belayer.sandbox import Sandbox, Sandboxes, images
from belayer.sandbox.store import Store

from ._env_podman import PlainPodman, PodmanBox, bring_lo_up
from ._env_state import READY_S, must
from ._env_workloads import Action, State, Workload, begin, differences, look, perform

IMAGE_PREFIX = "bench-"
FORKS = 8
# what is damaged after a checkpoint, so that a restore that restores nothing is found out
_DAMAGE = [Action("step lost; echo lost > /data/lost; cd /; unset MODE; kill $job")]


@dataclass(frozen=True)
class Stage:
    """What all workloads share. A baseline that cannot run is the reason why."""

    manager: Sandboxes
    podman: PlainPodman | str
    second: Sandboxes | str  # the podman runtime


@dataclass(frozen=True)
class Effort:
    """At least `least` samples, at most `most`, and no further one after `budget_s` seconds; the first `forks` fork."""

    least: int
    most: int
    budget_s: float
    forks: int = 3


@dataclass
class Cell:
    """All samples of one workload, in seconds."""

    stage: Stage
    workload: Workload
    subject: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)
    manifests: list[Manifest] = field(default_factory=list)
    forks: list[float] = field(default_factory=list)
    baselines: dict[str, list[float]] = field(default_factory=dict)
    podman_checkpoints: list[float] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    checks: dict[str, int] = field(default_factory=dict)
    podman_box: PodmanBox | None = None
    second_box: Sandbox | None = None

    async def run(self, effort: Effort) -> dict[str, Any]:
        """Measure it. Raises `RuntimeError` when the workload itself does not work."""
        names = ("files", "shell", "memory", "jobs", "http")
        self.checks = {"restores_checked": 0, **{f"{name}_changed": 0 for name in names}, "forks_changed": 0}
        manager, work = self.stage.manager, self.workload
        box = await manager.create("subject")
        await begin(box, work)
        end = time.monotonic() + effort.budget_s
        for sample in range(effort.most):
            if sample >= effort.least and time.monotonic() > end:
                break
            await perform(box, work.turn(sample))
            state = await look(box, work, sample)
            manifest = await box.checkpoint(action=sample)
            self.manifests.append(manifest)
            if sample < effort.forks:
                await self._fork(box, state)
            await perform(box, _DAMAGE)
            box, took_s = await self._kill_and_restore(manager, box, manifest)
            self.subject.append(took_s)
            self.checks["restores_checked"] += 1
            for part in await differences(box, work, state):
                self.checks[f"{part}_changed"] += 1
            # the questions of this check are part of the state from here on
            await self._baselines(manifest, state)
        await self._end()
        return self._result()

    async def _kill_and_restore(
        self, manager: Sandboxes, box: Sandbox, manifest: Manifest, *, count: bool = True
    ) -> tuple[Sandbox, float]:
        seen = asyncio.get_running_loop().create_future()
        box.on_death(lambda: seen.set_result(time.perf_counter()))
        killed = time.perf_counter()
        os.kill(box.init_pid, signal.SIGKILL)
        detected = await asyncio.wait_for(seen, READY_S)
        fresh = await manager.restore(box.name, manifest.id)
        restored = time.perf_counter()
        first = await fresh.exec("true")
        answered = time.perf_counter()
        must(first, "the first command after the restore")
        if count:
            # root and verify run side by side, so the phases inside may add up to more than the restore
            inside = {f"restore.{name}": seconds for name, seconds in fresh.restore_phases.items()}
            outside = {"detect_s": detected - killed, "restore_s": restored - detected}
            self.phases.append({**outside, **inside, "first_exec_s": answered - restored})
        return fresh, answered - killed

    async def _fork(self, box: Sandbox, state: State) -> None:
        """From the call until every fork has answered a command."""
        begun = time.perf_counter()
        forks = await box.fork(FORKS)
        answers = await asyncio.gather(*(fork.exec("cat /data/log") for fork in forks))
        self.forks.append(time.perf_counter() - begun)
        log = must(await box.exec("cat /data/log"), "the log")
        self.checks["forks_changed"] += sum(answer.stdout.decode() != log for answer in answers)
        self.checks["forks_changed"] += bool(await differences(forks[-1], self.workload, state))
        for fork in forks:
            await self.stage.manager.discard(fork.name)

    # -- baselines -----------------------------------------------------------------------------------------------------
    async def _baselines(self, manifest: Manifest, state: State) -> None:
        turns = [action for number in range(state.turn + 1) for action in self.workload.turn(number)]
        everything = [*self.workload.setup, *turns]
        await self._made_again("new_container_replay", None, everything, state)
        await self._fs_only(manifest, state)
        if "podman" not in self.skipped:
            try:
                await self._podman(state)
            except BelayerError as error:  # podman's own failure, not Belayer's: no figures, and the reason
                self.skipped["podman"] = error.what
                self.baselines.pop("podman", None)
        await self._second_runtime(state)

    async def _made_again(self, name: str, image: str | None, actions: list[Action], state: State) -> None:
        """A new container with these actions, which must lead to `state`."""
        begun = time.perf_counter()
        box = await self.stage.manager.create("baseline", image=image)
        if image is None:
            for path, data in self.workload.files.items():
                await box.write(path, data)
        await perform(box, actions)
        must(await box.exec("true"), "a baseline's first command")
        self._note(name, time.perf_counter() - begun, await differences(box, self.workload, state, again=True))
        await self.stage.manager.discard("baseline")

    async def _fs_only(self, manifest: Manifest, state: State) -> None:
        """The file system of the checkpoint, and the actions again that made processes and shell state."""
        store = self.stage.manager.store
        name = await asyncio.to_thread(_image_of, self.stage.manager, manifest)
        try:
            actions = [action for action in self.workload.setup if not action.files_only]
            # the last turn set a variable, and wrote to a file that is there already
            actions.append(Action(f"turn={state.turn}"))
            await self._made_again("fs_only_restore", name, actions, state)
        finally:
            await asyncio.to_thread(images.remove, store, name)

    async def _podman(self, state: State) -> None:
        """The same state in a container of plain podman's: checkpoint, kill, restore under a new name, and so on."""
        podman, work = self.stage.podman, self.workload
        if isinstance(podman, str):
            self.skipped["podman"] = podman
            return
        if self.podman_box is None:
            self.podman_box = await podman.create()
            await begin(self.podman_box, work)
        box = self.podman_box
        await perform(box, work.turn(state.turn))
        here = await look(box, work, state.turn)
        with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="belayer-bench-") as folder:
            archive = Path(folder) / "checkpoint.tar"
            self.podman_checkpoints.append(await podman.checkpoint(box, archive))
            await perform(box, _DAMAGE)
            pid = box.pid
            begun = time.perf_counter()
            await podman.kill(pid)
            restored = await podman.restore(box, archive)
            must(await restored.exec("true"), "podman's first command")
            took_s = time.perf_counter() - begun
        await asyncio.to_thread(bring_lo_up, restored.pid)
        self._note("podman", took_s, await differences(restored, work, here))
        await podman.remove(box)
        self.podman_box = restored

    async def _second_runtime(self, state: State) -> None:
        """The same state under Belayer's podman runtime."""
        manager, work = self.stage.second, self.workload
        if isinstance(manager, str):
            self.skipped["podman_runtime"] = manager
            return
        if self.second_box is None:
            self.second_box = await manager.create("second")
            await begin(self.second_box, work)
        box = self.second_box
        await perform(box, work.turn(state.turn))
        here = await look(box, work, state.turn)
        manifest = await box.checkpoint(action=state.turn)
        await perform(box, _DAMAGE)
        self.second_box, took_s = await self._kill_and_restore(manager, box, manifest, count=False)
        self._note("podman_runtime", took_s, await differences(self.second_box, work, here))

    async def _end(self) -> None:
        await self.stage.manager.discard("subject")
        if self.podman_box is not None and not isinstance(self.stage.podman, str):
            await self.stage.podman.remove(self.podman_box)
        if self.second_box is not None and not isinstance(self.stage.second, str):
            await self.stage.second.discard("second")

    def _note(self, name: str, took_s: float, wrong: set[str]) -> None:
        self.baselines.setdefault(name, []).append(took_s)
        key = f"{name}_differs"
        self.checks[key] = self.checks.get(key, 0) + bool(wrong)

    # -- the figures ---------------------------------------------------------------------------------------------------
    def _result(self) -> dict[str, Any]:
        phases = {name: statistics.median(p.get(name, 0.0) for p in self.phases) for name in self.phases[0]}
        timings = [manifest.timings for manifest in self.manifests]
        return {
            "workload": self.workload.name,
            "actions": len(self.workload.setup),
            "subject": {**series(self.subject), "phases_s": phases},
            "checkpoint": {
                "frozen": series([t.frozen_s for t in timings]),
                "total": series([t.total_s for t in timings]),
                "dump": series([t.dump_s for t in timings]),
                "fs": series([t.fs_s for t in timings]),
                "image_bytes": statistics.median(manifest.image_bytes for manifest in self.manifests),
            },
            "fork_of_8": series(self.forks),
            "podman_checkpoint": series(self.podman_checkpoints) if self.podman_checkpoints else None,
            "baselines": {
                **{name: series(samples) for name, samples in self.baselines.items()},
                **{name: {"skipped": reason} for name, reason in self.skipped.items()},
            },
            "ratios": {name: self._ratio(samples) for name, samples in self.baselines.items()},
            "checks": self.checks,
        }

    def _ratio(self, samples: list[float]) -> float:
        return statistics.median(b / s for b, s in zip(samples, self.subject, strict=False))


def series(samples: list[float]) -> dict[str, Any]:
    """Median, quartiles and every sample."""
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3
    return {"median_s": statistics.median(samples), "quartiles_s": [low, high], "samples_s": samples}


def _image_of(manager: Sandboxes, manifest: Manifest) -> str:
    """The checkpoint's file system as an image: what a restore without process images would start from."""
    name = f"{IMAGE_PREFIX}{manager.label.name}"
    images.remove(manager.store, name)
    (manager.store.images / name).symlink_to(manager.checkpoints.data.snapshots / manifest.id)
    info = images.ImageInfo(name, manifest.fs_identity, manifest.id, images.RECIPE, time.time(), 0, 0)
    (manager.store.images / f"{name}.json").write_bytes(msgspec.json.encode(info))
    return name


def remove_images_of_dead_runs(store: Store, alive: set[str]) -> None:
    """A killed benchmark leaves its image in the store: the next one removes it."""
    for path in store.images.glob(f"{IMAGE_PREFIX}bly-*"):
        name = path.name.removesuffix(".json")
        if name.removeprefix(IMAGE_PREFIX) not in alive:
            images.remove(store, name)
