"""The supervisor under every order of events: never two writers, never stuck, never a promotion past a check."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from belayer.engine import supervisor as sv

pytestmark = pytest.mark.stateful

ALIVE = ("starting", "ready", "activating", "activated")


class World(RuleBasedStateMachine):
    """Processes and an owner as the supervisor's actions leave them; every rule is something that really can happen."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.processes: dict[int, str] = {}
        self.writers: set[int] = set()  # were told to take over and are not known to be dead
        self.fences: list[int] = []
        self.checks = 0
        self.device_checks = 0
        self.device_well = True
        self.damaged = False
        self.replacements = 0
        self.owner_well = True
        self.checked = True  # the owner was found well since the last fault
        self.ever_served = False
        self.gave_up: str | None = None

    @initialize(standby=st.booleans(), started=st.integers(0, 3))
    def begin(self, standby: bool, started: int) -> None:
        self.supervisor = sv.Supervisor(sv.Limits(standby=standby), lambda: self.now)
        self.perform(self.supervisor.begin())
        if started:  # a start that fails ends everything; most stories begin after a good one
            self.processes[1] = "ready"
            self.tell(sv.Ready(1))
            self.answers(False)
            self.rebuilt()

    def tell(self, event: sv.Event) -> None:
        self.perform(self.supervisor.handle(event))

    def perform(self, actions: list[sv.Action]) -> None:
        for action in actions:
            match action:
                case sv.Spawn(fill):
                    assert not (fill and self.ever_served), "the checkpoint must not replace weights that have served"
                    generation = len(self.processes) + 1
                    self.processes[generation] = "starting"
                    self.tell(sv.Started(generation))
                case sv.Fence(generation):
                    assert generation not in self.fences and self.processes[generation] != "reaped"
                    self.processes[generation] = "killed"
                    self.fences.append(generation)
                case sv.CheckOwner():
                    self.checks += 1
                case sv.CheckDevice():
                    self.device_checks += 1
                case sv.ReplaceOwner(cause):
                    assert not self.replacements
                    assert cause is not sv.Cause.DAMAGED or self.damaged
                    assert self.supervisor.serving is None or cause is sv.Cause.LOST, "it may still write there"
                    self.replacements += 1
                case sv.Activate(generation):
                    assert self.processes[generation] == "ready"
                    assert not self.writers, "another worker may still write"
                    assert self.checked, "nobody asked owner and device since the last fault"
                    assert not self.damaged, "it would say what damaged weights say"
                    self.processes[generation] = "activating"
                    self.writers.add(generation)
                case sv.Route(generation):
                    assert self.processes[generation] == "activated"
                    assert self.supervisor.serving == generation
                    self.ever_served = True
                case sv.GiveUp(reason):
                    assert reason
                    self.gave_up = reason

    def some(self, *states: str) -> list[int]:
        return [generation for generation, state in self.processes.items() if state in states]

    # -- what can happen ----------------------------------------------------------------------------------------------
    @precondition(lambda self: self.some("starting"))
    @rule(pick=st.randoms(use_true_random=False))
    def becomes_ready(self, pick) -> None:
        generation = pick.choice(self.some("starting"))
        self.processes[generation] = "ready"
        self.tell(sv.Ready(generation))

    @precondition(lambda self: self.some(*ALIVE))
    @rule(pick=st.randoms(use_true_random=False), hangs=st.booleans())
    def fails(self, pick, hangs: bool) -> None:
        generation = pick.choice(self.some(*ALIVE))
        if generation in self.writers:
            self.checked = False
        self.tell(sv.Hung(generation, f"hang {generation}") if hangs else sv.Died(generation, f"death {generation}"))
        if self.gave_up is None:
            assert generation in self.fences, "a process that failed must be fenced"

    @precondition(lambda self: self.some("activating"))
    @rule(refuses=st.booleans())
    def answers(self, refuses: bool) -> None:
        generation = self.some("activating")[0]
        if refuses or not self.owner_well:
            self.checked = False
            self.tell(sv.Refused(generation, f"refusal {generation}"))
        else:
            self.processes[generation] = "activated"
            self.tell(sv.Activated(generation))

    @precondition(lambda self: self.supervisor.serving is not None)
    @rule()
    def rebuilt(self) -> None:
        self.tell(sv.Rebuilt(self.supervisor.serving or 0))

    @precondition(lambda self: self.fences)
    @rule(pick=st.randoms(use_true_random=False))
    def reaped(self, pick) -> None:
        generation = self.fences.pop(pick.randrange(len(self.fences)))
        self.processes[generation] = "reaped"
        self.writers.discard(generation)
        self.tell(sv.Fenced(generation))

    @precondition(lambda self: self.checks)
    @rule()
    def owner_answers(self) -> None:
        self.checks -= 1
        self.tell(sv.OwnerChecked(None if self.owner_well else "the owner is dead"))

    @precondition(lambda self: self.device_checks)
    @rule(well=st.integers(0, 4))
    def device_answers(self, well: int) -> None:
        self.device_checks -= 1
        self.checked = self.owner_well and bool(well)
        self.tell(sv.DeviceChecked(None if well else "the canary kernel gave a wrong result"))

    @precondition(lambda self: self.ever_served and not self.damaged and not self.replacements)
    @rule()
    def weights_are_found_damaged(self) -> None:
        self.damaged = True
        self.tell(sv.WeightsDamaged("epoch 3 has another digest"))
        assert self.supervisor.serving is None

    @precondition(lambda self: self.owner_well and not self.replacements)
    @rule()
    def owner_dies(self) -> None:
        self.owner_well = False
        self.tell(sv.OwnerLost())

    @precondition(lambda self: self.replacements)
    @rule(works=st.integers(0, 4))
    def owner_replaced(self, works: int) -> None:
        self.replacements -= 1
        self.owner_well = bool(works)
        self.checked = self.owner_well
        self.damaged = self.damaged and not works
        self.tell(sv.OwnerReplaced(None if works else "no memory"))

    @precondition(lambda self: self.supervisor.deadline is not None)
    @rule(reached=st.integers(0, 3))
    def time_passes(self, reached: int) -> None:
        assert self.supervisor.deadline is not None
        self.now = self.now + 0.1 if reached else max(self.now, self.supervisor.deadline)
        if self.some("activating"):
            self.checked = False  # it may be given up now, and then the owner is asked again
        self.tell(sv.Tick())

    @precondition(lambda self: self.some("killed", "reaped"))
    @rule(pick=st.randoms(use_true_random=False))
    def stale_word(self, pick) -> None:
        """Something that a killed process said before it died arrives now."""
        generation = pick.choice(self.some("killed", "reaped"))
        before = (self.supervisor.state, self.supervisor.serving, self.supervisor.standby)
        for event in (
            sv.Ready(generation),
            sv.Activated(generation),
            sv.Rebuilt(generation),
            sv.Died(generation, "again"),
            sv.Refused(generation, "late"),
        ):
            assert self.supervisor.handle(event) == []
        assert before == (self.supervisor.state, self.supervisor.serving, self.supervisor.standby)

    # -- what always holds --------------------------------------------------------------------------------------------
    @invariant()
    def one_writer(self) -> None:
        assert len(self.writers) <= 1

    @invariant()
    def nothing_waits_for_ever(self) -> None:
        if not hasattr(self, "supervisor"):
            return
        state = self.supervisor.state
        if state in (sv.State.STARTING, sv.State.COLD_START, sv.State.ACTIVATING):
            assert self.supervisor.deadline is not None
        if state is sv.State.FENCING:
            assert self.fences
        if state is sv.State.CHECKING:
            assert self.checks or self.device_checks
        if state is sv.State.REPLACING_OWNER:
            assert self.replacements
        assert (state is sv.State.UNAVAILABLE) == (self.gave_up is not None)
        if self.supervisor.serving is not None:
            assert self.processes[self.supervisor.serving] == "activated"

    def teardown(self) -> None:
        """Once faults stop, it serves again, protected, or has said why not."""
        if not hasattr(self, "supervisor"):
            return
        for _ in range(200):
            if self.fences:
                generation = self.fences.pop()
                self.processes[generation] = "reaped"
                self.writers.discard(generation)
                self.tell(sv.Fenced(generation))
            elif self.checks:
                self.owner_answers()
            elif self.device_checks:
                self.device_answers(1)
            elif self.replacements:
                self.replacements -= 1
                self.owner_well = self.checked = True
                self.damaged = False
                self.tell(sv.OwnerReplaced(None))
            elif self.some("starting"):
                generation = self.some("starting")[0]
                self.processes[generation] = "ready"
                self.tell(sv.Ready(generation))
            elif self.some("activating"):
                self.answers(False)
            elif self.supervisor.state is sv.State.REBUILDING:
                self.rebuilt()
            else:
                break
        assert self.supervisor.state in (sv.State.SERVING, sv.State.UNAVAILABLE)
        if self.supervisor.state is sv.State.SERVING:
            assert self.supervisor.serving in self.writers
            spent = self.supervisor._standby_failures >= self.supervisor.limits.attempts
            assert self.supervisor.protected or spent or not self.supervisor.limits.standby


TestSupervisor = World.TestCase
TestSupervisor.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
