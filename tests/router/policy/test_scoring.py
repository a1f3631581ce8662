from router.policy.forecast import Forecast
from router.policy.incarnation import Incarnation
from router.policy.request_view import RequestView
from router.policy.scoring import Candidate, LeastTtft
from tests.router.policy.replica_views import view

ANY = RequestView(100, (), 10)


def candidate(
    name: str, ttft_s: float, *, new: int = 100, batch: int = 1, scale: float = 1.0, tpot: bool = True, stale: bool = False
) -> Candidate:
    forecast = Forecast(0.0, ttft_s, ttft_s, 0.01, 0.01, new, float(new), 0, 0, 7, batch, 0.1)
    return Candidate(Incarnation(name, 1), forecast, view(name), scale, tpot, stale, tiebreak=int(name[1:]))


def chosen(*candidates: Candidate, seed: int = 1) -> str:
    return LeastTtft(seed).choose(ANY, candidates, 0.0).incarnation.replica_id


def test_a_hit_counts_however_the_loads_differ() -> None:
    """RTR-05: the fourth has the prefix and a longer queue; it wins exactly when the hit saves more than the queue costs."""
    others = [candidate(f"r{i}", 1.0) for i in range(3)]
    assert chosen(*others, candidate("r3", 0.9)) == "r3"
    assert chosen(*others, candidate("r3", 1.1)) != "r3"


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
