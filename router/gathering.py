"""Frames that came together, as the one that their replica could have sent: what is done once per frame is done once per read."""

from __future__ import annotations

from collections.abc import Iterable

from replica.contract.messages import Bounce, Frame, KvEvent, TokenDelta, ToRouter


def gathered(messages: Iterable[ToRouter]) -> list[ToRouter]:
    """In order. Frames in a row become one, with the last one's load; none is merged with one before which something was missed."""
    found: list[ToRouter] = []
    row: list[Frame] = []
    for message in messages:
        if isinstance(message, Frame):
            if row and not (message.epoch == row[-1].epoch and message.sequence == row[-1].sequence + message.batches):
                found.append(_merged(row))
                row = []
            row.append(message)
            continue
        if row:
            found.append(_merged(row))
            row = []
        found.append(message)
    if row:
        found.append(_merged(row))
    return found


def _merged(row: list[Frame]) -> Frame:
    last = row[-1]
    if len(row) == 1:
        return last
    deltas: list[TokenDelta] = []
    accepted: list[int] = []
    bounces: list[Bounce] = []
    events: list[KvEvent] = []
    for frame in row:
        deltas += frame.deltas
        accepted += frame.accepted
        bounces += frame.bounces
        events += frame.events
    return Frame(
        epoch=last.epoch,
        sequence=last.sequence,
        load=last.load,
        deltas=tuple(deltas),
        accepted=tuple(accepted),
        bounces=tuple(bounces),
        events=tuple(events),
        batches=sum([frame.batches for frame in row]),
        routers=last.routers,
    )
