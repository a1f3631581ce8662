from collections.abc import Callable

from router.policy.forecast import Forecast
from router.policy.incarnation import Incarnation
from router.policy.request_view import RequestView
from router.policy.scoring import Candidate, LeastDelay, LeastTtft, Policy
from tests.router.policy.replica_views import view

ANY = RequestView(100, (), 10)


def candidate(
    name: str,
    ttft_s: float,
    *,
    new: int = 100,
    batch: int = 1,
    scale: float = 1.0,
    tpot: bool = True,
    stale: bool = False,
    busy: float = 0.0,
) -> Candidate:
    """A token takes a millisecond to prefill."""
    forecast = Forecast(0.0, ttft_s, ttft_s, 0.01, 0.01, new, float(new), 0, 0, 7, batch, 0.1, token_s=0.001)
    return Candidate(Incarnation(name, 1), forecast, view(name), scale, tpot, stale, tiebreak=int(name[1:]), utilisation=busy)


def chosen(*candidates: Candidate, seed: int = 1, policy: Callable[[int], Policy] = LeastDelay) -> str:
    return policy(seed).choose(ANY, candidates, 0.0).incarnation.replica_id


def test_a_hit_counts_however_the_loads_differ() -> None:
    """RTR-05: the fourth has the prefix and a longer queue; it wins exactly when the hit saves more than the queue costs."""
    others = [candidate(f"r{i}", 1.0) for i in range(3)]
    assert chosen(*others, candidate("r3", 0.9)) == "r3"
    assert chosen(*others, candidate("r3", 1.1)) != "r3"


def test_the_busier_the_replicas_the_more_a_queue_is_worth_what_it_saves() -> None:
    """The first has the prefix behind a queue: 0.4 s later, 0.4 s less to prefill. At ρ = 0.5 a second of work costs one of others."""

    def where(queue_s: float, busy: float, policy: Callable[[int], Policy] = LeastDelay) -> str:
        hit = candidate("r0", 0.1 + queue_s, new=100, busy=busy)
        return chosen(hit, candidate("r1", 0.5, new=500, busy=busy), policy=policy)

    assert where(0.7, busy=0.0) == "r1", "nobody else is there: its own time alone"
    assert where(0.7, busy=0.5) == "r0", "0.8 + 0.1 against 0.5 + 0.5"
    assert where(0.9, busy=0.5) == "r1", "1.0 + 0.1 against 0.5 + 0.5"
    assert where(3.5, busy=0.9) == "r0", "3.6 + 0.9 against 0.5 + 4.5"
    assert where(0.7, busy=0.9, policy=LeastTtft) == "r1", "the control: it does not look at others"


def test_the_learned_scale_decides() -> None:
    assert chosen(candidate("r0", 1.0, scale=3.0), candidate("r1", 2.0)) == "r1"


def test_ties_go_to_the_least_work_for_everyone() -> None:
    assert chosen(candidate("r0", 1.00, new=400, batch=2), candidate("r1", 1.04, new=20, batch=5)) == "r1"
    assert chosen(candidate("r0", 1.00, new=400, batch=2), candidate("r1", 1.06, new=20, batch=5)) == "r0"


def test_equal_ones_are_drawn_by_the_routers_own_seed() -> None:
    fleet = [candidate(f"r{i}", 1.0) for i in range(8)]
    draws = [chosen(*fleet, seed=seed) for seed in range(20)]
    assert len(set(draws)) > 3, "routers do not herd"
    assert draws == [chosen(*fleet, seed=seed) for seed in range(20)]


def test_who_keeps_the_inter_token_time_and_who_is_heard_of_come_first() -> None:
    assert chosen(candidate("r0", 1.0, tpot=False), candidate("r1", 5.0)) == "r1"
    assert chosen(candidate("r0", 1.0, stale=True), candidate("r1", 5.0)) == "r1"
    assert chosen(candidate("r0", 1.0, stale=True), candidate("r1", 5.0, stale=True)) == "r0", "all are dark: go on by own counts"
