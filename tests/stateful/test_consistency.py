"""Prefix consistency against a model environment: any faults, anywhere, any number of driver crashes.

The environment and the engine here are models of pure logic (the real ones have their own tests): a sandbox is the list
of commands it has run with what each observed. The property is the heart of Belayer: when a rollout is delivered, the
actions in its journal are exactly what its final environment has gone through, observation for observation.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from belayer import events
from belayer.checkpoint.policy import Always, Decision, EveryN, Never, Situation
from belayer.checkpoint.turns import TurnState
from belayer.config import Config, RecoveryConfig, RunConfig
from belayer.engine import TokenChunk
from belayer.errors import (
    CheckpointAbandoned,
    CheckpointDamaged,
    CheckpointRefused,
    ConfigError,
    RestoreFailed,
    RolloutFailed,
    SandboxLost,
    TurnRestarted,
)
from belayer.journal import Journal
from belayer.recovery.breaker import CircuitBreaker
from belayer.run import Run
from belayer.sandbox import ExecResult
from belayer.trajectory import Trajectory
from belayer.verify import verify_run

pytestmark = pytest.mark.stateful


class DriverKilled(BaseException):
    """Stands for SIGKILL: nothing after it runs, nothing is flushed; only the journal's files and images remain."""


class Chaos:
    """Decides at every point where something can fail, from a list that hypothesis draws and shrinks."""

    def __init__(self, decisions: list[int]) -> None:
        self.decisions = decisions
        self.at = 0
        self.dead = False
        self.faults = 0

    def strikes(self, *kinds: str) -> str:
        """ "" (mostly), one of `kinds`, or the end of the driver."""
        if self.dead:
            raise DriverKilled
        if self.at >= len(self.decisions):
            return ""
        choice = self.decisions[self.at]
        self.at += 1
        if choice == 9:
            self.dead = True
            raise DriverKilled
        if 1 <= choice <= len(kinds):
            self.faults += 1
            return kinds[choice - 1]
        return ""


class World:
    """What survives the driver: images of checkpoints. And a source of truth that no replay can reproduce."""

    def __init__(self) -> None:
        self.images: dict[tuple[str, str], list[tuple[str, bytes]]] = {}
        self.count = 0
        self.nonce = 0
        self.policy_version = 0
        self.struck: set[tuple[str, int]] = set()


class Wavering(Always):
    """Gives up every other checkpoint that has not begun when the reply arrives."""

    name = "wavering"

    def __init__(self) -> None:
        super().__init__()
        self.late = 0

    def decide(self, situation: Situation) -> Decision:
        self.late += situation.bubble_over
        if situation.bubble_over and self.late % 2:
            event("a checkpoint was given up")
            return Decision(False, "it wavers")
        return super().decide(situation)


class ModelSandbox:
    def __init__(self, owner: ModelSandboxes, name: str, generation: int, log: list[tuple[str, bytes]]) -> None:
        self.owner, self.name, self.generation, self.log = owner, name, generation, log
        self.dead = self.damaged = self.dumping = False
        self.broken = False  # its system folders are not those of the image: it answers, and answers wrongly
        self.accepted = False
        self.restored = None
        self.cause = ""
        self.callback = None

    async def exec(self, command, *, fence, **_):
        await asyncio.sleep(0)
        assert not self.dumping, "an action was dispatched while a checkpoint was pending"
        assert fence[1] == self.generation and self.owner.current[self.name] is self, "a stale sandbox was used"
        fault = self.owner.chaos.strikes("dies before", "dies after", "damaged during")
        if self.dead or fault == "dies before":
            self.die()
            raise SandboxLost("died before the command ran")
        if self.broken:
            out = b"broken"
        elif command.startswith("nonce"):
            self.owner.world.nonce += 1
            out = str(self.owner.world.nonce).encode()
        else:
            out = hashlib.sha256(repr((self.log, command)).encode()).hexdigest()[:6].encode()
        self.log.append((command, out))
        if command == "rm -rf /":
            self.damaged = True
        if fault == "damaged during" and (self.name, len(self.log)) not in self.owner.world.struck:
            # damage that comes twice during the same action passes for the action's own doing: once only, then
            self.owner.world.struck.add((self.name, len(self.log)))
            self.damaged = self.broken = True
        if fault == "dies after":
            self.die()
            raise SandboxLost("died after the command ran")
        return ExecResult(exit_code=0, stdout=out, stderr=b"", timed_out=False, truncated=False, wall_s=0.001)

    def die(self):
        self.dead = True
        if self.callback:
            asyncio.get_running_loop().call_soon(self.callback)

    def on_death(self, callback):
        self.callback = callback

    async def healthy(self):
        if self.dead:
            return "dead"
        return "system folders are missing" if self.damaged and not self.accepted else None

    def accept(self):
        self.accepted = True

    def resident_bytes(self):
        return 1 << 20

    async def changed_since(self, checkpoint_id):
        return "" if self.owner.world.images.get((self.name, checkpoint_id)) == self.log else "commands ran"

    async def checkpoint(self, *, action, context_hash, rollout, attempt, turn):
        if self.owner.chaos.strikes("queued"):
            for _ in range(20):  # until the reply is here, and the policy was asked again
                await asyncio.sleep(0)
        if not turn.open:
            raise CheckpointAbandoned("given up")
        turn.state = TurnState.BEGUN
        self.dumping = True
        try:
            await asyncio.sleep(0)
            fault = self.owner.chaos.strikes("refused", "dies", "damaged image", "damaged from outside")
            if fault == "damaged from outside":
                self.damaged = self.broken = True
            if fault == "refused":
                raise CheckpointRefused("cannot")
            if fault == "dies" or self.dead:
                self.die()
                raise SandboxLost("died during the dump")
            assert len(self.log) == action
            self.owner.world.count += 1
            number = f"c{self.owner.world.count}"
            image = (
                [("damaged", b"")] if fault == "damaged image" else [*self.log, ("broken", b"")][: action + self.broken]
            )
            self.owner.world.images[self.name, number] = image
            return SimpleNamespace(id=number, level="full", image_bytes=0, timings=SimpleNamespace(frozen_s=0.01))
        finally:
            self.dumping = False


class ModelSandboxes:
    dumping = 0

    def __init__(self, world: World, chaos: Chaos) -> None:
        self.world, self.chaos = world, chaos
        self.current: dict[str, ModelSandbox] = {}
        self.generations = 0

    def begin_above(self, name, generation):
        self.generations = max(self.generations, generation)

    async def create(self, name, *, image=None):
        return await self._new(name, [])

    async def restore(self, name, checkpoint_id):
        await asyncio.sleep(0)
        if self.chaos.strikes("fails"):
            raise RestoreFailed("did not come back")
        image = self.world.images.get((name, checkpoint_id))
        if image is None or image[:1] == [("damaged", b"")]:
            raise CheckpointDamaged("checksum")
        return await self._new(name, list(image))

    async def _new(self, name, log):
        await asyncio.sleep(0)
        if self.chaos.strikes("dies at once"):
            raise SandboxLost("died at once")
        self.generations += 1
        # a restored sandbox takes what it finds for normal, as a real one has to
        broken = log[-1:] == [("broken", b"")]
        self.current[name] = ModelSandbox(self, name, self.generations, log[:-1] if broken else log)
        self.current[name].broken = broken
        return self.current[name]

    async def retire(self, sandbox):
        self.current.pop(sandbox.name, None)

    async def discard(self, name):
        self.current.pop(name, None)

    async def close(self):
        self.current.clear()


class ModelEngine:
    """Tokens are a pure function of (seed, position, prompt), in chunks of one or two.

    New weights may come at any moment, and no turn may span two versions.
    """

    version_policy = "restart_turn"

    def __init__(self, world: World, chaos: Chaos, vocabulary: int) -> None:
        self.world, self.chaos, self.vocabulary = world, chaos, vocabulary

    @property
    def policy_version(self):
        return self.world.policy_version

    async def generate(self, request, on_tokens):
        done = len(request.resume_ids)
        begun_with = request.resume_version if done else self.policy_version
        limit = request.sampling.max_tokens
        while True:
            await asyncio.sleep(0)
            if self.chaos.strikes("update"):
                self.world.policy_version += 1
            if self.policy_version != begun_with:
                raise TurnRestarted("new weights")
            ids = [self._token(request, done + i) for i in range(min(1 + done % 2, limit - done))]
            finish = "length" if done + len(ids) >= limit else None
            on_tokens(
                TokenChunk(
                    request_id=request.id,
                    start=done,
                    token_ids=ids,
                    logprobs=[-0.5] * len(ids),
                    weights_version=self.policy_version,
                    finish_reason=finish,
                )
            )
            done += len(ids)
            if finish:
                return finish

    def _token(self, request, position):
        text = repr((request.sampling.seed, position, request.prompt_ids))
        return hashlib.sha256(text.encode()).digest()[0] % self.vocabulary

    async def end_trajectory(self, name):
        pass

    async def close(self):
        pass


async def solve(rollout):
    """A function of what it observes: another observation leads to another command."""
    await rollout.observe([7, 8, 9])
    await rollout.sandbox.exec("set up")
    for _ in range(rollout.task["turns"]):
        turn = await rollout.generate(max_tokens=3)
        choices = rollout.task["commands"]
        command = choices[turn.token_ids[-1] % len(choices)] + str(turn.token_ids[0])
        command = "rm -rf /" if command.startswith("rm") else command
        result = await rollout.sandbox.exec(command)
        await rollout.observe([200 + byte for byte in result.stdout])
    last = await rollout.sandbox.exec("check")
    rollout.now()
    return float(last.stdout[0])


async def one_session(folder: Path, world: World, chaos: Chaos, policy, task, final_logs: dict) -> list[Trajectory]:
    """Open the run, collect, acknowledge; whatever `chaos` does."""
    config = Config(
        run=RunConfig(max_concurrent=4), recovery=RecoveryConfig(infra_retries=300, attempts=20, breaker=10_000)
    )
    journal = Journal(folder / "journal")
    run = Run(SimpleNamespace(path=folder), config, journal, SimpleNamespace(close=lambda: None))
    run._policy = policy
    run._breaker = CircuitBreaker(10_000)
    run.sandboxes, run.engine, run.sink = ModelSandboxes(world, chaos), ModelEngine(world, chaos, 5), events.ignore

    async def watched(rollout):
        reward = await solve(rollout)
        keeper = run.keepers[rollout.id]
        final_logs[rollout.id] = list(keeper.sandbox.log)
        return reward

    try:
        trajectories = await run.collect(watched, [task, task], group_size=2, name="t")
        chaos.strikes()
        for each in trajectories:
            run.acknowledge(each)
            chaos.strikes()
        check_consistent(journal, final_logs)
        return trajectories
    finally:
        journal.close()  # a killed driver's descriptors are closed too; there is nothing to be flushed


def check_consistent(journal: Journal, final_logs: dict) -> None:
    for name, history in journal.histories.items():
        actions = [(eval_command(call.asked), call.result["exec"]["stdout"]) for call in history.actions()]
        assert actions == final_logs[name], f"{name}: the journal and the environment disagree"
        # what the model was shown is what those actions observed, in order
        for call in history.calls:
            assert len(set(call.versions)) <= 1, f"{name}: a turn of two policy versions"
        shown = [call.ids for call in history.calls if call.kind == "observe"][1:]
        assert shown == [[200 + byte for byte in out] for _, out in actions[1:-1]]


def eval_command(asked: str) -> str:
    import json

    return json.loads(asked)["command"]


@st.composite
def decision_lists(draw):
    """Long lists with faults at a drawn rate: hypothesis's own are too short and calm to go deep."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    rate = draw(st.sampled_from([0.0, 0.03, 0.1, 0.25]))
    kill = draw(st.sampled_from([0.0, 0.0, 0.005, 0.02]))
    return [9 if rng.random() < kill else rng.randint(1, 4) if rng.random() < rate else 0 for _ in range(400)]


@given(
    sessions=st.lists(decision_lists(), min_size=1, max_size=4),
    policy=st.sampled_from(["always", "never", "every-2", "wavering"]),
    turns=st.integers(1, 4),
    kinds=st.sampled_from([["a", "b", "c"], ["a", "nonce"], ["nonce"], ["a", "rm"]]),
)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_delivered_rollouts_describe_their_environment(sessions, policy, turns, kinds):
    task = {"turns": turns, "commands": kinds}
    with tempfile.TemporaryDirectory() as name:
        folder, world, final_logs = Path(name), World(), {}
        delivered = None
        for decisions in [*sessions, []]:
            chaos = Chaos(decisions)
            world.policy_version += 1  # a driver that starts again may start with other weights
            chosen = {"always": Always(), "never": Never(), "every-2": EveryN(2), "wavering": Wavering()}[policy]
            try:
                delivered = asyncio.run(one_session(folder, world, chaos, chosen, task, final_logs))
            except DriverKilled:
                event("the driver was killed")
            except RolloutFailed as error:
                # three deaths during the same action set the rollout aside: allowed, but only visibly
                assert "died" in error.first or "failed" in str(error)
                event("a rollout was set aside")
            if chaos.faults:
                event("faults")
        assert delivered is not None, "the calm last session must deliver everything"
        assert [t.rollout_id for t in delivered] == ["t-0-0", "t-0-1", "t-1-0", "t-1-1"]
        histories = Journal(folder / "journal").histories
        assert len(histories) == 4 and all(history.acknowledged for history in histories.values())
        verdict = verify_run(folder)  # other code, which knows nothing of how it was recovered
        assert verdict.consistent and verdict.delivered == 4, verdict.findings
        if any(history.truncations for history in histories.values()):
            event("a context was truncated")
        if kinds == ["a", "b", "c"]:
            # nothing here is nondeterministic: faults must not change a single token
            calm = calm_run(task)
            assert [t.token_ids for t in delivered] == [t.token_ids for t in calm]
            assert [t.reward for t in delivered] == [t.reward for t in calm]
            assert all(history.truncations == 0 for history in histories.values())


def calm_run(task) -> list[Trajectory]:
    with tempfile.TemporaryDirectory() as name:
        return asyncio.run(one_session(Path(name), World(), Chaos([]), Never(), task, {}))


def test_the_agents_own_damage_is_its_outcome():
    """`rm -rf /` is tried once more from the state before it, and then accepted as what the agent did."""
    task = {"turns": 2, "commands": ["rm"]}
    with tempfile.TemporaryDirectory() as name:
        final_logs: dict = {}
        (one, *_) = asyncio.run(one_session(Path(name), World(), Chaos([]), Always(), task, final_logs))
    assert [command for command, _ in final_logs[one.rollout_id]].count("rm -rf /") == 2
    assert one.restores >= 1


class DiesOnce(Chaos):
    """The environment dies just before the `number`-th command of the session runs."""

    def __init__(self, number: int) -> None:
        super().__init__([])
        self.left = number

    def strikes(self, *kinds: str) -> str:
        if kinds[:1] == ("dies before",):
            self.left -= 1
            return "dies before" if self.left == 0 else ""
        return ""


@pytest.mark.parametrize("number", range(1, 24))
def test_accepted_damage_is_accepted_again_when_it_is_replayed(number):
    task = {"turns": 2, "commands": ["rm"]}
    with tempfile.TemporaryDirectory() as name:
        final_logs: dict = {}
        done = asyncio.run(one_session(Path(name), World(), DiesOnce(number), Never(), task, final_logs))
    # each `rm -rf /` costs one restore, and the one death one more: nothing goes round in circles
    assert all(each.attempt == 0 for each in done)
    assert sum(each.restores for each in done) <= 2 * len(done) + 3


async def with_function(folder: Path, function, tasks=("x",), chaos: Chaos | None = None, name: str = "t"):
    """Run `function` once per task in the model world."""
    journal = Journal(folder / "journal")
    config = Config(run=RunConfig(max_concurrent=4), recovery=RecoveryConfig(infra_retries=3, attempts=1))
    run = Run(SimpleNamespace(path=folder), config, journal, SimpleNamespace(close=lambda: None))
    chaos = chaos or Chaos([])
    world = World()
    run.sandboxes, run.engine, run.sink = ModelSandboxes(world, chaos), ModelEngine(world, chaos, 5), events.ignore
    try:
        return await run.collect(function, list(tasks), name=name), journal
    finally:
        journal.close()


class AlwaysDies(Chaos):
    def __init__(self) -> None:
        super().__init__([])

    def strikes(self, *kinds: str) -> str:
        return "dies at once" if kinds == ("dies at once",) else ""


def test_a_function_that_catches_everything_does_not_turn_a_failure_into_a_reward(tmp_path):
    async def greedy(rollout):
        await rollout.observe([1])
        try:
            await rollout.sandbox.exec("a")
        except Exception:
            return 0.0
        return 1.0

    with pytest.raises(RolloutFailed):
        asyncio.run(with_function(tmp_path, greedy, chaos=AlwaysDies()))
    history = Journal(tmp_path / "journal").history("t-0-0")
    assert history.reward is None and history.failed is not None
    assert history.failed.error == "BudgetSpent"


@pytest.mark.parametrize(
    "error", [KeyError("k"), FileNotFoundError("f"), TimeoutError("t"), asyncio.CancelledError(), ValueError("v")]
)
def test_an_error_of_the_users_function_fails_that_rollout_visibly_and_only_that(tmp_path, error):
    async def picky(rollout):
        await rollout.observe([1])
        if rollout.task == "bad":
            raise error
        return 1.0

    with pytest.raises(RolloutFailed, match="1 of 3 rollouts failed"):
        asyncio.run(asyncio.wait_for(with_function(tmp_path, picky, tasks=("a", "bad", "c")), 10))
    histories = Journal(tmp_path / "journal").histories
    assert [histories[f"t-{n}-0"].reward for n in range(3)] == [1.0, None, 1.0]


def test_another_task_under_the_same_name_is_refused(tmp_path):
    async def simple(rollout):
        await rollout.observe([1])
        return 1.0

    asyncio.run(with_function(tmp_path, simple, tasks=("a",)))
    with pytest.raises(ConfigError, match="another task"):
        asyncio.run(with_function(tmp_path, simple, tasks=("b",)))
    done, _ = asyncio.run(with_function(tmp_path, simple, tasks=("b",), name="second"))
    assert done[0].task == "b"


def test_many_rollouts_resume_without_opening_the_circuit(tmp_path):
    """A restart of the driver hits every rollout at once; it is no failure of theirs."""

    class DiesInTheMiddle(Chaos):
        def strikes(self, *kinds: str) -> str:
            if kinds[:1] == ("dies before",):
                self.at += 1
                if self.at > 40:
                    raise DriverKilled
            return ""

    async def two_actions(rollout):
        await rollout.sandbox.exec("a")
        await rollout.sandbox.exec("b")
        return 1.0

    tasks = tuple(range(40))
    with pytest.raises(DriverKilled):
        asyncio.run(with_function(tmp_path, two_actions, tasks, chaos=DiesInTheMiddle([])))
    done, journal = asyncio.run(with_function(tmp_path, two_actions, tasks))
    assert len(done) == 40 and all(each.restores == 0 for each in done)
    assert any(history.generation > 0 for history in journal.histories.values())
