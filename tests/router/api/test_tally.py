"""The page says what prometheus_client's own histogram would say."""

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from router.api.tally import Tally

BOUNDS = (0.005, 0.01, 0.1, 2.5)


def test_many_at_once_count_as_one_after_the_other() -> None:
    registry = CollectorRegistry()
    tally = Tally("many", "At once.", ("how",), BOUNDS, registry)
    at_once, singly = tally.labels("at once"), tally.labels("singly")
    at_once.observe(0.004, 3)
    for _ in range(3):
        singly.observe(0.004)
    assert (at_once.counts, at_once.total) == (singly.counts, singly.total) == ([3, 0, 0, 0, 0], 0.012)


def test_the_page_is_that_of_an_ordinary_histogram() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = Tally("vllm:gap_seconds", "Between two.", ("model_name",), BOUNDS, ours).labels("m")
    plain = Histogram("vllm:gap_seconds", "Between two.", ("model_name",), registry=theirs, buckets=BOUNDS).labels(model_name="m")
    for value in (0.0, 0.004, 0.005, 0.0051, 0.1, 0.11, 2.5, 99.0):
        tally.observe(value)
        plain.observe(value)

    def page(registry: CollectorRegistry) -> list[str]:
        return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]

    assert page(ours) == page(theirs)
