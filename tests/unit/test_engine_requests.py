"""Which tokens count, which versions may meet, and whether a device may be used again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from belayer.engine import GenerationRequest, Sampling
from belayer.engine._wire import Chunk
from belayer.engine.device import HostHealth
from belayer.engine.lifecycle import OWNER, PROCESS, REQUEST, Lifecycle, RequestState, Rules
from belayer.engine.requests import Flight, Requests, Verdict
from belayer.engine.version_gate import VersionGate
from belayer.errors import ForbiddenTransition, WeightsError

pytestmark = pytest.mark.unit


def table(*lengths: int) -> tuple[Requests, list[Flight]]:
    requests = Requests(lambda: 0.0)
    flights = []
    for number, length in enumerate(lengths):
        request = GenerationRequest(id=f"r{number}", prompt_ids=[1] * length, sampling=Sampling(max_tokens=9))
        flights.append(requests.add(request, lambda _chunk: None))
    return requests, flights


def chunk(flight: Flight, start: int, count: int = 1) -> Chunk:
    return Chunk(flight.key, start, [7] * count, [0.0] * count)


def test_only_the_worker_that_has_a_request_may_speak_for_it() -> None:
    requests, (flight,) = table(3)
    requests.give(flight, 4)
    assert requests.judge(3, 0, chunk(flight, 0)) == (Verdict.STALE, None)
    assert requests.judge(4, 0, chunk(flight, 0, 2)) == (Verdict.DELIVER, flight)
    requests.take_back(4)
    assert requests.judge(4, 0, chunk(flight, 2)) == (Verdict.STALE, None)
    assert requests.stale_tokens == 2
    assert [work.done_ids for work in requests.give_all(5)] == [[7, 7]]
    requests.end(flight, RequestState.CANCELLED)
    assert requests.judge(5, 0, chunk(flight, 2)) == (Verdict.STALE, None)


@pytest.mark.parametrize("start", [0, 1, 3])
def test_a_gap_or_a_repetition_is_never_delivered(start: int) -> None:
    requests, (flight,) = table(3)
    requests.give(flight, 1)
    requests.judge(1, 0, chunk(flight, 0, 2))
    assert requests.judge(1, 0, chunk(flight, start)) == (Verdict.BROKEN, flight)
    assert flight.done_ids == [7, 7]


def test_the_least_prefill_comes_first_and_all_of_it_counts_as_rebuilt() -> None:
    requests, flights = table(30, 10, 20)
    assert [work.id for work in requests.give_all(1)] == [flights[1].key, flights[2].key, flights[0].key]
    for flight in flights[:2]:
        requests.judge(1, 0, chunk(flight, 0))
        assert not requests.rebuilt
    requests.end(flights[2], RequestState.CANCELLED)  # nobody waits for it any more
    assert requests.rebuilt


def test_a_request_is_with_one_worker_at_a_time() -> None:
    requests, (flight,) = table(3)
    requests.give(flight, 1)
    with pytest.raises(ForbiddenTransition, match="a second worker would make the same tokens"):
        requests.give(flight, 2)
    assert flight.generation == 1


@pytest.mark.parametrize("rules", [PROCESS, OWNER, REQUEST], ids=lambda rules: rules.what)
def test_every_explained_step_is_forbidden_and_every_state_is_there(rules: Rules) -> None:
    for before, after in rules.because:
        assert after not in rules.steps[before]
        assert f"{before} is never followed by {after}, because" in rules.explain(before, after)
    assert set(rules.steps) == set(type(rules.start))
    reached, queue = {rules.start}, [rules.start]
    while queue:
        for state in rules.steps[queue.pop()] - reached:
            reached.add(state)
            queue.append(state)
    assert reached == set(rules.steps)
    life = Lifecycle(rules, lambda: 5.0)
    assert (life.state, life.since, life.ended) == (rules.start, 5.0, False)


def test_a_gate_that_allows_everything_never_holds_anybody() -> None:
    async def scenario() -> None:
        gate = VersionGate("allow")
        async with asyncio.timeout(1):
            await gate.enter("a")
            async with gate.update(asyncio.get_running_loop().time()):
                await gate.enter("b")

    asyncio.run(scenario())


def test_an_update_waits_for_open_trajectories_until_its_deadline() -> None:
    async def scenario() -> None:
        gate = VersionGate("finish_on_old")
        await gate.enter("old")
        await gate.leave("old", ended=False)
        with pytest.raises(WeightsError, match=r"1 trajectories did not end .*old"):
            async with gate.update(asyncio.get_running_loop().time() + 0.05):
                raise AssertionError
        await asyncio.wait_for(gate.enter("new"), 1)  # the gate is open again
        await gate.leave("new", ended=True)
        seen: list[str] = []

        async def update() -> None:
            async with gate.update(asyncio.get_running_loop().time() + 5):
                seen.append("update")

        async def newcomer() -> None:
            await gate.enter("newer")
            seen.append("newer")

        tasks = [asyncio.create_task(update())]
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(newcomer()))
        await asyncio.wait_for(gate.enter("old"), 1)  # it has begun, so it may finish
        seen.append("old")
        await gate.leave("old", ended=False)
        await gate.end("old")
        await asyncio.wait_for(asyncio.gather(*tasks), 1)
        assert seen == ["old", "update", "newer"]

    asyncio.run(scenario())


def test_a_host_with_new_memory_errors_is_not_well(tmp_path: Path) -> None:
    controller = tmp_path / "mc0"
    controller.mkdir()
    (controller / "ue_count").write_text("2\n")
    health = HostHealth(tmp_path)
    assert health.check() is None  # old errors are not ours
    (controller / "ue_count").write_text("3\n")
    assert health.check() == "memory controller mc0 had 1 uncorrectable error(s) since the engine started"
    assert HostHealth(tmp_path / "none").check() is None
