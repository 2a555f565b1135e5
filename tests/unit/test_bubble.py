"""Checkpoints under bubbles: each named state, and what the arrival of the reply does in it. Time is the test's own."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from belayer import events
from belayer.checkpoint.live_policy import LivePolicy
from belayer.checkpoint.moment import LOOK_S, SLACK, Moment
from belayer.checkpoint.policy import Adaptive, Always, Decision, EveryN, Learned, Never
from belayer.checkpoint.predictors import Contention, FailureRate
from belayer.checkpoint.turns import Turn, Turns
from belayer.config import PolicyConfig
from belayer.errors import CheckpointRefused, SandboxLost, StorageFull
from belayer.journal import Journal
from belayer.journal import records as r
from belayer.recovery.bubble import BubbleCheckpoint, BubbleState

pytestmark = pytest.mark.unit
MB = 1 << 20


class Box:
    """A sandbox whose dump lasts until the test ends it."""

    generation = 1

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.resident = 10 * MB
        self.unchanged_since = ""
        self.error: Exception | None = None
        self.end = asyncio.Event()
        self.dumps = 0

    def resident_bytes(self) -> int:
        return self.resident

    async def changed_since(self, checkpoint: str) -> str:
        return "" if checkpoint == self.unchanged_since else "1 commands ran"

    async def checkpoint(self, *, action: int, turn: Turn, **_: Any) -> Any:
        async with self.turns.taken(turn):
            await self.end.wait()
            if self.error:
                raise self.error
            self.dumps += 1
            return SimpleNamespace(id=f"c{action}", level="full", image_bytes=1, timings=SimpleNamespace(frozen_s=0.01))


class Scene:
    """One rollout with its journal, its order of dumps, and a clock that only the test moves."""

    def __init__(self, folder: Path, policy: Any, turns: Turns | None = None) -> None:
        self.now = 0.0
        self.policy = policy
        self.journal = Journal(folder / "journal")
        self.turns = turns or Turns(folder / "turns", at_once=1, clock=lambda: self.now, later=lambda delay, work: None)
        self.box = Box(self.turns)
        self.problem: str | None = None
        self.lost: list[str] = []
        self.events: list[events.Event] = []
        self.wakes: list[tuple[float, asyncio.Event]] = []
        self.journal.record(r.RolloutStarted(rollout="x", group="g", task=None, seed=1))
        self.bubble = BubbleCheckpoint(
            "x",
            0,
            journal=self.journal,
            policy=policy,
            dumping=lambda: 0,
            examine=self._examine,
            lose=lambda _, why: self.lost.append(why),
            sink=self.events.append,
            clock=lambda: self.now,
            pause=self._pause,
        )

    async def _examine(self, _: object) -> str | None:
        return self.problem

    async def _pause(self, reply: asyncio.Event, seconds: float) -> None:
        wake = asyncio.Event()
        self.wakes.append((self.now + seconds, wake))
        waits = [asyncio.create_task(event.wait()) for event in (reply, wake)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            each.cancel()

    async def pass_(self, seconds: float) -> None:
        self.now += seconds
        for at, wake in self.wakes:
            if at <= self.now:
                wake.set()
        await settle()

    def act(self, wall_s: float = 1.0) -> None:
        history = self.journal.history("x")
        call, k = len(history.calls), len(history.actions()) + 1
        result = {"exec": {"exit_code": 0, "wall_s": wall_s}}
        self.journal.record(r.ActionIntended(rollout="x", call=call, k=k, g=1, asked="do"))
        self.journal.record(r.ActionCompleted(rollout="x", call=call, k=k, g=1, observed="o", result=result))

    async def begin(self, **options: Any) -> None:
        self.bubble.begin(self.box, restore_s=0.1, **options)  # pyright: ignore[reportArgumentType]
        await settle()

    async def publish(self) -> None:
        """One checkpoint from beginning to end."""
        self.act()
        await self.begin()
        self.box.end.set()
        await self.bubble.settle()
        self.box.end.clear()

    def said(self) -> list[tuple[str, str]]:
        """What the journal says of checkpoints, oldest first."""
        kinds = {r.CheckpointPublished: "taken", r.CheckpointSkipped: "not taken"}
        from belayer.journal import scan

        folder = self.journal._writer._folder
        found = [record for record in scan(folder) if type(record) in kinds]
        return [(kinds[type(record)], record.why) for record in found]  # pyright: ignore


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class Scripted(Always):
    """Takes in the bubble; after it, what `late` says."""

    name = "scripted"
    late = True

    def decide(self, situation: Any) -> Decision:
        if situation.bubble_over:
            return Decision(self.late, f"late: price 7 ms {'<=' if self.late else '>'} saved 5 ms")
        return Decision(True, "early: price 1 ms")


def in_scene(policy: Any):
    def run(test):
        def wrapped(tmp_path: Path) -> None:
            async def main() -> None:
                scene = Scene(tmp_path, policy())
                await test(scene)
                scene.turns.close()
                scene.journal.close()

            asyncio.run(main())

        wrapped.__name__ = test.__name__
        return wrapped

    return run


@in_scene(Scripted)
async def test_published_under_the_bubble(scene: Scene) -> None:
    assert scene.bubble.state is None
    scene.act()
    await scene.begin()
    assert scene.bubble.state is BubbleState.DUMPING
    await scene.begin()  # a second bubble before the first checkpoint is settled begins nothing
    scene.box.end.set()
    await settle()
    assert scene.bubble.state is BubbleState.DONE
    scene.bubble.bubble_over()
    await scene.bubble.settle()
    assert scene.bubble.state is None and scene.said() == [("taken", "early: price 1 ms")]
    (span,) = [event for event in scene.events if event.kind == events.CHECKPOINT]
    assert span.data["exposed_s"] == 0.0


@in_scene(Scripted)
async def test_what_dumps_when_the_reply_comes_is_waited_for(scene: Scene) -> None:
    scene.act()
    await scene.begin()
    scene.bubble.bubble_over()
    assert scene.bubble.state is BubbleState.DUMPING
    settling = asyncio.create_task(scene.bubble.settle())
    await settle()
    assert not settling.done()
    scene.box.end.set()
    await settling
    assert scene.said() == [("taken", "early: price 1 ms")]


async def queued(scene: Scene) -> asyncio.Task[None]:
    """The scene's checkpoint waits behind another one, which is returned and ends with `scene.box.end`."""

    async def other() -> None:
        async with scene.turns.taken(Turn()):
            await scene.box.end.wait()

    first = asyncio.create_task(other())
    await settle()
    scene.act()
    await scene.begin()
    assert scene.bubble.state is BubbleState.QUEUED
    await scene.pass_(0.25)
    return first


@in_scene(Scripted)
async def test_promoted_when_the_reply_comes_and_it_still_pays(scene: Scene) -> None:
    first = await queued(scene)
    third = Turn()
    waiting = asyncio.create_task(scene.box.checkpoint(action=9, turn=third))
    scene.bubble.bubble_over()
    assert scene.bubble.state is BubbleState.QUEUED
    scene.box.end.set()
    await scene.bubble.settle()
    await asyncio.gather(first, waiting)
    (kind, why), *more = scene.said()
    assert kind == "taken" and not more
    assert re.search(r"^early: .*promoted: .*after 0\.250 s; late: price 7 ms <= saved 5 ms", why)


@in_scene(Scripted)
async def test_abandoned_when_the_reply_comes_and_it_does_not_pay(scene: Scene) -> None:
    first = await queued(scene)
    scene.policy.late = False
    scene.bubble.bubble_over()
    await asyncio.wait_for(scene.bubble.settle(), 1)  # nothing is waited for: the other one still dumps
    assert not first.done() and scene.box.dumps == 0
    ((kind, why),) = scene.said()
    assert kind == "not taken" and re.search(r"^abandoned: .*after 0\.250 s; late: price 7 ms > saved 5 ms", why)
    (told,) = [event for event in scene.events if event.kind == events.CHECKPOINT_SKIPPED]
    assert told.data["abandoned"] is True
    scene.box.end.set()
    await first
    await scene.publish()  # the next bubble has a chance of its own
    assert scene.said()[-1][0] == "taken"


class Aging(Scripted):
    """Takes one as long as not too much of the bubble has passed."""

    def decide(self, situation: Any) -> Decision:
        assert situation.running == 0
        if situation.passed_s > 0.2:
            return Decision(False, "price 9 ms > saved 5 ms")
        return super().decide(situation)


@in_scene(Aging)
async def test_given_up_when_its_turn_comes_too_late_in_the_bubble(scene: Scene) -> None:
    first = await queued(scene)
    scene.box.end.set()
    await first
    await settle()
    assert scene.bubble.state is BubbleState.DONE and scene.box.dumps == 0
    scene.bubble.bubble_over()
    await scene.bubble.settle()
    ((kind, why),) = scene.said()
    assert kind == "not taken"
    assert why == "abandoned: its turn came after 0.250 s; price 9 ms > saved 5 ms; before: early: price 1 ms"


class Blind(Contention):
    """What it costs others is not in the price."""

    def delay_s(self, cost_s: float, running: int) -> float:
        return 0.0


@pytest.mark.parametrize("contention, at_once", [(Contention, 1), (Blind, 2)])
def test_the_price_for_others_spreads_the_dumps_of_sandboxes_in_step(
    tmp_path: Path, contention: type[Contention], at_once: int
) -> None:
    async def main() -> None:
        turns = Turns(tmp_path / "turns", at_once=2)
        learned = Learned()
        learned.failures = FailureRate(300.0, worth=1e6)  # a checkpoint saves about 10 ms here
        learned.contention = contention()
        policy = Adaptive(learned=learned)
        for _ in range(30):
            policy.bubble(4.0)
            policy.action(1.0)
            policy.cost(0.1, 10e6)
        scenes = [Scene(tmp_path / str(number), policy, turns) for number in range(4)]
        for scene in scenes:
            scene.act(3.0)
            scene.now = 0.1  # all in their bubble for a while when the turn comes
            await scene.begin()
        most = 0
        for _ in scenes:
            dumping = [scene for scene in scenes if scene.bubble.state is BubbleState.DUMPING]
            most = max(most, len(dumping))
            for scene in dumping:
                scene.box.end.set()
            await settle()
        for scene in scenes:
            await scene.bubble.settle()
            assert [kind for kind, _ in scene.said()] == ["taken"]
            scene.journal.close()
        assert most == at_once
        turns.close()

    asyncio.run(main())


@in_scene(lambda: EveryN(1))
async def test_every_n_does_not_queue_while_its_agent_waits_but_no_longer_than_twice_as_many(scene: Scene) -> None:
    first = await queued(scene)
    scene.bubble.bubble_over()
    await scene.bubble.settle()
    assert [kind for kind, _ in scene.said()] == ["not taken"]
    scene.act()
    await scene.begin()
    scene.bubble.bubble_over()
    scene.box.end.set()
    await scene.bubble.settle()
    await first
    assert [kind for kind, _ in scene.said()] == ["not taken", "taken"]


@in_scene(Scripted)
async def test_held_while_memory_bursts_and_begun_when_it_is_over(scene: Scene) -> None:
    scene.policy.begin_by = lambda nbytes: 10.0
    await scene.publish()
    scene.act()
    scene.box.resident = 500 * MB
    await scene.begin()
    for _ in range(3):
        assert scene.bubble.state is BubbleState.HELD
        await scene.pass_(LOOK_S)
    scene.box.resident = 12 * MB
    await scene.pass_(LOOK_S)
    assert scene.bubble.state is BubbleState.DUMPING
    scene.box.end.set()
    await scene.bubble.settle()


@in_scene(Scripted)
async def test_held_no_longer_than_it_must_to_fit(scene: Scene) -> None:
    scene.policy.begin_by = lambda nbytes: 0.12
    await scene.publish()
    scene.act()
    scene.box.resident = 500 * MB
    await scene.begin()
    for state in (BubbleState.HELD, BubbleState.HELD, BubbleState.DUMPING):
        assert scene.bubble.state is state
        await scene.pass_(0.06)
    scene.box.end.set()
    await scene.bubble.settle()
    assert [kind for kind, _ in scene.said()] == ["taken", "taken"]


@in_scene(Scripted)
async def test_a_reply_ends_the_hold(scene: Scene) -> None:
    scene.policy.begin_by = lambda nbytes: 10.0
    await scene.publish()
    for late in (True, False):
        scene.act()
        scene.box.resident = 500 * MB
        scene.policy.late = late
        await scene.begin()
        assert scene.bubble.state is BubbleState.HELD
        scene.bubble.bubble_over()
        scene.box.end.set()
        await scene.bubble.settle()
    kinds = [(kind, why.split(":")[0]) for kind, why in scene.said()]
    assert kinds == [("taken", "early"), ("taken", "early"), ("not taken", "abandoned")]


@in_scene(Scripted)
async def test_an_unchanged_sandbox_is_not_dumped(scene: Scene) -> None:
    await scene.publish()
    scene.act()
    scene.box.unchanged_since = "c1"
    await scene.begin()
    await scene.bubble.settle()
    assert scene.said()[-1] == ("not taken", "unchanged: c1 of action 1 holds exactly this state")
    assert scene.box.dumps == 1
    scene.box.unchanged_since = ""
    await scene.publish()
    assert [kind for kind, _ in scene.said()] == ["taken", "not taken", "taken"]


@pytest.mark.parametrize(
    "error", [CheckpointRefused("it cannot"), StorageFull("no room"), SandboxLost("it died")], ids=lambda e: e.what
)
def test_a_failure_is_journalled_with_its_reason(tmp_path: Path, error: Exception) -> None:
    @in_scene(Scripted)
    async def run(scene: Scene) -> None:
        scene.box.error = error
        await scene.publish()
        assert scene.said() == [("not taken", f"{type(error).__name__}: {error.what}")]  # pyright: ignore

    run(tmp_path)


@in_scene(Scripted)
async def test_what_was_damaged_meanwhile_is_not_trusted(scene: Scene) -> None:
    scene.problem = "system folders were damaged"
    await scene.publish()
    assert scene.said() == [("not taken", "not trusted: system folders were damaged")]
    assert scene.lost == ["system folders were damaged"]


@in_scene(Never)
async def test_one_that_must_be_is_taken_whatever_the_policy_says(scene: Scene) -> None:
    scene.act()
    await scene.begin()
    assert scene.bubble.state is None
    await scene.begin(must="an interrupted command")
    scene.bubble.bubble_over()
    scene.box.end.set()
    await scene.bubble.settle()
    assert scene.said() == [("not taken", "policy never"), ("taken", "an interrupted command")]


@in_scene(Adaptive)
async def test_adaptive_says_its_numbers_early_and_late(scene: Scene) -> None:
    for _ in range(30):
        scene.policy.bubble(5.0)
        scene.policy.cost(0.2, 10 * MB)
    scene.act(wall_s=100.0)
    await queued(scene)
    scene.bubble.bubble_over()
    scene.box.end.set()
    await scene.bubble.settle()
    ((_, why),) = scene.said()
    numbers = r"price [\d.]+ ms \S+ saved [\d.]+ ms \(exposed ([\d.]+) ms[^)]* failures [\d.]+/h\)"
    exposed = sorted(float(number) for number in re.findall(numbers, why))
    assert len(exposed) == 2, why
    assert exposed[0] < 20 < 190 < exposed[1], "what the agent waits for is not in the price"


def test_a_policy_is_switched_while_the_run_lives(tmp_path: Path) -> None:
    file = tmp_path / "policy.json"

    @in_scene(lambda: LivePolicy(PolicyConfig(name="always"), file))
    async def run(scene: Scene) -> None:
        scene.policy.bubble(3.0)
        await scene.publish()
        file.write_text(json.dumps({"name": "every-n", "every": 3}))
        scene.act()
        await scene.begin()
        assert scene.policy.name == "every-3" and scene.said()[-1][1].startswith("1 of 3 actions")
        file.write_text('{"name": "sometimes"}')  # what decides goes on, and says what is wrong
        scene.act()
        await scene.begin()
        assert scene.said()[-1][1].startswith("2 of 3") and "does not say which policy" in scene.said()[-1][1]
        file.unlink()
        await scene.publish()
        assert scene.policy.name == "always" and scene.said()[-1][0] == "taken"
        from belayer.journal import scan

        changes = [record for record in scan(tmp_path / "journal") if isinstance(record, r.PolicyChanged)]
        assert [(each.k, each.was, each.policy) for each in changes] == [
            (2, "always", "every-3"),
            (4, "every-3", "always"),
        ]

    run(tmp_path)


def test_what_was_learned_is_known_to_the_next_policy(tmp_path: Path) -> None:
    policy = LivePolicy(PolicyConfig(name="never"), tmp_path / "policy.json")
    for _ in range(200):
        policy.bubble(50.0)
        policy.cost(2.0, 0.0)
    (tmp_path / "policy.json").write_text('{"name": "adaptive"}')
    from belayer.checkpoint import Situation

    why = policy.decide(Situation(actions_since=1, redo_s=5.0)).why
    (cost,) = map(int, re.findall(r"cost (\d+) ms", why))
    assert cost == pytest.approx(2000, rel=0.05) and policy.name == "adaptive"
    assert policy.begin_by(0.0) > 20


def test_a_moment_knows_bursts_from_growth() -> None:
    moment = Moment()
    assert moment.hold_s(1e9, 0.0, 10.0) == 0.0  # nothing is known yet
    for size in (100, 110, 105):
        moment.begun(size * MB)
    assert moment.hold_s(130 * MB, 0.0, 10.0) == 0.0
    assert moment.hold_s(105 * MB * 1.5 + SLACK + 1, 0.0, 10.0) == LOOK_S
    assert moment.hold_s(900 * MB, 9.99, 10.0) == pytest.approx(0.01)
    assert moment.hold_s(900 * MB, 10.5, 10.0) == 0.0
    for _ in range(9):
        moment.begun(900 * MB)
    assert moment.hold_s(900 * MB, 0.0, 10.0) == 0.0  # it is not a burst any more


@pytest.mark.parametrize("slower", [0.0, 0.2, 1.0])
def test_contention_is_learned_from_the_turns_of_others(slower: float) -> None:
    now = 0.0
    contention = Contention(0.05, clock=lambda: now)
    rng = random.Random(3)
    assert contention.delay_s(1.0, 2) == pytest.approx(0.1)  # nothing is known: the prior
    for number in range(400):
        contention.turn_begins("a")
        dumps, tokens = number % 3, rng.randint(20, 200)
        for _ in range(dumps):
            contention.dump_begins()
        now += tokens * 0.01 * (1 + slower) ** dumps * math.exp(rng.gauss(0, 0.1))
        for _ in range(dumps):
            contention.dump_ends()
        contention.turn_ends("a", tokens)
    assert contention.slowdown == pytest.approx(slower, abs=0.05 + slower / 10)
    assert contention.certainty > 0.98
    for who in "abcd":
        contention.turn_begins(who)
    assert contention.delay_s(0.1, 5) == pytest.approx(0.1 * slower * 3, abs=0.03)
    contention.turn_ends("d")  # without tokens: it only leaves
    assert contention.delay_s(0.1, 0) == pytest.approx(0.1 * slower * 2, abs=0.03)
