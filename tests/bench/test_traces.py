"""Traces are read with their prefixes, a broken line is named, and the converter lets no text through."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import traces
from bench.arrivals import check_arrivals
from bench.convert import convert
from bench.load import Arrivals, Load
from bench.simulator.trace import read_trace
from bench.traces import Fit
from bench.workload import Workload
from bench.workloads import workload

MOONCAKE = [
    {"timestamp": 27000, "input_length": 1100, "output_length": 500, "hash_ids": [0, 14, 15]},
    {"timestamp": 0, "input_length": 1000, "output_length": 52, "hash_ids": [0, 1]},
    {"timestamp": 30000, "input_length": 40000, "output_length": 3, "hash_ids": [0, 14, *range(100, 177)]},
]


def written(tmp_path: Path, lines: list[object], name: str = "t.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def common(works: Workload, a: int, b: int) -> int:
    """How many first tokens two prompts share."""
    one, two = works.calls[a].prompt_ids(), works.calls[b].prompt_ids()
    return next((i for i, (x, y) in enumerate(zip(one, two, strict=False)) if x != y), min(len(one), len(two)))


def test_equal_block_ids_are_equal_tokens(tmp_path: Path) -> None:
    works = workload(str(written(tmp_path, list(MOONCAKE))))
    assert [call.due_s for call in works] == [0.0, 27.0, 30.0]
    assert [call.prompt_tokens for call in works] == [1000, 1100, 8189]
    assert [call.output_tokens for call in works] == [52, 500, 3]
    assert common(works, 0, 1) == 512
    assert common(works, 1, 2) == 1024
    assert "1 of 3 cut to 8192" in works.description


def test_lengths_scale_and_prefixes_with_them(tmp_path: Path) -> None:
    works = workload(str(written(tmp_path, list(MOONCAKE))), fit=Fit(length_scale=0.25))
    assert [call.prompt_tokens for call in works] == [250, 275, 8191]
    assert common(works, 0, 1) == 128
    assert common(works, 1, 2) == 256
    assert "0 of 3 cut" not in works.description
    with pytest.raises(ValueError, match="positive"):
        Fit(length_scale=0)


def test_only_the_first_requests_are_read(tmp_path: Path) -> None:
    path = written(tmp_path, [*MOONCAKE[:2], "{broken"])
    assert len(workload(str(path), requests=2)) == 2
    with pytest.raises(ValueError, match="line 3"):
        workload(str(path), requests=3)


@pytest.mark.parametrize(
    "line",
    [
        "{broken",
        '{"timestamp": -1, "input_length": 5, "output_length": 1}',
        '{"timestamp": 1, "input_length": 0, "output_length": 1}',
        '{"timestamp": 1, "input_length": 1' + 400 * "0" + ', "output_length": 1}',
        '{"timestamp": 1' + 400 * "0" + ', "input_length": 5, "output_length": 1}',
        '{"timestamp": 1, "input_length": 5, "output_length": "many"}',
        '{"timestamp": 1, "output_length": 1}',
        '{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [-3]}',
        "[]",
    ],
)
def test_a_broken_line_is_named_by_its_number(tmp_path: Path, line: str) -> None:
    good = '{"timestamp": 1, "input_length": 5, "output_length": 1}'
    assert len(workload(str(written(tmp_path, [good, "", good])))) == 2, "the control: nothing else is wrong"
    with pytest.raises(ValueError, match=r"^t\.jsonl, line 3: "):
        workload(str(written(tmp_path, [good, "", line])))


def test_empty_and_endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="holds no request"):
        workload(str(written(tmp_path, [])))
    monkeypatch.setattr(traces, "LINE_BYTES_MAX", 100)
    with pytest.raises(ValueError, match="line 1: longer than 100 bytes"):
        workload(str(written(tmp_path, ["x" * 1000])))


def test_azure_has_times_and_lengths(tmp_path: Path) -> None:
    lines: list[object] = [
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:17:03.9799600,4808,10",
        "2023-11-16 18:17:04.0319600,3180,8",
    ]
    works = workload(str(written(tmp_path, lines, "t.csv")))
    assert [(call.prompt_tokens, call.output_tokens) for call in works] == [(4808, 10), (3180, 8)]
    assert works.calls[1].due_s == pytest.approx(0.052)
    assert common(works, 0, 1) == 0
    for bad in ("yesterday,1,1", "2023-11-16 18:17:04.0,many,1", "2023-11-16 18:17:04.0,5"):
        with pytest.raises(ValueError, match=r"t\.csv, line 4: "):
            workload(str(written(tmp_path, [*lines, bad], "t.csv")))
    with pytest.raises(ValueError, match="line 1: no column ContextTokens"):
        workload(str(written(tmp_path, ["TIMESTAMP,GeneratedTokens"], "t.csv")))


def test_buckets_are_spread_and_other_times_stay(tmp_path: Path) -> None:
    def due(stamps: list[int]) -> list[float]:
        lines: list[object] = [{"timestamp": stamp, "input_length": 9, "output_length": 1} for stamp in stamps]
        works = workload(str(written(tmp_path, lines)))
        assert ("spread inside buckets of 3 s" in works.description) is (len(set(stamps)) < len(stamps) and 3100 not in stamps)
        return [call.due_s for call in works]

    assert due([0, 0, 0, 3000, 3000, 6000]) == [0.0, 1.0, 2.0, 3.0, 4.5, 6.0]
    assert due([0, 0, 2999, 3001, 5997]) == [0.0, 1.5, 3.0, 4.5, 6.0], "a few milliseconds early or late, as Mooncake's are"
    assert due([0, 0, 3000, 3100]) == [0.0, 0.0, 3.0, 3.1]
    assert due([0, 3000, 9000]) == [0.0, 3.0, 9.0]


def test_only_mooncakes_own_times_are_spread(tmp_path: Path) -> None:
    plain = {"timestamp": 0, "input_length": 9, "output_length": 1}
    bucketed = [plain, plain, {**plain, "timestamp": 3000}]

    def due(lines: list[dict[str, object]], requests: int | None = None) -> tuple[list[float], bool]:
        works = workload(str(written(tmp_path, list(lines))), requests=requests)
        return [call.due_s for call in works], "all due at once" in works.description

    assert due(bucketed) == ([0.0, 1.5, 3.0], False), "the control"
    assert due(bucketed, 2) == ([0.0, 1.5], False), "the first of a trace in buckets"
    for own in ({"block_tokens": 16}, {"group": "x"}, {"cancel_after_ms": 5.0}):
        assert due([line | own for line in bucketed]) == ([0.0, 0.0, 3.0], False)
        assert due([plain | own] * 3) == ([0.0, 0.0, 0.0], True)
    assert due([plain] * 3) == ([0.0, 0.0, 0.0], True), "one bucket alone is none"
    azure: list[object] = ["TIMESTAMP,ContextTokens,GeneratedTokens", *["2023-11-16 18:17:03,5,1"] * 2, "2023-11-16 18:17:06,5,1"]
    assert [call.due_s for call in workload(str(written(tmp_path, azure, "t.csv")))] == [0.0, 0.0, 3.0]


def test_a_converted_log_without_differing_times_arrives_together(tmp_path: Path) -> None:
    convert(written(tmp_path, [log_line(0, "Who?")] * 4, "log.jsonl"), tmp_path / "trace.jsonl")
    works = workload(str(tmp_path / "trace.jsonl"))
    assert [call.due_s for call in works] == [0.0] * 4 and works.description.endswith("all due at once")
    with pytest.raises(ValueError, match=r"all due at once: .* --arrivals"):
        check_arrivals(works, Load(rate_per_s=2.0))
    check_arrivals(works, Load(rate_per_s=2.0, arrivals=Arrivals.EVEN))
    check_arrivals(works, Load())


def test_azure_times_with_and_without_zone_and_fraction(tmp_path: Path) -> None:
    times = ("2023-11-16 18:17:03", "2023-11-16 18:17:04+00:00", "2023-11-16 20:17:05.5000000+02:00", "2023-11-16 18:17:06.25Z")
    lines: list[object] = ["TIMESTAMP,ContextTokens,GeneratedTokens", *(f"{time},5,1" for time in times)]
    path = written(tmp_path, lines, "t.csv")
    assert [call.due_s for call in workload(str(path))] == [0.0, 1.0, 2.5, 3.25]
    assert [one.arrival_s for one in read_trace(path)] == [0.0, 1.0, 2.5, 3.25]


SECRET = "The patient is called Zebedee Quux and lives at 7 Nowhere Lane. "
SYSTEM = {"role": "system", "content": SECRET * 10}


def log_line(at: object, question: str, **more: object) -> dict[str, object]:
    messages = [SYSTEM, {"role": "user", "content": question}]
    return {"timestamp": at, "messages": messages, "usage": {"prompt_tokens": 200, "completion_tokens": 30}} | more


def test_converter_keeps_times_lengths_and_prefixes_and_no_text(tmp_path: Path) -> None:
    log = written(
        tmp_path,
        [
            log_line(1700000000.5, "Who?"),
            log_line("2023-11-14T22:13:21+00:00", "Where does he live, and with whom, since when, and who else knows of it by now?"),
            {"created": 1700000004, "request": {"prompt": list(range(40))}, "response": {"usage": {"completion_tokens": 4}}},
            {"timestamp": 1700000005, "prompt": SECRET, "output_tokens": 2},
        ],
        "log.jsonl",
    )
    target = tmp_path / "trace.jsonl"
    done = convert(log, target)
    assert (done.requests, done.estimated) == (4, 1)
    text = target.read_text()
    for word in ("Zebedee", "Quux", "patient", "system", "role", "content"):
        assert word not in text
    assert {key for line in text.splitlines() for key in json.loads(line)} <= {
        "timestamp",
        "input_length",
        "output_length",
        "hash_ids",
        "block_tokens",
    }
    works = workload(str(target))
    assert [call.due_s for call in works] == [0.0, 0.5, 3.5, 4.5]
    assert [call.prompt_tokens for call in works][:3] == [200, 200, 40]
    assert [call.output_tokens for call in works] == [30, 30, 4, 2]
    shared = common(works, 0, 1)
    assert 144 <= shared < 200 and shared % 16 == 0, "the system prompt's 640 characters and little more"
    assert common(works, 0, 2) == 0
    assert sorted({number for line in text.splitlines() for number in json.loads(line).get("hash_ids", [])})[0] == 0


def test_equal_text_in_another_place_has_another_number(tmp_path: Path) -> None:
    block = "x" * 64
    log = written(
        tmp_path,
        [{"timestamp": 0, "prompt": block * 2, "output_tokens": 1}, {"timestamp": 1, "prompt": "y" + block * 2, "output_tokens": 1}],
    )
    convert(log, tmp_path / "out.jsonl")
    numbers = [json.loads(line)["hash_ids"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert numbers == [[0, 1], [2, 3]]


@pytest.mark.parametrize("per_s", [1, 1_000, 1_000_000, 1_000_000_000])
def test_units_of_times_are_told_by_their_size(tmp_path: Path, per_s: int) -> None:
    stamps = [round(at_s * per_s) for at_s in (1_700_000_000, 1_700_000_002, 1_700_000_005)]
    convert(written(tmp_path, [log_line(stamp, "Who?") for stamp in stamps], "log.jsonl"), tmp_path / "trace.jsonl")
    assert [call.due_s for call in workload(str(tmp_path / "trace.jsonl"))] == pytest.approx([0.0, 2.0, 5.0])


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("nonsense", "line 2"),
        ({"messages": [SYSTEM], "output_tokens": 3}, "line 2: no time"),
        ({"timestamp": "soon", "messages": [SYSTEM], "output_tokens": 3}, "line 2: `timestamp` is no time"),
        ({"timestamp": 1.7e21, "messages": [SYSTEM], "output_tokens": 3}, "line 2: `timestamp` is no time"),
        ({"timestamp": 17 * 10**400, "messages": [SYSTEM], "output_tokens": 3}, "line 2"),
        ({"timestamp": -5, "messages": [SYSTEM], "output_tokens": 3}, "line 2: `timestamp` is negative"),
        ({"timestamp": "-5", "messages": [SYSTEM], "output_tokens": 3}, "line 2: `timestamp` is negative"),
        ({"timestamp": "9" * 30, "messages": [SYSTEM], "output_tokens": 3}, "line 2: `timestamp` is no time"),
        ({"timestamp": 1, "messages": [SYSTEM]}, "line 2: no output length"),
        ({"timestamp": 1, "output_tokens": 3}, "line 2: no prompt"),
        ({"timestamp": 1, "messages": ["x"], "output_tokens": 3}, "line 2: no prompt"),
        ({"timestamp": 1, "prompt": "x", "output_tokens": -3}, "line 2: a length"),
        ({"timestamp": 1, "prompt": "x", "output_tokens": 10**400}, "line 2: a length"),
    ],
)
def test_a_log_line_that_cannot_be_used_is_named_and_not_quoted(tmp_path: Path, line: object, why: str) -> None:
    log = written(tmp_path, [log_line(1, "Who?"), line])
    target = tmp_path / "trace.jsonl"
    with pytest.raises(ValueError, match=why) as caught:
        convert(log, target)
    assert "Zebedee" not in str(caught.value)
    assert not target.exists()
    with pytest.raises(ValueError, match="over the log"):
        convert(log, log)


def test_a_broken_line_is_skipped_and_counted_where_that_is_asked(tmp_path: Path) -> None:
    log = written(tmp_path, [log_line(1700000000, "Who?"), "nonsense", log_line("1700000004", "Who?")], "log.jsonl")
    with pytest.raises(ValueError, match=r"line 2: .*--skip-broken"):
        convert(log, tmp_path / "trace.jsonl")
    done = convert(log, tmp_path / "trace.jsonl", skip_broken=True)
    assert (done.requests, done.skipped) == (2, 1)
    assert "2 requests from 2023-11-14 22:13:20 to 2023-11-14 22:13:24 UTC; 1 line could not" in done.description


def test_a_mark_of_byte_order_is_no_text_and_eight_digits_are_a_date(tmp_path: Path) -> None:
    log = written(tmp_path, [log_line("20231114", "Who?"), log_line("1699920005.5", "Who?")], "log.jsonl")
    log.write_bytes(b"\xef\xbb\xbf" + log.read_bytes())
    done = convert(log, tmp_path / "trace.jsonl")
    assert (done.first_s, done.last_s, done.skipped) == (1699920000.0, 1699920005.5, 0)


def test_lines_that_share_an_id_are_counted_and_told(tmp_path: Path) -> None:
    log = written(tmp_path, [log_line(i, "Who?", id=name) for i, name in enumerate("aabca")], "log.jsonl")
    done = convert(log, tmp_path / "trace.jsonl")
    assert (done.requests, done.sharing) == (5, 3)
    assert "3 lines share their id with another, and all are counted" in done.description
