"""Identical ids in float32, greedy and seeded, whatever an engine has to do meanwhile; for every architecture."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest

import replica.runner
import replica.sampler
from kernels.batch import PagedBatch
from replica.config import Batching, EngineConfig
from replica.runner import ModelRunner
from replica.step_inputs import StepInputs
from tests.replica import differential as lab
from tests.replica.tiny_families import FAMILIES, write_family

pytestmark = pytest.mark.patient

CHUNKS = (1, 7, 17)  # of every architecture: a token, less than two blocks, more than four
OTHER_CHUNKS = (2, 3, 16, 33)
WHOLE = ("qwen2-windowed", "qwen3-moe")  # between them they have whatever a family has
BY_TOKEN = "qwen3-moe"  # what it alone has, experts and norms of heads, looks at one token at a time, wherever a prompt is cut
IN_TURN = tuple(family for family in FAMILIES if family not in WHOLE)
POLICIES = tuple(product(get_args(Batching), get_args(EngineConfig.model_fields["scheduling_policy"].annotation), (True, False)))


class Subject:
    def __init__(self, directory: Path, family: str) -> None:
        self.family = family
        config = EngineConfig(
            model=str(write_family(directory, family)), dtype="float32", num_threads=1, block_size=lab.BLOCK, num_gpu_blocks_override=120
        )
        self.runner = ModelRunner(config)
        self.expected = lab.alone(self.runner)

    def differ(self, answers: lab.Answers) -> list[int]:
        return lab.different(self.expected, answers)


@pytest.fixture(scope="module", params=FAMILIES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject(tmp_path_factory.mktemp("control"), "mistral")


def test_the_table_is_worth_running(subject: Subject) -> None:
    assert len({answer[:4] for answer in subject.expected}) == len(lab.TABLE), "no two requests are answered alike"
    assert all(len(set(answer)) > 2 for answer in subject.expected)
    assert len(subject.expected[-1]) < 11, "one ends by a stop id"


def test_the_same_twice(mistral: Subject) -> None:
    assert lab.alone(mistral.runner) == mistral.expected


def test_warm(subject: Subject) -> None:
    answers, cached = lab.warm(subject.runner)
    assert subject.differ(answers) == [] and cached > 150


def test_tiny_pool(subject: Subject) -> None:
    answers, preemptions = lab.in_a_tiny_pool(subject.runner, blocks=17)
    assert subject.differ(answers) == [] and preemptions > 0


def test_preempted_and_moved(subject: Subject) -> None:
    answers, preemptions = lab.preempted_at_will(subject.runner, seed=1)
    assert subject.differ(answers) == [] and preemptions > 10
    for steps in (3, 9):
        answers, carried = lab.moved(subject.runner, steps)
        assert subject.differ(answers) == [] and carried > 0, steps


@pytest.mark.parametrize("budget", CHUNKS)
def test_chunked(subject: Subject, budget: int) -> None:
    assert subject.differ(lab.Lab(subject.runner, lab.Setting(budget=budget)).answer(lab.TABLE)) == []


@pytest.mark.parametrize("budget", OTHER_CHUNKS)
def test_chunked_at_other_sizes(mistral: Subject, budget: int) -> None:
    assert mistral.differ(lab.Lab(mistral.runner, lab.Setting(budget=budget)).answer(lab.TABLE)) == []


def policy(batching: str, order: str, chunked: bool) -> lab.Setting:
    engine = (("batching", batching), ("scheduling_policy", order), ("enable_chunked_prefill", chunked))
    return lab.Setting(budget=24, seqs=5, blocks=40, engine=engine)


@pytest.mark.parametrize(("batching", "order", "chunked"), POLICIES)
def test_among_strangers_under_every_policy(mistral: Subject, batching: str, order: str, chunked: bool) -> None:
    assert mistral.differ(lab.with_strangers(mistral.runner, policy(batching, order, chunked))) == []


def test_among_strangers(subject: Subject) -> None:
    assert subject.differ(lab.with_strangers(subject.runner, lab.Setting(budget=24, blocks=60))) == []


def test_one_step_ahead(subject: Subject) -> None:
    """Each step is planned while the one before runs, in a pool where that cannot always be; with strangers, and preempted at will."""
    setting = lab.Setting(budget=24, blocks=40, engine=(("async_scheduling", True),))
    assert subject.differ(lab.with_strangers(subject.runner, setting)) == []
    answers, preemptions = lab.preempted_at_will(subject.runner, seed=2, setting=setting)
    assert subject.differ(answers) == [] and preemptions > 10


def test_two_families_have_whatever_any_has(tmp_path: Path) -> None:
    """Or the sizes that are theirs alone would miss what only another has."""
    have = {family: lab.parts_of(write_family(tmp_path / family, family)) for family in FAMILIES}
    everything = frozenset().union(*have.values())
    assert frozenset().union(*(have[family] for family in WHOLE)) == everything
    assert all(have[family] < everything for family in WHOLE), "one of them alone has not"


def share(family: str, sizes: Sequence[Any]) -> Sequence[Any]:
    """All, or what is this family's turn: those whose parts WHOLE has too take each size once between them."""
    return sizes if family in WHOLE else sizes[IN_TURN.index(family) :: len(IN_TURN)]


def lengths(family: str, sizes: Sequence[Any]) -> Sequence[Any]:
    """A share of what cuts prompts, and caches, at one place or another: of BY_TOKEN every third, even and odd."""
    return sizes[::3] if family == BY_TOKEN else share(family, sizes)


def test_shares_are_whole() -> None:
    sizes = range(1, 80)
    assert all(share(family, sizes) == sizes for family in WHOLE)
    assert sorted(size for family in IN_TURN for size in share(family, sizes)) == list(sizes)
    assert [lengths(family, sizes) == sizes for family in WHOLE] == [True, False] and lengths("llama", sizes) == share("llama", sizes)
    assert {size % 2 for size in lengths(BY_TOKEN, sizes)} == {0, 1}


@pytest.mark.slow
def test_every_chunk(subject: Subject) -> None:
    for budget in lengths(subject.family, range(1, 80)):
        assert subject.differ(lab.Lab(subject.runner, lab.Setting(budget=budget)).answer(lab.TABLE)) == [], budget


@pytest.mark.slow
def test_every_pool_from_the_least_that_holds_the_longest_request(subject: Subject) -> None:
    for blocks in lengths(subject.family, range(15, 60)):
        assert subject.differ(lab.in_a_tiny_pool(subject.runner, blocks)[0]) == [], blocks


@pytest.mark.slow
def test_every_policy_and_many_preemptions_and_moves(subject: Subject) -> None:
    for each in share(subject.family, POLICIES):
        assert subject.differ(lab.with_strangers(subject.runner, policy(*each))) == [], each
    for seed in lengths(subject.family, range(20)):
        assert subject.differ(lab.preempted_at_will(subject.runner, seed)[0]) == [], seed
        assert subject.differ(lab.moved(subject.runner, seed + 1)[0]) == [], seed
    for budget, blocks in share(subject.family, tuple(product((5, 16, 33, 64), (20, 40, 120)))):
        ahead = lab.Setting(budget=budget, blocks=blocks, engine=(("async_scheduling", True),))
        assert subject.differ(lab.with_strangers(subject.runner, ahead)) == [], (budget, blocks)


# --- controls: with each guard off, the harness must see it -----------------------------------------------------------


def test_a_wrong_position_is_seen(mistral: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that goes on one position too far to the right."""
    real = replica.runner.build_inputs

    def shifted(*given: Any) -> StepInputs:
        inputs = real(*given)
        late = (inputs.batch.starts > 0) & (inputs.batch.counts > 1)
        inputs.positions[:] += late.repeat(inputs.batch.counts)
        return inputs

    monkeypatch.setattr(replica.runner, "build_inputs", shifted)
    assert mistral.differ(lab.Lab(mistral.runner, lab.Setting(budget=7)).answer(lab.TABLE))


def test_a_stale_block_is_seen(mistral: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of the cache that still holds another's tokens: the copy of a fully cached prompt's last block is left out."""
    monkeypatch.setattr(ModelRunner, "_copy_blocks", lambda self, step: None)
    assert mistral.differ(lab.warm(mistral.runner)[0])


def test_a_page_too_early_is_seen(mistral: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row reads the page before the right one, once it is longer than three pages."""
    real = replica.runner.build_inputs

    def swapped(*given: Any) -> StepInputs:
        inputs = real(*given)
        tables: PagedBatch = inputs.batch
        if tables.tables.shape[1] > 3:
            tables.tables[:, 2] = tables.tables[:, 1]
        return inputs

    monkeypatch.setattr(replica.runner, "build_inputs", swapped)
    assert mistral.differ(lab.Lab(mistral.runner, lab.Setting(budget=5)).answer(lab.TABLE))


def test_randomness_of_the_step_is_seen(mistral: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = iter(range(10**6))
    monkeypatch.setattr(replica.sampler, "_key", lambda draw: next(draws))
    assert mistral.differ(lab.with_strangers(mistral.runner, lab.Setting()))


def test_penalties_that_forget_are_seen(mistral: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was emitted before a move counts as prompt."""
    real = lab.GenerateRequest

    def forgetful(**fields: Any) -> lab.GenerateRequest:
        fields["prompt_ids"] += fields.pop("emitted_ids")
        return real(**fields)

    monkeypatch.setattr(lab, "GenerateRequest", forgetful)
    answers, _ = lab.moved(mistral.runner, 5)
    assert {4, 5} & set(mistral.differ([answer[: len(right)] for answer, right in zip(answers, mistral.expected, strict=True)]))
