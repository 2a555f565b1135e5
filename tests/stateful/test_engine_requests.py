"""Requests, supervisor and epoch table together, with words that arrive late, twice asked and out of order.

Workers here are models that keep to the real ones' rules: a worker makes the next token of what it was given, on the
epoch it looks at, and sends it; until it is reaped it may go on doing so, fenced or not.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from belayer.engine import GenerationRequest, Sampling
from belayer.engine import supervisor as sv
from belayer.engine._wire import Chunk, Epoch, Tokens
from belayer.engine.lifecycle import PROCESS, Lifecycle, ProcessState, RequestState
from belayer.engine.owner.table import EpochTable
from belayer.engine.requests import Flight, Requests, Verdict
from belayer.engine.weights.layout import Layout
from belayer.errors import ForbiddenTransition

pytestmark = pytest.mark.stateful

LENGTH = 6


def token(request_id: str, position: int) -> int:
    return hash((request_id, position)) % 1000


@dataclass
class Worker:
    generation: int
    epoch: Epoch
    life: Lifecycle[ProcessState]
    alive: bool = True
    work: dict[str, list[int]] = field(default_factory=dict)  # key: tokens it knows of
    ids: dict[str, str] = field(default_factory=dict)
    outbox: list[Tokens] = field(default_factory=list)


class World(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.table = EpochTable()
        self.table.define(Layout(0, ()))
        self.requests = Requests(lambda: self.now)
        self.supervisor = sv.Supervisor(sv.Limits(), lambda: self.now)
        self.workers: dict[int, Worker] = {}
        self.dying: list[int] = []
        self.checks: list[str] = []
        self.flights: dict[str, Flight] = {}
        self.journal: dict[str, list[int]] = {}
        self.versions: dict[str, list[int]] = {}
        self.committed: set[int] = set()
        self.count = 0

    @initialize()
    def begin(self) -> None:
        self.commit()
        self.perform(self.supervisor.begin())

    def commit(self) -> None:
        dirty = self.table.begin()
        self.committed.add(self.table.commit(dirty.number, "digest", dirty.number).policy_version)

    @property
    def clean(self) -> Epoch:
        assert self.table.clean is not None
        return self.table.clean

    def tell(self, event: sv.Event) -> None:
        self.perform(self.supervisor.handle(event))

    def perform(self, actions: list[sv.Action]) -> None:
        for action in actions:
            match action:
                case sv.Spawn():
                    generation = len(self.workers) + 1
                    self.workers[generation] = Worker(generation, self.clean, Lifecycle(PROCESS, lambda: self.now))
                    self.tell(sv.Started(generation))
                case sv.Fence(generation):
                    self.workers[generation].life.to(ProcessState.FENCED)
                    self.dying.append(generation)
                case sv.CheckOwner():
                    self.checks.append("owner")
                case sv.CheckDevice():
                    self.checks.append("device")
                case sv.Activate(generation):
                    worker = self.workers[generation]
                    writers = [w for w in self.workers.values() if w.alive and w.work]
                    assert not writers, f"{writers} may still write"
                    worker.life.to(ProcessState.ACTIVATING)
                    worker.epoch = self.clean
                case sv.Route(generation):
                    self.workers[generation].life.to(ProcessState.SERVING)
                    self.give(generation, self.requests.give_all(generation))
                    self.tell(sv.Rebuilt(generation)) if self.requests.rebuilt else None
                case sv.GiveUp():
                    for flight in self.requests:
                        self.requests.end(flight, RequestState.FAILED)
                case sv.ReplaceOwner():
                    raise AssertionError("nothing happens to the owner here")

    def give(self, generation: int, work: list) -> None:
        for item in work:
            self.workers[generation].work[item.id] = list(item.done_ids)
            self.workers[generation].ids[item.id] = item.id.split(":", 1)[1]

    def some(self, *states: ProcessState) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.life.state in states]

    # -- what can happen ----------------------------------------------------------------------------------------------
    @rule(resumed=st.integers(0, LENGTH - 1))
    def submit(self, resumed: int) -> None:
        if self.supervisor.state is sv.State.UNAVAILABLE:
            return
        self.count += 1
        name = f"r{self.count}"
        done = [token(name, position) for position in range(resumed)]
        request = GenerationRequest(id=name, prompt_ids=[1], sampling=Sampling(max_tokens=LENGTH), resume_ids=done)
        flight = self.requests.add(request, lambda _chunk: None)
        self.flights[name], self.journal[name], self.versions[name] = flight, list(done), []
        if (serving := self.supervisor.serving) is not None:
            self.give(serving, [self.requests.give(flight, serving)])

    @precondition(lambda self: len(self.requests))
    @rule(pick=st.randoms(use_true_random=False))
    def cancel(self, pick) -> None:
        self.requests.end(pick.choice(list(self.requests)), RequestState.CANCELLED)  # its worker is not told yet

    @rule(pick=st.randoms(use_true_random=False), several=st.integers(1, 3))
    def workers_compute(self, pick, several: int) -> None:
        """Whoever has work and is not reaped makes tokens, also one that is to be killed this instant."""
        busy = [w for w in self.workers.values() if w.alive and w.work]
        if not busy:
            return
        worker = pick.choice(busy)
        for _ in range(several):
            chunks = []
            for key, known in list(worker.work.items()):
                position = len(known)
                if position >= LENGTH:
                    continue
                known.append(token(worker.ids[key], position))
                end = "length" if position + 1 == LENGTH else None
                chunks.append(Chunk(key, position, [known[-1]], [0.0], end))
            if chunks:
                worker.outbox.append(Tokens(worker.generation, worker.epoch.policy_version, chunks))

    @rule(pick=st.randoms(use_true_random=False))
    def words_arrive(self, pick) -> None:
        talking = [w for w in self.workers.values() if w.outbox]
        if not talking:
            return
        worker = pick.choice(talking)
        message = worker.outbox.pop(0)
        if worker.life.state in (ProcessState.FENCED, ProcessState.REAPED):
            return  # its link drops and counts them
        if message.generation != self.supervisor.serving:
            return
        for chunk in message.chunks:
            verdict, flight = self.requests.judge(message.generation, message.policy_version, chunk)
            if flight is None:
                continue
            assert verdict is Verdict.DELIVER
            name = flight.request.id
            assert chunk.start == len(self.journal[name]), "a token twice, or one lost"
            assert message.policy_version in self.committed, "made from a dirty epoch"
            self.journal[name] += chunk.token_ids
            self.versions[name].append(message.policy_version)
            if chunk.finish_reason:
                self.requests.end(flight, RequestState.FINISHED)
        if self.requests.rebuilt and self.supervisor.state is sv.State.REBUILDING:
            self.tell(sv.Rebuilt(message.generation))

    @precondition(lambda self: self.some(ProcessState.STARTING))
    @rule(pick=st.randoms(use_true_random=False))
    def becomes_ready(self, pick) -> None:
        worker = pick.choice(self.some(ProcessState.STARTING))
        worker.life.to(ProcessState.READY)
        self.tell(sv.Ready(worker.generation))

    @precondition(lambda self: self.some(ProcessState.ACTIVATING))
    @rule()
    def activated(self) -> None:
        self.tell(sv.Activated(self.some(ProcessState.ACTIVATING)[0].generation))

    @precondition(lambda self: self.some(ProcessState.READY, ProcessState.ACTIVATING, ProcessState.SERVING))
    @rule(pick=st.randoms(use_true_random=False), hangs=st.booleans())
    def fails(self, pick, hangs: bool) -> None:
        worker = pick.choice(self.some(ProcessState.READY, ProcessState.ACTIVATING, ProcessState.SERVING))
        worker.alive = hangs
        event = sv.Hung if hangs else sv.Died
        self.tell(event(worker.generation, "fault"))

    @precondition(lambda self: self.dying)
    @rule(pick=st.randoms(use_true_random=False))
    def reaped(self, pick) -> None:
        generation = self.dying.pop(pick.randrange(len(self.dying)))
        worker = self.workers[generation]
        worker.alive = False
        worker.life.to(ProcessState.REAPED)
        self.requests.take_back(generation)
        self.tell(sv.Fenced(generation))

    @precondition(lambda self: self.checks)
    @rule()
    def health_answers(self) -> None:
        asked = self.checks.pop(0)
        self.tell(sv.OwnerChecked(None) if asked == "owner" else sv.DeviceChecked(None))

    @rule(finishes=st.booleans(), pick=st.randoms(use_true_random=False))
    def weights_change(self, finishes: bool, pick) -> None:
        if not finishes:
            self.table.begin()  # a writer died half-way: its epoch stays dirty
            return
        self.commit()
        for worker in self.workers.values():
            if worker.alive and pick.random() < 0.7:  # the others have not read the message yet
                worker.epoch = self.clean

    # -- what always holds --------------------------------------------------------------------------------------------
    @invariant()
    def what_is_journalled_is_right(self) -> None:
        for name, tokens in self.journal.items():
            assert tokens == [token(name, position) for position in range(len(tokens))]

    @invariant()
    def one_worker_for_each(self) -> None:
        for flight in self.requests:
            with_worker = flight.life.state in (RequestState.PREFILLING, RequestState.DECODING)
            assert with_worker == (flight.generation is not None)
            if with_worker:
                assert self.workers[flight.generation or 0].life.state in (ProcessState.SERVING, ProcessState.FENCED)

    def teardown(self) -> None:
        """Once faults stop, every request gets the rest of its tokens."""
        if not self.workers:
            return
        for _ in range(400):
            if self.dying:
                worker = self.workers[self.dying[0]]
                self.dying.pop(0)
                worker.alive = False
                worker.life.to(ProcessState.REAPED)
                self.requests.take_back(worker.generation)
                self.tell(sv.Fenced(worker.generation))
            elif self.checks:
                self.health_answers()
            elif self.some(ProcessState.STARTING):
                worker = self.some(ProcessState.STARTING)[0]
                worker.life.to(ProcessState.READY)
                self.tell(sv.Ready(worker.generation))
            elif self.some(ProcessState.ACTIVATING):
                self.activated()
            elif len(self.requests) and self.supervisor.serving is not None:
                serving = self.workers[self.supervisor.serving]
                for key, known in serving.work.items():
                    while len(known) < LENGTH:
                        position = len(known)
                        known.append(token(serving.ids[key], position))
                        end = "length" if position + 1 == LENGTH else None
                        chunk = Chunk(key, position, [known[-1]], [0.0], end)
                        serving.outbox.append(Tokens(serving.generation, serving.epoch.policy_version, [chunk]))
                while serving.outbox:
                    self.arrive_from(serving)
            else:
                break
        if self.supervisor.state is not sv.State.UNAVAILABLE:
            assert not len(self.requests), [flight.key for flight in self.requests]
        for name, flight in self.flights.items():
            if flight.life.state is RequestState.FINISHED:
                assert len(self.journal[name]) == LENGTH

    def arrive_from(self, worker: Worker) -> None:
        class Only:
            @staticmethod
            def choice(_talking: list[Worker]) -> Worker:
                return worker

        self.words_arrive(Only())


TestRequests = World.TestCase
TestRequests.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize("rules", [PROCESS], ids=lambda rules: rules.what)
def test_forbidden_steps_say_why(rules) -> None:
    life = Lifecycle(rules, lambda: 0.0)
    for state in (ProcessState.READY, ProcessState.ACTIVATING, ProcessState.SERVING, ProcessState.FENCED):
        life.to(state)
    with pytest.raises(ForbiddenTransition, match="declared dead, and another may have taken its place"):
        life.to(ProcessState.SERVING)
    assert life.state is ProcessState.FENCED
