"""What a form of the weights costs in quality: an engine in this process against recorded float32 outputs.

`python -m bench.cpu_quality GOLDEN.json [--form bfloat16|w8a8|w4a8|w8a16|w4a16|fp8 …] [--kv-cache-dtype int8]`. For each
form, over the recorded tokens, each computed after the recorded ones before it: how often the likeliest token is float32's, the mean
|Δ log p| of the recorded token and the worst prompt's, the perplexity beside float32's; and, generating greedily, at which float32 top-2
gap the first other token comes.

Weights alone (w8a16, w4a16, fp8) are computed by torch in float32, so that what is measured is what their form costs; a GPU's kernels
round activations on top, as in bfloat16. Asked for by name only.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench import result
from bench.golden import Golden, GoldenItem, load
from bench.replica_start import FORMS
from bench.result import Metric, Result
from kernels.names import KERNELS_VARIABLE
from kernels.ops import REFERENCE
from replica.config import WEIGHT_ONLY, EngineConfig
from replica.contract.messages import SamplingParams, TokenLogprobs
from replica.runner import ModelRunner
from replica.step import Draw, Row, Step

MEAN_DELTA_MAX_NAT = {"bfloat16": 0.06, "w8a8": 0.10, "w4a8": 0.10, "w8a16": 0.10, "w4a16": 0.10, "fp8": 0.10}
GAP_MAX_NAT = 0.3
POOL_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Scored:
    """One recorded output, judged by a form: Δ log p of each token in nat, and whether the likeliest was float32's."""

    deltas: tuple[float, ...]
    logprobs: tuple[float, ...]
    agree: tuple[bool, ...]


def score(runner: ModelRunner, item: GoldenItem) -> Scored:
    """Chunks of a prompt overlap by one token: the state before a token judges it."""
    tokens, first = [*item.prompt_ids, *item.ids], len(item.prompt_ids)
    pages = list(range(-(-len(tokens) // runner.limits.block_size)))
    row = Row(0, tokens, 0, pages, None, score_from=first, score_top=1)
    scores = [each for each in runner.execute(Step(1, (row,))).outcomes[0].scores if isinstance(each, TokenLogprobs)]
    assert len(scores) == len(item.ids)
    return Scored(
        deltas=tuple(each.logprob - meant for each, meant in zip(scores, item.logprobs, strict=True) if not math.isnan(meant)),
        logprobs=tuple(each.logprob for each in scores),
        agree=tuple(each.top[0][0] == token for each, token in zip(scores, item.ids, strict=True)),
    )


def first_gaps(runner: ModelRunner, items: tuple[GoldenItem, ...]) -> list[float]:
    """Of each item whose greedy tokens leave the recorded ones: float32's top-2 gap there. All items at once."""
    sampling = SamplingParams(seed=0, max_tokens=max(len(item.ids) for item in items), temperature=0.0)
    outputs: list[list[int]] = [[] for _ in items]
    room = [-(-(len(item.prompt_ids) + len(item.ids) + 1) // runner.limits.block_size) for item in items]
    pages = [list(range(sum(room[:i]), sum(room[: i + 1]))) for i in range(len(items))]
    while running := [i for i, item in enumerate(items) if len(outputs[i]) < len(item.ids)]:
        rows = []
        for i in running:
            prompt, output = items[i].prompt_ids, outputs[i]
            start = len(prompt) + len(output) - 1 if output else 0
            rows.append(Row(i, output[-1:] or list(prompt), start, pages[i], Draw(sampling, 0, prompt, output)))
        for i, outcome in zip(running, runner.execute(Step(1, tuple(rows))).outcomes, strict=True):
            assert outcome.token is not None, outcome.error
            outputs[i].append(outcome.token)
    gaps = []
    for item, output in zip(items, outputs, strict=True):
        place = next((at for at, (ours, theirs) in enumerate(zip(output, item.ids, strict=True)) if ours != theirs), None)
        if place is not None:
            gaps.append(item.gaps_nat[place])
    return gaps


def metrics_of(form: str, scored: list[Scored], gaps: list[float], golden: Golden) -> list[Metric]:
    means = [statistics.fmean(map(abs, each.deltas)) for each in scored if each.deltas]
    agree = [one for each in scored for one in each.agree]
    mean_float32 = statistics.fmean(p for item in golden.items for p in item.logprobs if not math.isnan(p))
    mean = statistics.fmean(p for each in scored for p in each.logprobs)
    deltas = [abs(delta) for each in scored for delta in each.deltas]
    return [
        result.plain(f"{form}.top_1_agreement", 100 * statistics.fmean(agree), "% of tokens"),
        result.at_most(f"{form}.mean_delta_log_p", statistics.fmean(deltas), MEAN_DELTA_MAX_NAT[form], "nat"),
        result.plain(f"{form}.mean_delta_log_p.worst_prompt", max(means), "nat"),
        result.plain(f"{form}.perplexity", math.exp(-mean), f"float32 {math.exp(-mean_float32):.4f}"),
        result.plain(f"{form}.prompts_that_diverge", float(len(gaps)), f"of {len(golden.items)}"),
        result.at_most(f"{form}.gap_at_divergence", max(gaps, default=0.0), GAP_MAX_NAT, "nat, the largest"),
    ]


def runner_of(form: str, kv_cache_dtype: str = "auto") -> ModelRunner:
    """An engine of that form; of weights alone, by torch, which the environment asks for meanwhile."""
    config = {
        "dtype": "float32" if form in WEIGHT_ONLY else "bfloat16",
        "quantization": FORMS.get(form, form),
        "kv_cache_dtype": kv_cache_dtype,
        "kv_cache_memory_bytes": POOL_BYTES,
        "num_threads": len(os.sched_getaffinity(0)),
    }
    before = dict(os.environ)
    if form in WEIGHT_ONLY:
        os.environ[KERNELS_VARIABLE] = REFERENCE.name
    try:
        return ModelRunner(EngineConfig.model_validate(config))
    finally:
        os.environ.pop(KERNELS_VARIABLE, None)
        os.environ.update(before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("golden", type=Path, help="recorded outputs")
    parser.add_argument("--form", choices=sorted((*FORMS, *WEIGHT_ONLY)), action="append", help="those of the C++ step unless given")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "int8"), default="auto", help="int8 with the forms of the C++ step alone")
    options = parser.parse_args()
    try:
        golden = load(options.golden)
    except (OSError, msgspec.MsgspecError) as error:
        print(f"cannot read {options.golden}: {error}")
        return 2
    metrics, kernels = [], {}
    for form in options.form or FORMS:
        runner = runner_of(form, options.kv_cache_dtype)
        kernels[form] = runner.kernels
        metrics += metrics_of(form, [score(runner, item) for item in golden.items], first_gaps(runner, golden.items), golden)
        runner.close()
    outcome = Result("cpu-quality", kernels, metrics=tuple(metrics))
    result.show(outcome)
    return 0 if outcome.holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
