"""The works a–e as every column runs them: chosen, shortened, and measured on one server."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

from bench.connection import Target
from bench.load_client import LoadClient, closed_loop
from bench.peers.peer import Prompts
from bench.prompt_style import PromptStyle
from bench.result import WorkResult
from bench.summary import summarize
from bench.works import WORKS, Work, calls_of

WARM_UP_REQUESTS_MAX = 4
WARM_UP_TOKENS = 8


def chosen_works(letters: str) -> list[Work]:
    """The works named, in the table's order. Raises ValueError with the list for an unknown one."""
    wanted = [letter.strip() for letter in letters.split(",") if letter.strip()]
    known = {work.name: work for work in WORKS}
    unknown = [letter for letter in wanted if letter not in known]
    if unknown or not wanted:
        raise ValueError(f"unknown work {', '.join(unknown) or 'none given'}; there are {', '.join(known)}")
    return [work for work in WORKS if work.name in wanted]


def with_requests(works: Sequence[Work], given: str) -> list[Work]:
    """`given`: a=2,c=32. Raises ValueError."""
    counts: dict[str, int] = {}
    for pair in filter(None, given.split(",")):
        name, _, count = pair.partition("=")
        if name not in {work.name for work in works} or not count.isdigit() or int(count) < 1:
            raise ValueError(f"requests must be WORK=COUNT of the chosen works, got {pair!r}")
        counts[name] = int(count)
    return [replace(work, requests=counts.get(work.name, work.requests)) for work in works]


async def measure(url: str, works: Sequence[Work], prompts: Prompts, seed: int) -> tuple[WorkResult, ...]:
    """Each work once, after a short warm-up with prompts of its own; no text was ever sent before, so that no cache knows it."""
    salt = secrets.token_hex(8)
    style = PromptStyle(prompts.model, as_text=prompts.as_text, ask_ids=prompts.ask_ids)
    client = LoadClient(Target.parse(url), reuse_connections=not prompts.new_connections)
    results: list[WorkResult] = []
    try:
        for work in works:
            requests = min(work.streams, WARM_UP_REQUESTS_MAX)
            warm_up = replace(work, name=f"{work.name}-warm-up", requests=requests, output_tokens=WARM_UP_TOKENS)
            await closed_loop(client, calls_of(warm_up, style, seed, salt), streams=requests)
            records = await closed_loop(client, calls_of(work, style, seed, salt), streams=work.streams)
            results.append(WorkResult(work.name, work.description, summarize(records)))
    finally:
        client.close()
    return tuple(results)
