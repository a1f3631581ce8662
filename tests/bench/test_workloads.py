"""Workloads: the same seed asks the same, prefixes are shared as said, the load stretches times and nothing else."""

from __future__ import annotations

import itertools
import json
import statistics

import pytest

from bench.arrivals import due_times, evenly, gamma
from bench.load import Arrivals, Load
from bench.prompt_style import PromptStyle, call_of
from bench.workload import Segment, TimedCall, Workload
from bench.workloads import GENERATED, names, workload
from tests.router.smollm2 import smollm2


@pytest.mark.parametrize("name", names())
def test_a_seed_names_one_workload(name: str) -> None:
    first = workload(name, 7)
    assert first.hash() == workload(name, 7).hash() != workload(name, 8).hash()
    assert list(first.calls[0].prompt_ids()) == list(workload(name, 7).calls[0].prompt_ids())
    assert list(first.calls[0].prompt_ids()) != list(workload(name, 8).calls[0].prompt_ids())
    assert all(len(call.prompt_ids()) == call.prompt_tokens for call in first.calls[:5])
    assert max(call.prompt_tokens + call.output_tokens for call in first) <= 8192


@pytest.mark.parametrize("name", GENERATED)
def test_generated_times_run_at_about_one_request_per_second(name: str) -> None:
    found = workload(name, 1, 400)
    assert len(found) == 400
    assert found.rate_per_s == pytest.approx(1.0, rel=0.2)


def test_the_hash_sees_everything_that_is_asked() -> None:
    def hashed(**changes: object) -> str:
        fields: dict[str, object] = {"due_s": 1.0, "prompt": (Segment("k", 5),), "output_tokens": 3} | changes
        return Workload("w", 0, "", (TimedCall(**fields),)).hash()  # type: ignore[arg-type]

    changed = [
        hashed(due_s=1.5),
        hashed(prompt=(Segment("k", 6),)),
        hashed(prompt=(Segment("l", 5),)),
        hashed(output_tokens=4),
        hashed(cancel_after_s=1.0),
        hashed(group="g"),
        hashed(new_connection=True),
    ]
    assert len({hashed(), *changed}) == 8
    assert hashed() == hashed()


def test_agents_share_prefixes_hang_up_and_come_in_bursts() -> None:
    calls = workload("agent", 0, 300).calls
    firsts = {call.prompt[0].key for call in calls}
    assert len(firsts) == 4, "all sessions stand on four tool prompts"
    histories = {tuple(call.prompt[:-1]) for call in calls}
    grown = [call for call in calls if len(call.prompt) > 2]
    assert all(call.prompt[:-2][:2] in {h[:2] for h in histories} for call in grown)
    hung_up = sum(call.cancel_after_s is not None for call in calls)
    assert 10 <= hung_up <= 60
    gaps = [b.due_s - a.due_s for a, b in itertools.pairwise(calls)]
    assert statistics.stdev(gaps) > 1.2 * statistics.mean(gaps), "burstier than Poisson"


def test_mix_holds_its_groups_over_its_whole_time() -> None:
    calls = workload("mix", 0, 400).calls
    for half in (calls[:200], calls[200:]):
        shares = {group: sum(call.group == group for call in half) / 200 for group in GENERATED if group != "mix"}
        assert shares == pytest.approx({"chat": 0.6, "agent": 0.25, "long": 0.15}, abs=0.12)


def test_an_unknown_workload_gets_the_list() -> None:
    with pytest.raises(ValueError, match=r"unknown workload 'chta'; there are chat, long, agent, mix, a, b, c, d, e, or a trace"):
        workload("chta")
    with pytest.raises(ValueError, match="from 1 to"):
        workload("chat", 0, 0)


def test_a_salt_changes_the_text_and_not_the_structure() -> None:
    calls = [call for call in workload("agent", 0).calls if len(call.prompt) > 1]
    one, two = calls[0], next(call for call in calls[1:] if call.prompt[0] == calls[0].prompt[0])
    shared = one.prompt[0].tokens
    for salt in ("", "x"):
        assert one.prompt_ids(salt)[:shared] == two.prompt_ids(salt)[:shared]
    assert one.prompt_ids()[:16] != one.prompt_ids("x")[:16]
    assert len(one.prompt_ids()) == len(one.prompt_ids("x"))


def test_a_segment_of_one_key_begins_the_same_at_every_length() -> None:
    def ids(tokens: int) -> list[int]:
        return list(TimedCall(0.0, (Segment("k", tokens),), 1).prompt_ids())

    assert ids(40)[:25] == ids(25)
    assert all(1_000 <= each <= 30_000 for each in ids(5_000))


def test_a_rate_stretches_times_and_keeps_their_pattern() -> None:
    works = workload("agent", 0, 100)
    slow, fast = due_times(works, Load(rate_per_s=2.0)), due_times(works, Load(rate_per_s=8.0))
    assert slow == pytest.approx([4 * due_s for due_s in fast])
    assert (len(fast) - 1) / (fast[-1] - fast[0]) == pytest.approx(8.0)
    assert due_times(works, Load(speed=2.0)) == pytest.approx([call.due_s / 2 for call in works])
    assert due_times(works, Load(rate_per_s=5.0, arrivals=Arrivals.EVEN)) == evenly(5.0, 100)
    poisson = due_times(works, Load(rate_per_s=5.0, arrivals=Arrivals.POISSON))
    assert poisson == gamma(5.0, 100, works.seed, 1.0) != due_times(works, Load(rate_per_s=5.0, arrivals=Arrivals.GAMMA, burstiness=0.3))


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("arrivals", [Arrivals.WORKLOAD, Arrivals.EVEN])
def test_a_rate_is_what_is_offered(name: str, arrivals: Arrivals) -> None:
    """Also of a work of four requests, that are due one second apart."""
    times = due_times(workload(name, 0, 4), Load(rate_per_s=2.0, arrivals=arrivals))
    assert 3 / (times[-1] - times[0]) == pytest.approx(2.0)


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0])
def test_gamma_keeps_its_rate_and_has_its_width(shape: float) -> None:
    times = gamma(50.0, 6000, 3, shape)
    gaps = [b - a for a, b in zip((0.0, *times), times, strict=False)]
    assert statistics.mean(gaps) == pytest.approx(0.02, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.02 / shape**0.5, rel=0.15)


@pytest.mark.parametrize(
    "fields",
    [
        {"streams": 2, "rate_per_s": 1.0},
        {"rate_per_s": 0.0},
        {"rate_per_s": float("inf")},
        {"streams": -1},
        {"arrivals": Arrivals.GAMMA},
        {"speed": 0.0},
    ],
)
def test_a_load_that_cannot_be_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"."):
        Load(**fields)  # type: ignore[arg-type]


def test_prompts_as_text_and_as_messages() -> None:
    timed = TimedCall(0.0, (Segment("k", 40),), 3, new_connection=True, group="g")
    plain = call_of(timed, PromptStyle("m"))
    text = call_of(timed, PromptStyle("m", as_text=True))
    chat = call_of(timed, PromptStyle("m", chat=True, ask_ids=False))
    assert (plain.expect.prompt_tokens, text.expect.prompt_tokens, chat.expect.prompt_tokens) == (40, None, None)
    assert (chat.path, text.path) == ("/v1/chat/completions", "/v1/completions")
    assert b"messages" in chat.body and b"return_token_ids" not in chat.body and b"return_token_ids" in plain.body
    assert plain.new_connection and plain.group == "g"
    assert (plain.expect.text_tokens, text.expect.text_tokens, chat.expect.text_tokens) == (None, 40, 40)


@pytest.mark.parametrize("tokens", [1, 64, 128, 1_500])
def test_text_has_as_many_tokens_as_ids_have(tokens: int) -> None:
    timed = TimedCall(0.0, (Segment("shared", tokens // 2), Segment("own", tokens - tokens // 2)), 3)
    text = json.loads(call_of(timed, PromptStyle("m", as_text=True)).body)["prompt"]
    assert len(smollm2().tokenizer.encode(text, parse_special=False)) == tokens


def test_text_keeps_the_structure_of_prefixes() -> None:
    """What two prompts share as ids they share as text, and no more."""
    one, other = (
        json.loads(call_of(TimedCall(0.0, (Segment("shared", 32), Segment(key, 32)), 3), PromptStyle("m", as_text=True)).body)["prompt"]
        for key in ("a", "b")
    )
    alike = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one.split(), other.split(), strict=True)))
    assert 32 <= alike < 36
