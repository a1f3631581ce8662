"""Events of tokens that are text as they are: nearly all of an answer, at a fraction of what a Piece and its rendering cost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import msgspec

from router.ports import Delta
from router.text.json_texts import JsonTexts


class PlainEvents(msgspec.Struct, frozen=True, gc=False):
    """Of one choice, where an event shows nothing of a token but its text and maybe its id: what stands around them."""

    index: int
    before: bytes
    after: bytes
    shows_ids: bool
    end: bytes  # after the id

    def of(self, deltas: Sequence[Delta], start: int, texts: JsonTexts) -> list[bytes]:
        """An event for each Delta from `start` on, up to the first that is more than one token of this choice with a text of its own."""
        index, before, after, shows_ids, end = self.index, self.before, self.after, self.shows_ids, self.end
        events: list[bytes] = []
        for delta in islice(deltas, start, None):
            ids = delta.token_ids
            if (
                len(ids) != 1
                or delta.finish is not None
                or delta.index != index
                or delta.logprobs
                or delta.queue_time_s is not None  # that and the next two are for the record of its request
                or delta.cached_tokens is not None
                or delta.predicted is not None
            ):
                break
            text = texts[ids[0]]
            if not text:
                break
            events.append(b"".join((before, text, after, b"%d" % ids[0], end) if shows_ids else (before, text, after)))
        return events
