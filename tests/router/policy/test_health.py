import msgspec

from replica.contract.messages import LoadReport
from router.policy.health import COLD_STALL_MIN_S, Breaker, Flaps, Health, Pulse
from router.policy.incarnation import Incarnation
from router.policy.retry_budget import RetryBudget
from tests.router.modelled_replica import ModelledReplica


def load(progress: int = 1000, running: int = 1, step_s: float = 0.01) -> LoadReport:
    return msgspec.structs.replace(ModelledReplica("r0").load(), progress=progress, running=running, predicted_step_s=step_s)


def health(step_s: float = 0.01, progress: int = 1000) -> Health:
    return Health(load(progress, step_s=step_s), now=0.0)


def test_work_without_progress_is_a_stall_even_while_frames_come() -> None:
    one = health()
    one.work(True, 0.0)
    for i in range(1, 5):
        one.frame(load(), True, now=i * 0.5)
        assert not one.check(i * 0.5)
    one.frame(load(), True, now=2.1)
    assert one.check(2.1)
    assert not one.check(2.2), "told once"


def test_reports_that_say_idle_do_not_hide_work_that_was_swallowed() -> None:
    one = health()
    one.work(True, 0.0)
    for i in range(1, 5):
        one.frame(load(running=0), True, now=i * 0.5)
    assert one.check(2.1)


def test_the_clock_of_progress_starts_with_the_work() -> None:
    one = health()
    for i in range(1, 100):
        one.frame(load(running=0), False, now=i * 0.5)
        assert not one.check(i * 0.5)
    one.work(True, 49.9)
    one.frame(load(running=0), True, now=50.4)
    assert not one.check(51.8)
    one.frame(load(running=0), True, now=51.9)
    assert one.check(52.0)


def test_silence_is_a_stall_without_work_too() -> None:
    one = health()
    assert not one.check(1.9)
    assert one.check(2.1)


def test_long_steps_are_given_four_of_them() -> None:
    one = health(step_s=3.0)
    one.work(True, 0.0)
    assert not one.check(11.9)
    assert one.check(12.1)


def test_a_step_longer_than_predicted_was_seen_so_it_may_come_again() -> None:
    one = health()
    one.work(True, 0.0)
    one.frame(load(progress=1001), True, now=1.9)
    assert not one.check(1.9 + 3.7)
    assert one.check(1.9 + 3.9)


def test_the_first_steps_of_an_unfitted_replica_may_be_long() -> None:
    one = health(progress=0)
    one.work(True, 0.0)
    assert not one.check(COLD_STALL_MIN_S - 0.1)
    assert one.check(COLD_STALL_MIN_S + 0.1)


def test_the_probe_gets_longer_with_every_stall_that_follows_soon() -> None:
    one, now, frames = health(), 0.0, []
    for _ in range(3):
        now += 3.0
        assert one.check(now)
        count = 0
        while one.pulse is Pulse.STALLED:
            count += 1
            now += 0.5
            one.frame(load(running=0), False, now)
        frames.append(count)
    assert frames == [2, 8, 32]
    for step in range(30):
        one.frame(load(progress=2000 + step), True, now)
    now += 3.0
    assert one.check(now)
    one.frame(load(progress=3000), True, now)
    assert one.frame(load(progress=3001), True, now), "healed: two frames are enough again"


def test_a_while_of_connection_forgets_the_failures() -> None:
    one = Breaker()
    assert [one.failed(float(i)) for i in range(3)] == [1, 2, 3]
    one.connected(10.0)
    assert one.failed(11.0) == 4
    one.connected(20.0)
    assert one.failed(40.0) == 1


def test_retries_are_a_tenth_of_the_requests() -> None:
    one = RetryBudget()
    taken = 0
    for _ in range(1000):
        one.request()
        taken += one.take()
    assert 95 <= taken <= 104


def test_a_frame_does_not_forget_what_is_on_its_way() -> None:
    """The report was written before our work came there: the step that will take it may still be a long one."""
    one = health()
    one.work(True, 0.0)
    one.expect(3.0)
    one.frame(load(progress=1001), True, 0.1)
    one.expect(3.0)
    assert one.limit_s() == 12.0
    one.frame(load(progress=1002), True, 0.2)
    assert one.limit_s() == 2.0, "the control: without it the limit is the shortest one"


def test_weight_falls_before_a_stall_and_rises_after_it() -> None:
    one = health()
    assert one.weight(100.0) == 1.0, "idle: nothing is overdue"
    one.work(True, 0.0)
    weights = [one.weight(now) for now in (0.0, 0.5, 1.0, 1.5, 1.95)]
    assert weights[0] == 1.0 and weights[-1] == 0.1
    assert weights == sorted(weights, reverse=True) and len(set(weights)) == 5
    assert one.check(2.1)
    for step in range(2):
        one.frame(load(progress=1001 + step), True, 2.2 + step / 100)
    assert one.pulse is Pulse.BEATING and one.weight(2.22) == 0.5
    for step in range(20):
        one.frame(load(progress=1100 + step), True, 2.3 + step / 100)
    assert one.weight(2.5) == 1.0, "healed"


def test_links_that_break_lower_the_weight_of_the_same_life_only() -> None:
    flaps = Flaps()
    life, reborn = Incarnation("r0", 1), Incarnation("r0", 2)
    for now in (1.0, 2.0):
        flaps.lost(life, now)
    assert (flaps.connected(life, 3.0), flaps.connected(reborn, 3.0), flaps.connected(life, 13.0)) == (2, 0, 0)
    one = Health(load(), 3.0, flaps=2)
    assert (one.weight(3.0), one.weight(14.0)) == (0.25, 1.0)
    for i in range(3000):
        flaps.lost(Incarnation(f"x{i}", 1), 4.0)
    assert len(flaps._lost) == Flaps._KEPT_MAX
