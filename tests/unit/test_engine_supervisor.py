"""The supervisor's stories, one by one. The stateful test tries them in every order."""

from __future__ import annotations

import pytest

from belayer.engine import supervisor as sv
from belayer.engine.supervisor import State

pytestmark = pytest.mark.unit


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def started(*, standby: bool = True, ready: bool = True) -> tuple[sv.Supervisor, Clock]:
    """A serving worker 1 and, unless there is to be none, shadow 2."""
    clock = Clock()
    supervisor = sv.Supervisor(sv.Limits(standby=standby), clock)
    spawns = supervisor.begin()
    assert spawns == [sv.Spawn(fill=True)] + [sv.Spawn(fill=False)] * standby
    assert supervisor.handle(sv.Started(1)) == []
    if standby:
        supervisor.handle(sv.Started(2))
    assert supervisor.handle(sv.Ready(1)) == [sv.Activate(1)]
    assert supervisor.handle(sv.Activated(1)) == [sv.Route(1)]
    assert supervisor.handle(sv.Rebuilt(1)) == []
    if standby and ready:
        supervisor.handle(sv.Ready(2))
    assert supervisor.state is State.SERVING and supervisor.protected == (standby and ready)
    return supervisor, clock


def well(supervisor: sv.Supervisor) -> list[sv.Action]:
    """Owner and device answer, in this order, and are well; what follows."""
    assert supervisor.handle(sv.OwnerChecked(None)) == [sv.CheckDevice()]
    return supervisor.handle(sv.DeviceChecked(None))


def cold_started(supervisor: sv.Supervisor, generation: int) -> None:
    assert supervisor.state is State.COLD_START
    supervisor.handle(sv.Started(generation))
    assert supervisor.handle(sv.Ready(generation)) == [sv.Activate(generation)]
    assert supervisor.handle(sv.Activated(generation)) == [sv.Route(generation)]
    assert supervisor.how == "cold start"


def test_promotion() -> None:
    supervisor, _ = started()
    assert supervisor.handle(sv.Died(1, "SIGKILL")) == [sv.Fence(1)]
    assert supervisor.serving is None
    assert supervisor.handle(sv.Fenced(1)) == [sv.CheckOwner()]
    assert well(supervisor) == [sv.Activate(2)]
    assert supervisor.serving is None  # answering made nobody eligible
    assert supervisor.handle(sv.Activated(2)) == [sv.Route(2)]
    assert (supervisor.serving, supervisor.how, supervisor.state) == (2, "promotion", State.REBUILDING)
    assert supervisor.handle(sv.Rebuilt(2)) == [sv.Spawn(fill=False)]


def test_an_owner_that_dies_between_the_two_answers_is_not_relied_upon() -> None:
    for standby in (True, False):
        supervisor, _ = started(standby=standby)
        supervisor.handle(sv.Died(1, "SIGKILL"))
        supervisor.handle(sv.Fenced(1))
        assert supervisor.handle(sv.OwnerChecked(None)) == [sv.CheckDevice()]
        assert supervisor.handle(sv.OwnerLost()) == []
        fences = [sv.Fence(2)] if standby else []
        assert supervisor.handle(sv.DeviceChecked(None)) == [*fences, sv.ReplaceOwner(sv.Cause.LOST)]
        assert supervisor.handle(sv.OwnerReplaced(None)) == [sv.Spawn(fill=False)]
        cold_started(supervisor, 3)


def test_a_long_rebuild_is_not_without_a_shadow() -> None:
    supervisor, clock = started()
    supervisor.handle(sv.Died(1, "SIGKILL"))
    supervisor.handle(sv.Fenced(1))
    well(supervisor)
    assert supervisor.handle(sv.Activated(2)) == [sv.Route(2)]
    assert supervisor.deadline == supervisor.limits.arm_s
    assert supervisor.handle(sv.Tick()) == []  # a short one has the machine to itself
    clock.now = supervisor.limits.arm_s
    assert supervisor.handle(sv.Tick()) == [sv.Spawn(fill=False)]
    assert supervisor.deadline is None and supervisor.handle(sv.Tick()) == []
    supervisor.handle(sv.Started(3))
    supervisor.handle(sv.Ready(3))
    assert supervisor.handle(sv.Died(2, "again")) == [sv.Fence(2)]
    assert supervisor.handle(sv.Fenced(2)) == [sv.CheckOwner()]
    assert well(supervisor) == [sv.Activate(3)]
    assert supervisor.handle(sv.Activated(3)) == [sv.Route(3)]
    assert supervisor.handle(sv.Rebuilt(3)) == [sv.Spawn(fill=False)]  # before it was time


def test_a_shadow_that_dies_during_a_rebuild_is_replaced_when_it_is_time() -> None:
    supervisor, clock = started()
    supervisor.handle(sv.Died(1, "SIGKILL"))
    supervisor.handle(sv.Fenced(1))
    well(supervisor)
    supervisor.handle(sv.Activated(2))
    clock.now = 1.0
    assert supervisor.handle(sv.Tick()) == [sv.Spawn(fill=False)]
    supervisor.handle(sv.Started(3))
    assert supervisor.handle(sv.Died(3, "too soon")) == [sv.Fence(3), sv.Spawn(fill=False)]
    assert supervisor.state is State.REBUILDING and supervisor.serving == 2


def test_nobody_is_let_in_before_every_fence_is_done() -> None:
    supervisor, _ = started()
    assert supervisor.handle(sv.Died(2, "shadow")) == [sv.Fence(2), sv.Spawn(fill=False)]
    supervisor.handle(sv.Started(3))
    supervisor.handle(sv.Ready(3))
    assert supervisor.handle(sv.Hung(1, "stuck")) == [sv.Fence(1)]
    assert supervisor.handle(sv.Fenced(2)) == []  # the old shadow is gone, the worker is not yet
    assert supervisor.handle(sv.Fenced(1)) == [sv.CheckOwner()]
    assert well(supervisor) == [sv.Activate(3)]


def test_without_a_shadow_it_starts_from_cold() -> None:
    supervisor, _ = started(standby=False)
    supervisor.handle(sv.Died(1, "SIGKILL"))
    supervisor.handle(sv.Fenced(1))
    assert well(supervisor) == [sv.Spawn(fill=False)]
    cold_started(supervisor, 2)
    assert supervisor.handle(sv.Rebuilt(2)) == []  # and no shadow is started where none is wanted


def test_a_half_started_shadow_is_quicker_than_a_new_process() -> None:
    supervisor, _ = started(ready=False)
    supervisor.handle(sv.Died(1, "SIGKILL"))
    supervisor.handle(sv.Fenced(1))
    assert well(supervisor) == []
    assert supervisor.handle(sv.Ready(2)) == [sv.Activate(2)]


@pytest.mark.parametrize("failure", ["refused", "died", "too late"])
def test_a_failed_promotion_ends_in_a_cold_start(failure: str) -> None:
    supervisor, clock = started()
    supervisor.handle(sv.Died(1, "SIGKILL"))
    supervisor.handle(sv.Fenced(1))
    well(supervisor)
    clock.now += supervisor.limits.promote_s - 0.1
    assert supervisor.handle(sv.Tick()) == []
    if failure == "too late":
        clock.now += 0.2
        event: sv.Event = sv.Tick()
    else:
        event = sv.Refused(2, "wrong layout") if failure == "refused" else sv.Died(2, "SIGSEGV")
    assert supervisor.handle(event) == [sv.Fence(2)]
    assert supervisor.handle(sv.Activated(2)) == []  # too late
    assert supervisor.handle(sv.Fenced(2)) == [sv.CheckOwner()]
    assert well(supervisor) == [sv.Spawn(fill=False)]
    cold_started(supervisor, 3)


def test_a_dead_owner_is_replaced_before_anybody_serves_again() -> None:
    supervisor, _ = started()
    supervisor.handle(sv.Died(1, "SIGKILL"))
    supervisor.handle(sv.Fenced(1))
    # the shadow looks at memory of an owner that is gone
    assert supervisor.handle(sv.OwnerChecked("the owner is dead")) == [sv.Fence(2), sv.ReplaceOwner()]
    supervisor.handle(sv.Fenced(2))
    assert supervisor.handle(sv.OwnerReplaced(None)) == [sv.Spawn(fill=False)]
    cold_started(supervisor, 3)


def test_the_worker_outlives_its_owner() -> None:
    supervisor, _ = started()
    assert supervisor.handle(sv.OwnerLost()) == [sv.Fence(2), sv.ReplaceOwner()]
    assert supervisor.serving == 1 and not supervisor.protected
    assert supervisor.handle(sv.OwnerLost()) == []
    supervisor.handle(sv.Fenced(2))
    assert supervisor.handle(sv.OwnerReplaced(None)) == [sv.Spawn(fill=False)]
    assert supervisor.state is State.SERVING


def test_a_worker_without_an_owner_serves_on_unprotected() -> None:
    supervisor, _ = started()
    supervisor.handle(sv.OwnerLost())
    supervisor.handle(sv.Fenced(2))
    assert supervisor.handle(sv.OwnerReplaced("no memory")) == []
    assert supervisor.serving == 1 and supervisor.state is State.SERVING


def test_attempts_are_bounded_and_the_first_reason_is_kept() -> None:
    supervisor, _ = started(standby=False)
    assert supervisor.handle(sv.Died(1, "first")) == [sv.Fence(1)]
    supervisor.handle(sv.Fenced(1))
    well(supervisor)
    for attempt in range(2, 10):
        supervisor.handle(sv.Started(attempt))
        supervisor.handle(sv.Died(attempt, f"later {attempt}"))
        actions = supervisor.handle(sv.Fenced(attempt))
        if actions != [sv.CheckOwner()]:
            break
        well(supervisor)
    assert actions == [sv.GiveUp("first")]
    assert attempt == 1 + supervisor.limits.attempts
    assert supervisor.state is State.UNAVAILABLE
    assert supervisor.handle(sv.Ready(9)) == [] and supervisor.handle(sv.Tick()) == []


def test_a_request_that_kills_every_worker_does_not_do_so_for_ever() -> None:
    supervisor, _ = started(standby=False)
    for generation in range(1, 10):
        supervisor.handle(sv.Died(generation, f"death {generation}"))
        actions = supervisor.handle(sv.Fenced(generation))
        if actions != [sv.CheckOwner()]:
            break
        well(supervisor)
        cold_started(supervisor, generation + 1)  # it is routed to, and dies before the first token
    assert actions == [sv.GiveUp("death 1")]


def test_faults_far_apart_do_not_add_up() -> None:
    supervisor, _ = started(standby=False)
    for generation in range(1, 20):
        supervisor.handle(sv.Died(generation, "SIGKILL"))
        supervisor.handle(sv.Fenced(generation))
        well(supervisor)
        cold_started(supervisor, generation + 1)
        supervisor.handle(sv.Rebuilt(generation + 1))
        assert supervisor.state is State.SERVING


def test_a_start_that_fails_is_not_tried_again() -> None:
    """The cause is the model or the configuration; the caller wants to know it now."""
    supervisor = sv.Supervisor(sv.Limits(), Clock())
    supervisor.begin()
    supervisor.handle(sv.Started(1))
    supervisor.handle(sv.Started(2))
    assert supervisor.handle(sv.Died(1, "no such architecture")) == [sv.Fence(1)]
    assert supervisor.handle(sv.Fenced(1)) == [sv.GiveUp("no such architecture")]


def test_a_start_has_a_deadline() -> None:
    clock = Clock()
    supervisor = sv.Supervisor(sv.Limits(start_s=10, standby=False), clock)
    supervisor.begin()
    supervisor.handle(sv.Started(1))
    assert supervisor.deadline == 10
    clock.now = 10
    assert supervisor.handle(sv.Tick()) == [sv.Fence(1)]
    assert supervisor.handle(sv.Fenced(1)) == [sv.GiveUp("worker 1 not ready within 10 s")]


def test_a_shadow_that_keeps_failing_is_given_up_and_the_worker_is_not() -> None:
    supervisor, clock = started(ready=False)
    for generation in range(2, 10):
        clock.now += supervisor.limits.start_s  # it never becomes ready
        actions = supervisor.handle(sv.Tick())
        supervisor.handle(sv.Fenced(generation))
        assert actions[0] == sv.Fence(generation)
        if len(actions) == 1:
            break
        supervisor.handle(sv.Started(generation + 1))
    assert generation == 1 + supervisor.limits.attempts
    assert supervisor.serving == 1 and supervisor.state is State.SERVING and supervisor.deadline is None


def test_closed_is_the_end() -> None:
    supervisor, _ = started()
    supervisor.handle(sv.Close())
    assert supervisor.handle(sv.Died(1, "SIGKILL")) == [] and supervisor.state is State.CLOSED


def test_a_device_that_is_not_well_is_left_with_everything_on_it() -> None:
    supervisor, _ = started()
    supervisor.handle(sv.Died(1, "CUDA error"))
    supervisor.handle(sv.Fenced(1))
    assert supervisor.handle(sv.OwnerChecked(None)) == [sv.CheckDevice()]
    assert supervisor.handle(sv.DeviceChecked("Xid 79")) == [sv.Fence(2), sv.ReplaceOwner(sv.Cause.DEVICE)]
    supervisor.handle(sv.Fenced(2))
    assert supervisor.handle(sv.OwnerReplaced(None)) == [sv.Spawn(fill=False)]
    cold_started(supervisor, 3)


def test_damaged_weights_stop_everybody_and_come_from_their_source() -> None:
    supervisor, _ = started()
    assert supervisor.handle(sv.WeightsDamaged("digest")) == [sv.Fence(1), sv.Fence(2)]
    assert supervisor.serving is None
    assert supervisor.handle(sv.WeightsDamaged("digest")) == []  # the worker noticed it too
    assert supervisor.handle(sv.Fenced(2)) == []
    assert supervisor.handle(sv.Fenced(1)) == [sv.ReplaceOwner(sv.Cause.DAMAGED)]
    assert supervisor.handle(sv.OwnerReplaced(None)) == [sv.Spawn(fill=False)]
    cold_started(supervisor, 3)


def test_weights_without_another_source_are_the_end() -> None:
    supervisor, _ = started()
    supervisor.handle(sv.WeightsDamaged("epoch 3 has another digest"))
    supervisor.handle(sv.Fenced(1))
    supervisor.handle(sv.Fenced(2))
    assert supervisor.handle(sv.OwnerReplaced("no source")) == [sv.GiveUp("epoch 3 has another digest")]
