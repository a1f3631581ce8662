"""What a server says of itself, read from its pages; what it does not say is None and never 0."""

from __future__ import annotations

import itertools
import time

import pytest

from bench import metrics_page
from bench.measurement import metrics_url
from bench.point import Served
from bench.prompt_style import PromptStyle
from bench.sampler import FAILURES_MAX, Sample, Sampler, waits_s
from bench.server import Server
from bench.server_side import look_back
from bench.timeline import SAMPLES_MAX
from tests.bench.mock_pair import StartMock


def page(*, kv: float, waiting: int, preempted: int, queued: list[int], queue_sum_s: float, shed: int = 0) -> str:
    """`queued`: cumulative counts of the buckets 0.1 s, 1 s and infinity."""
    label = 'model_name="m"'
    return "\n".join(
        [
            f"vllm:num_requests_running{{{label}}} 4.0",
            f"vllm:num_requests_waiting{{{label}}} {waiting}",
            f"vllm:kv_cache_usage_perc{{{label}}} {kv}",
            "# TYPE vllm:num_preemptions counter",
            f"vllm:num_preemptions_total{{{label}}} {preempted}",
            "# TYPE vllm:prefix_cache_queries counter",
            f"vllm:prefix_cache_queries_total{{{label}}} {1000 * (1 + preempted)}",
            "# TYPE vllm:prefix_cache_hits counter",
            f"vllm:prefix_cache_hits_total{{{label}}} {250 * (1 + preempted)}",
            "# TYPE rantang:requests_shed counter",
            f'rantang:requests_shed_total{{{label},reason="a"}} {shed}',
            f'rantang:requests_shed_total{{{label},reason="b"}} {shed}',
            "# TYPE vllm:request_queue_time_seconds histogram",
            *(
                f'vllm:request_queue_time_seconds_bucket{{{label},le="{bound}"}} {count}'
                for bound, count in zip(("0.1", "1.0", "+Inf"), queued, strict=True)
            ),
            f"vllm:request_queue_time_seconds_count{{{label}}} {queued[-1]}",
            f"vllm:request_queue_time_seconds_sum{{{label}}} {queue_sum_s}",
            "",
        ]
    )


BEFORE = page(kv=0.1, waiting=0, preempted=2, queued=[10, 10, 10], queue_sum_s=0.5)
DURING = page(kv=0.8, waiting=7, preempted=3, queued=[15, 20, 20], queue_sum_s=2.5, shed=2)
AFTER = page(kv=0.0, waiting=0, preempted=5, queued=[60, 110, 110], queue_sum_s=20.0, shed=2)


def test_high_waters_gains_and_timeline() -> None:
    samples = [Sample(9.5, BEFORE, 100 * 2**20), Sample(11.0, DURING, None), Sample(12.0, AFTER, 300 * 2**20)]
    side, timeline = look_back(samples, 10.0, 12.5, 1.5)
    assert (side.kv_use_max_percent, side.waiting_max, side.running_max) == (80.0, 7.0, 4.0)
    assert (side.preemptions, side.prefix_hit_percent, side.memory_max_mib, side.cpu_cores) == (3.0, 25.0, 300.0, 1.5)
    assert side.queue_ms.p50 == pytest.approx(100.0), "half of the hundred were within the first bucket"
    assert side.queue_ms.p95 == pytest.approx(910.0)
    assert timeline.time_s == (-0.5, 1.0, 2.0)
    assert timeline.queue_ms == (None, 200.0, pytest.approx(194.444))
    assert timeline.shed == (0.0, 4.0, 4.0)
    assert timeline.preemptions == (0.0, 1.0, 3.0)
    assert timeline.memory_mib == (100.0, None, 300.0)
    assert timeline.kv_use_percent == (10.0, 80.0, 0.0)


IDLE = page(kv=0.0, waiting=0, preempted=2, queued=[10, 10, 10], queue_sum_s=0.5).replace('running{model_name="m"} 4.0', "running 0")


@pytest.mark.parametrize(("during", "most"), [([], None), ([IDLE], None), ([IDLE, DURING], 80.0)])
def test_a_high_water_that_no_reading_saw_is_unknown(during: list[str], most: float | None) -> None:
    """A run between two readings, one whose readings fell between its requests, and the control."""
    pages = [Sample(10.1 + i / 10, text, None) for i, text in enumerate(during)]
    samples = [Sample(9.9, BEFORE, 2**20), *pages, Sample(10.6, AFTER, 3 * 2**20)]
    side, _ = look_back(samples, 10.0, 10.5, None)
    assert side.kv_use_max_percent == most
    assert (side.running_max is None, side.waiting_max is None) == (most is None, most is None)
    assert (side.preemptions, side.memory_max_mib) == (3.0, 3.0), "counters and memory are told by what lies around the run"


def test_the_first_readings_come_soon() -> None:
    found = list(itertools.islice(waits_s(1.0), 8))
    assert found[:5] == [0.0625, 0.125, 0.25, 0.5, 1.0] and set(found[4:]) == {1.0}


def test_a_counter_that_fell_says_nothing() -> None:
    side, _ = look_back([Sample(0.0, AFTER, None), Sample(1.0, BEFORE, None)], 0.0, 2.0, None)
    assert (side.preemptions, side.prefix_hit_percent, side.queue_ms.p95) == (None, None, None)


@pytest.mark.parametrize("text", [None, "", "<html>not found</html>", "up 1\n"])
def test_what_no_page_says_is_none(text: str | None) -> None:
    side, timeline = look_back([Sample(0.0, text, None), Sample(1.0, text, None)], 0.0, 2.0, None)
    assert (side.preemptions, side.prefix_hit_percent, side.kv_use_max_percent, side.waiting_max) == (None, None, None, None)
    assert (side.queue_ms.p95, side.memory_max_mib, side.cpu_cores) == (None, None, None)
    assert timeline.running == (None, None)


def test_a_long_run_keeps_a_bounded_timeline() -> None:
    samples = [Sample(float(i), None, i) for i in range(5 * SAMPLES_MAX + 1)]
    assert len(look_back(samples, 0.0, 1e6, None)[1].time_s) <= SAMPLES_MAX
    assert look_back([], 0.0, 0.0, None)[1].time_s == ()


def test_a_quantile_beyond_the_last_bound_is_that_bound() -> None:
    found = metrics_page.MetricsPage({}, {"h": {0.1: 1.0, 1.0: 2.0, float("inf"): 10.0}})
    assert found.quantile("h", 0.99) == 1.0
    assert found.quantile("h", 0.05) == pytest.approx(0.05)
    assert found.quantile("other", 0.5) is None


def test_the_sampler_gives_up_on_a_server_without_metrics_and_holds_nobody() -> None:
    sampler = Sampler("http://127.0.0.1:9/metrics", period_s=0.01, timeout_s=0.2)
    started_s = time.perf_counter()
    sampler.start()
    time.sleep(0.2)
    samples = sampler.stop()
    assert len(samples) > FAILURES_MAX and all(sample.page is None for sample in samples)
    assert time.perf_counter() - started_s < 5


def test_the_sampler_reads_pages_while_a_server_runs(mock_url: StartMock) -> None:
    sampler = Sampler(f"{mock_url()}/metrics", period_s=0.02)
    sampler.start()
    time.sleep(0.15)
    samples = sampler.stop()
    assert len(samples) >= 3 and all(sample.page is not None for sample in samples)


def test_the_pages_of_several_routers_are_not_subtracted(mock_url: StartMock) -> None:
    url = mock_url()
    several = Server(url, PromptStyle("m"), Served(configuration={"routers": "2"}))
    assert metrics_url(several) is None and metrics_url(Server(f"{url}/v1", PromptStyle("m"))) == f"{url}/metrics"
    sampler = Sampler(None, period_s=0.02)
    sampler.start()
    assert all(sample.page is None for sample in sampler.stop())
