"""Engines from an image: built beside a living engine, restored, killed, damaged; never a token that differs."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.conftest import needs_root, needs_vllm
from tests.engine_kit import Journal, complete, engine_config, make_model, random_weights, requests

from belayer import events as ev
from belayer.engine import Engine
from belayer.engine._model_folder import inspect
from belayer.engine._wire import Spec
from belayer.engine.images import depot
from belayer.engine.images.key import key_of
from belayer.engine.images.restore import NOBODY
from belayer.engine.images.store import FOLDER, Meta, check_files
from belayer.engine.images.template import BAKED
from belayer.engine.workers.child import environment
from belayer.errors import BelayerError
from belayer.ownership import ENV_VAR, RunLabel
from belayer.ownership.reap import label_of_process, reap


def _no_criu() -> str:
    from belayer.sandbox.criu import find_criu

    try:
        find_criu()
    except BelayerError as error:
        return error.what
    return ""


pytestmark = [
    pytest.mark.crash,
    needs_vllm,
    needs_root,
    pytest.mark.skipif(bool(_no_criu()), reason=f"images need CRIU: {_no_criu()}"),
]

COUNT = 4
WAIT_S = 240.0  # of a machine that others use too
SETTINGS: dict[str, Any] = {"images": True, "max_num_seqs": 4, "max_model_len": 384}


class Built:
    """The image that one engine had built, what that engine said, and what happened meanwhile."""

    def __init__(self, model: Path, cache: Path) -> None:
        self.model = model
        self.cache = cache
        self.reference: Journal
        self.cold_s = 0.0
        """From nothing to a worker that serves, without an image."""
        self.events: list[ev.Event] = []

    def states(self) -> list[str]:
        return [event.data["state"] for event in self.events if event.kind == ev.ENGINE_IMAGE]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    """An engine without an image starts as ever and gets one; a worker dies while that is being built."""
    from belayer.sandbox.criu import find_criu

    folder = tmp_path_factory.mktemp("images")
    found = Built(make_model(folder / "model"), folder / "cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BELAYER_CRIU", str(find_criu()))
        patch.setenv("BELAYER_CACHE", str(found.cache))
        patch.setattr(depot, "QUIET_S", 0.0)
        patch.setattr(depot, "BUILD_NICE", 0)  # nobody else waits
        asyncio.run(_build(found))
        yield found


async def _build(found: Built) -> None:
    def since(state: str) -> int:
        return found.states().count(state)

    began = time.monotonic()
    async with _engine(found.model, found.events) as engine:
        found.cold_s = time.monotonic() - began
        assert engine._fleet._spawner.nursery is not None and since("restored") == 0
        found.reference = await complete(engine, requests(COUNT))
        await engine.wait_standby(WAIT_S)
        await _until(lambda: since("building") == 1)
        # a recovery ends the build, and when all is well again it is begun anew
        await _fault(engine, found.reference, signal.SIGKILL)
        await engine.wait_standby(WAIT_S)
        await _until(lambda: since("building") == 2)
        await _until(lambda: since("built") == 1 or since("none") == 1)
        assert since("built") == 1, found.events
        # and the next shadow comes from it
        await _fault(engine, found.reference, signal.SIGKILL)
        await engine.wait_standby(WAIT_S)
        await _until(lambda: since("restored") == 1)


@asynccontextmanager
async def _engine(model: Path, events: list[ev.Event], **changes: Any) -> AsyncIterator[Engine]:
    """An engine whose whole label is gone afterwards."""
    began = time.monotonic()

    def sink(event: ev.Event) -> None:
        events.append(event)
        print(f"{time.monotonic() - began:7.2f} {event.kind} {event.subject} {event.data}", flush=True)

    with RunLabel.new("test engine images") as label:
        engine = await Engine.start(engine_config(model, **SETTINGS | changes), label, events=sink)
        try:
            yield engine
        finally:
            await engine.close()
        assert not _processes_of(label.name)


def _nursery(engine: Engine) -> bool:
    """Whether a nursery was needed."""
    return engine._fleet._spawner._nursery is not None


def _label(engine: Engine) -> str:
    return engine._fleet._spawner._env[ENV_VAR]


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


async def _fault(engine: Engine, reference: Journal, number: int, position: int = 7) -> None:
    """The worker gets a signal in the middle of every request; what comes out is what came out undisturbed."""
    journal = Journal()

    def strike() -> None:
        assert engine.worker_pid is not None
        os.kill(engine.worker_pid, number)

    journal.when_all_have(position, COUNT, strike)
    await asyncio.wait_for(complete(engine, requests(COUNT), journal), WAIT_S)
    assert journal.tokens == reference.tokens
    assert journal.logprobs == reference.logprobs


def _processes_of(label: str) -> list[int]:
    """Processes of a run that are not just waiting to be reaped, by what the reaper goes by."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and label_of_process(entry.name) == label:
            found.append(int(entry.name))
    return found


def _last(events: list[ev.Event], kind: str) -> dict[str, Any]:
    return next(event for event in reversed(events) if event.kind == kind).data


@pytest.mark.timeout(900)  # about 30 s on a quiet machine, most of it the one build
def test_engine_from_an_image(built: Built) -> None:
    """Nobody loads the checkpoint through vLLM, and nothing shows."""

    async def scenario() -> None:
        events: list[ev.Event] = []
        async with _engine(built.model, events, scrub_s=0.2) as engine:
            assert engine._fleet._spawner.nursery is None
            started = _last(events, ev.ENGINE_IMAGE)
            assert started["state"] == "restored" and started["ready_s"] < 5.0
            journal = await complete(engine, requests(COUNT))
            assert journal.tokens == built.reference.tokens
            assert journal.logprobs == built.reference.logprobs
            await engine.wait_standby(WAIT_S)

            # the label is where the reaper looks for it, in the worker, the shadow, and the init above each
            name = _label(engine)
            assert len(_processes_of(name)) == 5  # with the owner
            await _fault(engine, built.reference, signal.SIGKILL)
            recovery = _last(events, ev.RECOVERED)
            assert recovery["how"] == "promotion"
            await engine.wait_standby(WAIT_S)
            await _fault(engine, built.reference, signal.SIGSEGV)
            assert _last(events, ev.RECOVERED)["how"] == "promotion"
            await engine.wait_standby(WAIT_S)
            ends = [event.data["state"] for event in events if event.kind == ev.WORKER_STATE]
            assert "killed by SIGKILL" in ends and "killed by SIGSEGV" in ends
            armed = [e.data["ready_s"] for e in events if e.kind == ev.ENGINE_IMAGE and e.data["state"] == "restored"]
            assert len(armed) == 4 and min(armed[2:]) < 1.0, armed  # the shadows after the two promotions

            # weights are the owner's: new ones reach worker and shadow
            await engine.update_weights(random_weights(seed=9), 1)
            changed = await complete(engine, requests(COUNT))
            assert changed.tokens != built.reference.tokens
            await _fault(engine, changed, signal.SIGKILL)
            await engine.wait_standby(WAIT_S)
            assert _last(events, ev.ENGINE_IMAGE)["state"] == "restored"
            assert engine._fleet._spawner.nursery is None

    asyncio.run(scenario())


@pytest.mark.timeout(900)
def test_engines_share_an_image_at_the_same_time(built: Built) -> None:
    async def one(tag: str) -> None:
        events: list[ev.Event] = []
        async with _engine(built.model, events, standby="none") as engine:
            assert _last(events, ev.ENGINE_IMAGE)["state"] == "restored"
            journal = await complete(engine, requests(COUNT, tag=tag))
            expected = {tag + name[1:]: tokens for name, tokens in built.reference.tokens.items()}
            assert journal.tokens == expected

    async def scenario() -> None:
        await asyncio.gather(*(one(tag) for tag in "abc"))

    asyncio.run(scenario())


@pytest.mark.timeout(900)
def test_the_image_alone_stands_by(built: Built) -> None:
    """No standby process; the death of the worker is met by a restore."""

    async def scenario() -> None:
        events: list[ev.Event] = []
        async with _engine(built.model, events, standby="image") as engine:
            await engine.wait_standby(WAIT_S)
            assert engine.shadow_pid is None
            assert len(_processes_of(_label(engine))) == 3  # owner, init, worker
            took: list[float] = []
            for number, fault in (
                (signal.SIGKILL, "worker.exit"),
                (signal.SIGSTOP, "worker.hang"),
                (signal.SIGABRT, "worker.exit"),
            ):
                await _fault(engine, built.reference, number)
                recovery = _last(events, ev.RECOVERED)
                assert recovery["how"] == "image" and recovery["fault"] == fault
                took.append(recovery["total_s"])
            # until every request has its next token, against a mere start
            assert 20 * min(took) < built.cold_s, took
            assert engine._fleet._spawner.nursery is None

    asyncio.run(scenario())


@asynccontextmanager
async def _depot(built: Built, events: list[ev.Event], **changes: Any) -> AsyncIterator[depot.Depot]:
    config = engine_config(built.model, **SETTINGS | changes)
    with RunLabel.new("test engine images") as label:
        env = environment(label, config.threads, config.batch_invariant)
        found = depot.Depot(config, inspect(config), label, env, label.dir / "engine", events.append)
        try:
            yield found
        finally:
            await found.close()


@pytest.mark.timeout(300)
def test_another_key_has_no_image(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    async def found(**changes: Any) -> tuple[bool, list[ev.Event]]:
        events: list[ev.Event] = []
        async with _depot(built, events, **changes) as images:
            return await images.find() is not None, events

    async def scenario() -> None:
        assert (await found()) == (True, [])
        for changes in ({"max_num_seqs": 5}, {"kv_bytes": 33 << 20}, {"threads": 1}, {"batch_invariant": False}):
            assert (await found(**changes))[0] is False, changes
        there, events = await found(images=False)
        assert not there and not events
        monkeypatch.setenv("VLLM_CPU_SGL_KERNEL", "1")  # a setting that the process has read at its start
        assert (await found())[0] is False
        monkeypatch.delenv("VLLM_CPU_SGL_KERNEL")
        config = built.model / "config.json"
        text = config.read_text()
        config.write_text(text.replace('"rope_theta": 10000.0', '"rope_theta": 20000.0'))
        assert (await found())[0] is False
        config.write_text(text)
        assert (await found())[0] is True

    asyncio.run(scenario())


@pytest.mark.timeout(300)
def test_without_criu_there_is_a_reason(built: Built, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from belayer.sandbox.criu import find_criu

    old = tmp_path / "criu"
    old.write_text("#!/bin/sh\necho Version: 3.17.1\n")
    old.chmod(0o755)
    monkeypatch.setenv("BELAYER_CRIU", str(old))
    monkeypatch.setenv("PATH", "/nowhere")

    async def scenario() -> None:
        events: list[ev.Event] = []
        async with _depot(built, events) as images:
            assert await images.find() is None and await images.find() is None
            assert "no CRIU 4.2 or newer" in images.why_not
        (event,) = events  # said once
        assert event.data["state"] == "none" and "no CRIU 4.2 or newer" in event.data["reason"]

    find_criu.cache_clear()
    try:
        asyncio.run(scenario())
    finally:
        monkeypatch.undo()
        find_criu.cache_clear()


DRIVER = """
import asyncio, sys
from pathlib import Path
from tests.engine_kit import engine_config, requests, Journal
from belayer.engine import Engine
from belayer.ownership import ENV_VAR, RunLabel

async def main():
    label = RunLabel.new("engine image driver test")
    print(label.name, flush=True)
    engine = await Engine.start(engine_config(Path(sys.argv[1]), images=True, max_num_seqs=4, max_model_len=384), label)
    await engine.wait_standby(120)
    print(engine.owner_pid, engine.worker_pid, engine.shadow_pid, flush=True)
    print("from the nursery" if engine._fleet._spawner.nursery else "from the image", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("restoring_s", [None, 0.0, 0.01, 0.02, 0.04, 0.08])
def test_nothing_outlives_the_driver(built: Built, restoring_s: float | None) -> None:
    """Killed while all stands by (None), or so long after CRIU began to restore."""
    root = Path(__file__).parents[2]  # where `-c` finds these tests
    shared = Path("/dev/shm")
    before = set(shared.iterdir())
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(built.model)], stdout=subprocess.PIPE, text=True, cwd=root
    ) as driver:
        try:
            assert driver.stdout is not None
            name = driver.stdout.readline().strip()
            if restoring_s is None:
                pids = [int(word) for word in driver.stdout.readline().split()]
                assert driver.stdout.readline() == "from the image\n"
                assert len(pids) == 3 and set(pids) <= set(_processes_of(name))
            else:
                deadline = time.monotonic() + WAIT_S
                while not _restoring(name):
                    assert time.monotonic() < deadline and driver.poll() is None
                    time.sleep(0.001)
                time.sleep(restoring_s)
        finally:
            driver.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 2.0
    while (_processes_of(name) or _unlabelled()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _processes_of(name) and not _unlabelled()
    reap()
    assert not Path("/run/belayer", name).exists() and not Path("/dev/shm/belayer", name).exists()
    assert {file for file in shared.iterdir() if file.name != "criu.kdat"} <= before


def _restoring(label: str) -> bool:
    """Whether CRIU is at work for this run."""
    for pid in _processes_of(label):
        try:
            if Path(f"/proc/{pid}/comm").read_text() == "criu\n":
                return True
        except OSError:
            continue
    return False


def _unlabelled() -> list[int]:
    """Processes that were restored and have not been given a run's label."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{ENV_VAR}={NOBODY}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.timeout(300)
def test_an_abandoned_restore_leaves_nothing(built: Built) -> None:
    """The engine is closed, or the start is cut off, while CRIU is at work."""

    async def abandoned(after_s: float) -> None:
        events: list[ev.Event] = []
        began = time.monotonic()
        async with _engine(built.model, events, standby="none") as engine:
            settings = {name: getattr(engine._config, name) for name in BAKED}
            owner = engine._fleet.owner.address
            spec = Spec(
                99, model=str(built.model), owner_socket=owner, fill=False, policy_version=0, nice=0, **settings
            )
            images = engine._fleet._spawner.images
            start = asyncio.ensure_future(images.start(lambda: spec, images._log_dir / "abandoned.log"))
            await asyncio.sleep(after_s)
            start.cancel()
            outcome = (await asyncio.gather(start, return_exceptions=True))[0]
            assert isinstance(outcome, asyncio.CancelledError)
            assert len(_processes_of(_label(engine))) == 3  # owner, init, worker
            assert (await complete(engine, requests(COUNT))).tokens == built.reference.tokens
        assert time.monotonic() - began < WAIT_S

    async def scenario() -> None:
        for after_s in (0.01, 0.03, 0.06):
            await abandoned(after_s)

    asyncio.run(scenario())


@pytest.mark.timeout(300)
def test_an_engine_that_is_closed_ends_its_builder(built: Built) -> None:
    async def scenario() -> None:
        events: list[ev.Event] = []
        config = engine_config(built.model, **SETTINGS | {"max_num_seqs": 3})
        with RunLabel.new("test engine images") as label:
            env = environment(label, config.threads, config.batch_invariant)
            images = depot.Depot(config, inspect(config), label, env, label.dir / "engine", events.append)
            assert await images.find() is None
            settings = {name: getattr(config, name) for name in BAKED} | {"model": str(built.model)}
            spec = Spec(0, fill=True, owner_socket="", policy_version=0, nice=0, **settings)
            images.quiet(True, lambda: spec)
            await _until(lambda: len(_processes_of(label.name)) == 4)  # builder, its helper, init, worker
            await images.close()
            assert not _processes_of(label.name)
        assert [event.data["state"] for event in events] == ["building", "cut off"]

    asyncio.run(scenario())


@pytest.mark.timeout(300)
def test_an_image_is_given_up_only_after_two_failures_in_a_row(
    built: Built, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A worker that fails may have been killed, or have lost its owner: that is no proof against its image."""
    shutil.copytree(built.cache / FOLDER, tmp_path / FOLDER, copy_function=os.link)
    monkeypatch.setenv("BELAYER_CACHE", str(tmp_path))

    async def scenario() -> None:
        events: list[ev.Event] = []
        async with _engine(built.model, events, standby="none") as engine:
            images = engine._fleet._spawner.images
            owner = engine._fleet.owner.address
            settings = {name: getattr(engine._config, name) for name in BAKED}

            async def started(owner: str) -> str:
                model = str(built.model)
                spec = Spec(99, model=model, owner_socket=owner, fill=False, policy_version=0, nice=0, **settings)
                made = await images.start(lambda: spec, images._log_dir / "doubted.log")
                if made is not None:
                    await made[0].fence(WAIT_S)
                return _last(events, ev.ENGINE_IMAGE)["state"]

            nobody = str(tmp_path / "nobody listens here")
            assert await started(nobody) == "doubted"
            assert await started(owner) == "restored"  # which ends the doubt
            assert await started(nobody) == "doubted"
            assert await images.find() is not None
            assert await started(nobody) == "refused"
            assert "a worker restored from it failed" in _last(events, ev.ENGINE_IMAGE)["reason"]
            assert await images.find() is None and not list((tmp_path / FOLDER).glob("*/meta.json"))

    asyncio.run(scenario())


@pytest.mark.timeout(900)
def test_images_that_fail_are_refused_and_the_engine_starts_without(built: Built) -> None:
    """Two kinds of failure; the last one in a whole engine, which comes up through the nursery."""
    config = engine_config(built.model, **SETTINGS)
    name = key_of(config, environment(RunLabel("bly-00000000", -1), 0, True)).name
    folder = built.cache / FOLDER / name
    kept = folder.with_name("kept")

    def put_back() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(kept, folder, copy_function=os.link)

    def spoil(file: str, at: int) -> None:
        content = bytearray((folder / file).read_bytes())
        content[at] ^= 0xFF
        (folder / file).unlink()  # the kept one is the same file
        (folder / file).write_bytes(content)

    async def damaged(events: list[ev.Event]) -> None:
        spoil("pages-1.img", 5000)
        async with _depot(built, events) as images:
            assert await images.find() is None
        assert "the checksum of pages-1.img is wrong" in _last(events, ev.ENGINE_IMAGE)["reason"]

    async def does_not_restore(events: list[ev.Event]) -> None:
        """As when a library is another file now, which no checksum of ours covers."""
        spoil("files.img", 40)
        meta = msgspec.json.decode((folder / "meta.json").read_bytes(), type=Meta)
        (folder / "meta.json").unlink()
        changed = msgspec.structs.replace(meta, files=check_files(folder))
        (folder / "meta.json").write_bytes(msgspec.json.encode(changed))
        async with _engine(built.model, events, standby="none") as engine:
            assert engine._fleet._spawner.nursery is not None
            refused = next(e.data for e in events if e.kind == ev.ENGINE_IMAGE)
            assert refused["state"] == "refused" and "CRIU cannot restore" in refused["reason"]
            journal = await complete(engine, requests(COUNT))
            assert journal.tokens == built.reference.tokens

    shutil.copytree(folder, kept, copy_function=os.link)
    for failure in (damaged, does_not_restore):
        put_back()
        asyncio.run(failure([]))
        assert not (folder / "meta.json").exists()
