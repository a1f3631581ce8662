"""Prompts as text of a known length: words that common tokenizers read as one token each, at the start of a text or after a space."""

from __future__ import annotations

from collections.abc import Sequence

_COMMON = """
    time year people way day man thing woman life child world school state family student group country problem hand part place case
    week company system program question work government number night point home water room mother area money story fact month lot
    right study book eye job word business issue side kind head house service friend father power hour game line end member law car
    city community name president team minute idea body information back parent face others level office door health person art war
    history party result change reason research girl moment air teacher force education foot boy age policy process music market
    sense nation plan college interest death experience effect use class control field development role rate heart drug show leader
    light voice wife whole mind price report decision son view relationship town road arm difference value building action season
    tax director position player record paper space ground form event official matter center site project activity star table need
    court oil cost industry figure street image phone data picture practice piece land product doctor wall patient worker news test
    movie north south east west love step baby computer type attention film tree source hair look window culture brother energy
    period course summer plant term letter condition choice rule daughter technology fire future bank camera sea bird fish stone
    river snow rain sun moon sky wind green red blue white black brown gold iron wood glass bread milk rice sugar salt meat fruit
    apple farm horse dog cat train plane ship bus bridge tower castle
"""
WORDS = tuple(_COMMON.split())


def text_of(ids: Sequence[int]) -> str:
    """A word for each id: texts of ids that begin alike begin alike."""
    return " ".join(WORDS[i % len(WORDS)] for i in ids)
