"""One request in the engine: its tokens, how far they are computed, what it holds, and its state machine."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from replica.contract.messages import GenerateRequest, TokenLogprobs
from replica.step import Draw, TokenMask


class State(enum.Enum):
    WAITING = "waiting"  # never scheduled
    RUNNING = "running"  # holds a slot and blocks
    PREEMPTED = "preempted"  # gave them back, keeps its tokens
    FINISHED = "finished"


LEGAL_MOVES: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.RUNNING, State.FINISHED}),
    State.RUNNING: frozenset({State.PREEMPTED, State.FINISHED}),
    State.PREEMPTED: frozenset({State.RUNNING, State.FINISHED}),
    State.FINISHED: frozenset(),
}


class IllegalMove(Exception):
    """A state change that the table does not know: a bug of ours, never a user's."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What never changes about a request."""

    owner: int  # the connection it came by
    attempt: int
    prompt_length: int
    arrival_s: float
    deadline_s: float | None  # on the engine's clock; None once a token has reached the client
    stop_ids: frozenset[int]  # tokens that end it
    root: bytes  # key before its first block


@dataclass(slots=True)
class History:
    """What has happened to a request so far; decides nothing about its tokens."""

    first_scheduled_s: float | None = None
    first_delta_sent: bool = False
    cached_tokens: int = 0  # prompt tokens found in the cache when it was first scheduled
    known_hits: int = 0  # blocks the cache held at the last look: an estimate for load reports
    own_blocks: int = 0  # blocks that come back when it leaves: what it took from the pool, shared ones left out
    preemptions: int = 0
    preempted_at_step: int | None = None
    bypasses: int = 0  # later requests that were started before this one
    left_out: int = 0  # steps in a row in which it was partly computed and had no chunk
    shared_waits: int = 0  # steps it stood back for a block that another request was writing
    stood_back_at_step: int | None = None  # the last of them
    suspect_until: int = 0  # it was in a step that failed: runs alone until `computed` gets here

    def stand_back(self, step_id: int) -> None:
        """For a block that another writes in this step; counts once a step."""
        self.shared_waits += self.stood_back_at_step != step_id
        self.stood_back_at_step = step_id


@dataclass(slots=True)
class Scoring:
    """Prompt logprobs: one entry per prompt position, in order; kept over a preemption."""

    top: int
    scores: list[TokenLogprobs | None] = field(default_factory=list)


class Request:
    """There is no prefill and no decode: `computed` catches up with `len(tokens)`.

    `tokens` = prompt + output; `output_ids` is the output alone and begins with what an earlier attempt had emitted.
    `keys` names the full blocks of `tokens` as far as known; `blocks` are the pages held, the first `keyed` of which are
    published or came from the cache.
    """

    __slots__ = (
        "blocks",
        "computed",
        "draw",
        "history",
        "keyed",
        "keys",
        "number",
        "output_ids",
        "priority",
        "scoring",
        "state",
        "terms",
        "tokens",
        "tokens_max",
    )

    def __init__(
        self,
        number: int,
        message: GenerateRequest,
        terms: Terms,
        *,
        keys: list[bytes],
        tokens_max: int,
        priority: int,
        mask: TokenMask | None = None,
    ) -> None:
        self.number = number  # order of arrival; never reused
        self.terms = terms
        self.priority = priority  # lower is more urgent
        self.tokens: list[int] = [*message.prompt_ids, *message.emitted_ids]
        self.tokens_max = tokens_max  # prompt and output together never exceed it
        self.output_ids: list[int] = list(message.emitted_ids)
        self.draw = Draw(message.sampling, message.choice, message.prompt_ids, self.output_ids, mask)
        self.keys = keys
        self.state = State.WAITING
        self.computed = 0
        self.blocks: list[int] = []
        self.keyed = 0
        self.history = History()
        top = message.sampling.prompt_logprobs
        self.scoring = None if top is None or message.emitted_ids else Scoring(top)

    @property
    def remaining(self) -> int:
        """Tokens still to compute before the next one can be drawn."""
        return len(self.tokens) - self.computed

    @property
    def decodes(self) -> bool:
        """One token is all it lacks, and nothing of its prompt is to be scored."""
        return self.remaining == 1 and not self.unscored

    @property
    def unscored(self) -> bool:
        """Part of its prompt is still to be scored: it cannot skip what a cache holds."""
        return self.scoring is not None and len(self.scoring.scores) < self.terms.prompt_length

    def move(self, to: State) -> None:
        """The only place where the state changes."""
        if to not in LEGAL_MOVES[self.state]:
            raise IllegalMove(f"request {self.number}: {self.state.value} → {to.value}")
        self.state = to
