"""Frames that came together, as the one that their replica could have sent: what is done once per frame is done once per read."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from replica.contract.messages import Frame, ToRouter


def gathered(messages: Iterable[ToRouter]) -> list[ToRouter]:
    """In order. Frames in a row become one, with the last one's load; none is merged with one before which something was missed."""
    found: list[ToRouter] = []
    row: list[Frame] = []
    for message in messages:
        if isinstance(message, Frame) and (not row or _follows(message, row[-1])):
            row.append(message)
            continue
        found += _merged(row)
        row = [message] if isinstance(message, Frame) else []
        if not row:
            found.append(message)
    return found + _merged(row)


def _follows(frame: Frame, before: Frame) -> bool:
    return frame.epoch == before.epoch and frame.sequence == before.sequence + frame.batches


def _merged(row: list[Frame]) -> list[Frame]:
    if len(row) < 2:
        return row
    last = row[-1]
    return [
        Frame(
            epoch=last.epoch,
            sequence=last.sequence,
            load=last.load,
            deltas=tuple(chain.from_iterable([frame.deltas for frame in row])),
            accepted=tuple(chain.from_iterable([frame.accepted for frame in row])),
            bounces=tuple(chain.from_iterable([frame.bounces for frame in row])),
            events=tuple(chain.from_iterable([frame.events for frame in row])),
            batches=sum(frame.batches for frame in row),
            routers=last.routers,
        )
    ]
