import pytest

from router.policy.utilisation import HALF_LIFE_S, Utilisation


def loaded(work_s: float, seconds: int) -> Utilisation:
    """`work_s` were sent in every second."""
    utilisation = Utilisation()
    for second in range(seconds):
        utilisation.add(work_s, float(second))
    return utilisation


def test_a_steady_load_is_found_and_shared_by_the_replicas() -> None:
    utilisation = loaded(2.0, 400)
    assert utilisation.of(4, 399.5) == pytest.approx(0.5, abs=0.01)
    assert utilisation.of(8, 399.5) == pytest.approx(0.25, abs=0.01)


def test_it_is_forgotten_and_a_fresh_router_knows_nothing() -> None:
    utilisation = loaded(2.0, 400)
    assert utilisation.of(4, 399.5 + HALF_LIFE_S) == pytest.approx(0.25, abs=0.01)
    assert Utilisation().of(4, 1e6) == 0.0


def test_more_than_there_is_and_no_replica_stay_below_one() -> None:
    assert loaded(20.0, 400).of(4, 399.5) == 0.9
    assert loaded(20.0, 400).of(0, 399.5) == 0.9


def test_a_clock_that_stands_or_nothing_to_do_changes_nothing() -> None:
    utilisation = loaded(2.0, 400)
    before = utilisation.of(4, 399.0)
    assert utilisation.of(4, 300.0) == before
    utilisation.add(-5.0, 399.0)
    assert utilisation.of(4, 399.0) == before
