"""From logits to tokens. A row's token depends on its own logits, its request and its position: never on the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kernels.reference.noise import complement, gumbel, noise_bits, stream_key
from replica.filters import candidates, thresholds
from replica.logit_rules import apply_rules, has_rules
from replica.logprobs import token_logprobs
from replica.step import Draw, Outcome

Logits = npt.NDArray[np.float32]
ROUNDING = 0.9999  # more than float32 can be wrong by
GREEDY_BELOW = 1e-5  # temperatures under it are greedy: dividing by them says the same, and overflows

NOT_FINITE = "the model's logits for this request are not finite"


@dataclass(frozen=True, slots=True)
class Best:
    """Of each row of logits the largest: its token, of equals the first, and its value, not finite where the row is not."""

    tokens: npt.NDArray[np.int64]
    logits: npt.NDArray[np.float32]


class Drawer(Protocol):
    """Draws with another's code what `_draw` draws with numpy's."""

    def __call__(self, logits: Logits, best: Best, rows: Sequence[int], draws: Sequence[Draw]) -> npt.NDArray[np.int64]:
        """A token for each of `rows` of logits [R, V], contiguous; best and draws are those of all R rows."""
        ...


def sample(
    logits: Tensor,
    draws: Sequence[Draw],
    eos_token_ids: frozenset[int],
    known: Best | None = None,
    drawer: Drawer | None = None,
) -> list[Outcome]:
    """One outcome for each row of logits [R, V], float32, on the CPU; they are left as they are. `known`: their best, if it is.

    A row whose logits are not finite, or whose rules fail, gets an error; the others go on.
    """
    raw: Logits = logits.numpy()
    errors: dict[int, str] = {}
    work = _with_rules(raw, draws, eos_token_ids, errors)
    best_of_all = known if known is not None and work is raw else _best(work)
    tokens, best = best_of_all.tokens, best_of_all.logits
    for row in np.flatnonzero(~np.isfinite(best)).tolist():
        errors.setdefault(row, NOT_FINITE)
    random = [i for i, draw in enumerate(draws) if draw.sampling.temperature >= GREEDY_BELOW and i not in errors]
    if random:
        if drawer is not None:
            tokens[random] = drawer(work, best_of_all, random, draws)
        else:
            tokens[random] = [_draw(work[i], float(best[i]), draws[i]) for i in random]
    return _outcomes(logits, tokens.tolist(), draws, errors)


def _best(logits: Logits) -> Best:
    tokens = logits.argmax(axis=1)
    return Best(tokens, logits[np.arange(logits.shape[0]), tokens])


def check_finite(logits: Tensor) -> list[Outcome]:
    """What a rank that does not draw still has to know: an error for each row of logits that is not finite."""
    finite = logits.amax(dim=-1).isfinite().tolist()
    return [Outcome() if fine else Outcome(error=NOT_FINITE) for fine in finite]


def _with_rules(raw: Logits, draws: Sequence[Draw], eos_token_ids: frozenset[int], errors: dict[int, str]) -> Logits:
    """`raw` itself where no request has rules, else a copy with them applied."""
    ruled = [i for i, draw in enumerate(draws) if has_rules(draw)]
    if not ruled:
        return raw
    work = raw.copy()
    for row in ruled:
        if not np.isfinite(raw[row].max()):  # before a rule hides it
            errors[row] = NOT_FINITE
            continue
        try:
            apply_rules(work[row], draws[row], eos_token_ids)
        except Exception as error:  # whatever a request's parameters bring about ends that request alone
            errors[row] = f"sampling parameters could not be applied: {error}"
    return work


def _draw(logits: Logits, best: float, draw: Draw) -> int:
    """A token of logits [V], with probability softmax(logits / temperature) over what the filters leave: the largest logit + noise."""
    sampling = draw.sampling
    tokens = candidates(logits, best, sampling.top_k)
    scaled = (logits if tokens is None else logits[tokens]) - np.float32(best)
    scaled /= np.float32(sampling.temperature)
    place = _draw_row(scaled, tokens, np.uint64(_key(draw)), thresholds(scaled[None], [sampling])[0])
    return place if tokens is None else int(tokens[place])


def _draw_row(scaled: Logits, tokens: npt.NDArray[np.int64] | None, key: np.uint64, least: np.float32) -> int:
    """The place of the largest scaled + noise among those not below `least`; of equals the first. tokens: whose they are, if not all's.

    exp(scaled) / (1 − u) bounds exp(scaled + noise) from above, and costs no logarithm: only tokens whose bound reaches what
    the one of the largest bound really has need their noise. They are few, and the result is exact.
    """
    kept = np.arange(scaled.size) if np.isneginf(least) else np.flatnonzero(scaled >= least)
    values = scaled if kept.size == scaled.size else scaled[kept]
    bits = noise_bits(key, kept if tokens is None else tokens[kept])
    bounds = np.exp(values)
    bounds /= complement(bits)
    leader = bounds.argmax()
    reached = float(values[leader]) + gumbel(bits[leader : leader + 1])
    rivals = np.flatnonzero(bounds >= np.exp(reached) * ROUNDING)
    sums = values[rivals].astype(np.float64) + gumbel(bits[rivals])
    return int(kept[rivals[sums.argmax()]])


def _key(draw: Draw) -> int:
    return stream_key(draw.sampling.seed, draw.choice, len(draw.prompt_ids) + len(draw.output_ids))


def _outcomes(logits: Tensor, tokens: list[int], draws: Sequence[Draw], errors: dict[int, str]) -> list[Outcome]:
    asked = [i for i, draw in enumerate(draws) if draw.sampling.logprobs is not None and i not in errors]
    tops = [draws[i].sampling.logprobs or 0 for i in asked]
    scored = dict(zip(asked, token_logprobs(logits[asked], [tokens[i] for i in asked], tops), strict=True)) if asked else {}
    return [
        Outcome(error=errors[row]) if row in errors else Outcome(token=token, logprobs=scored.get(row)) for row, token in enumerate(tokens)
    ]
