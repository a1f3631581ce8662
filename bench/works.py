"""The works a–e of the comparison table: closed loops of equal requests."""

from __future__ import annotations

from dataclasses import dataclass

from bench.load_client import Call
from bench.prompt_style import PromptStyle, call_of
from bench.workload import Segment, TimedCall, Workload


@dataclass(frozen=True, slots=True)
class Work:
    """A closed-loop work. Each prompt is `shared_tokens` common ones and `prompt_tokens` of its own."""

    name: str
    streams: int
    prompt_tokens: int
    output_tokens: int
    requests: int
    shared_tokens: int = 0

    @property
    def description(self) -> str:
        streams = "1 stream" if self.streams == 1 else f"{self.streams} streams"
        prompt = f"{self.shared_tokens} shared + {self.prompt_tokens}" if self.shared_tokens else f"{self.prompt_tokens}"
        return f"{streams} {prompt} in / {self.output_tokens} out"


WORKS = (
    Work("a", streams=1, prompt_tokens=128, output_tokens=128, requests=4),
    Work("b", streams=8, prompt_tokens=128, output_tokens=128, requests=24),
    Work("c", streams=32, prompt_tokens=256, output_tokens=128, requests=64),
    Work("d", streams=16, prompt_tokens=64, output_tokens=64, requests=48, shared_tokens=512),
    Work("e", streams=1, prompt_tokens=1_500, output_tokens=8, requests=3),
)


def workload_of(work: Work, seed: int, requests: int | None = None) -> Workload:
    """Prompts of different (work, seed) share no prefix; inside one only `shared_tokens` do. Due one second apart."""
    key = f"{work.name}/{seed}"
    shared = (Segment(f"{key}/shared", work.shared_tokens),) if work.shared_tokens else ()
    calls = tuple(
        TimedCall(float(i), (*shared, Segment(f"{key}/{i}", work.prompt_tokens)), work.output_tokens, group=work.name)
        for i in range(work.requests if requests is None else requests)
    )
    return Workload(work.name, seed, work.description, calls, work.streams)


def calls_of(work: Work, style: PromptStyle, seed: int, salt: str = "") -> list[Call]:
    """Another salt is another text of the same lengths."""
    return [call_of(timed, style, salt) for timed in workload_of(work, seed)]
