"""A replica under a virtual clock: continuous batching with chunked prefill, slots and a prefix cache; time by a cost model."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from replica.contract.messages import (
    Bounce,
    BounceReason,
    EngineLimits,
    FinishReason,
    Frame,
    GenerateRequest,
    KvEvent,
    LoadReport,
    Removed,
    Snapshot,
    StepTimeCoefficients,
    Stored,
    TokenDelta,
    Welcome,
)
from replica.contract.step_time import predict_step_s

GPU = StepTimeCoefficients(a=0.008, b=1 / 20_000, c=20e-6, d=0.04e-6)  # DESIGN §6
CPU = StepTimeCoefficients(a=0.008, b=1 / 1_200, c=0.002, d=2e-6)


def limits(**changes: object) -> EngineLimits:
    values: dict[str, object] = {
        "max_model_len": 8192,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        "num_blocks": 4096,
        "block_size": 16,
        "max_waiting": 1024,
        "vocab_size": 50_000,
        "step_slo_s": 0.2,
    }
    return EngineLimits(**{**values, **changes})  # type: ignore[arg-type]


def token(request: GenerateRequest, position: int) -> int:
    """What the model 'says': a function of (seed, choice, position), as sampling is."""
    return (request.sampling.seed * 7919 + request.choice * 104_729 + position * 31) % 50_000


@dataclass
class Running:
    request: GenerateRequest
    arrived_s: float
    computed: int = 0
    cached: int = 0
    waited_s: float | None = None
    told: bool = False
    output: int = 0  # emitted by earlier attempts included

    @property
    def prompt(self) -> int:
        return len(self.request.prompt_ids) + len(self.request.emitted_ids)


@dataclass
class Step:
    ends_s: float
    chunks: list[tuple[Running, int]]
    decodes: list[Running]


@dataclass
class ModelledReplica:
    """`begin(now)` starts a step if there is work and none runs; `end(now)` finishes it and returns the frame."""

    replica_id: str
    truth: StepTimeCoefficients = GPU
    told: StepTimeCoefficients | None = None  # what it reports; None: the truth
    limits: EngineLimits = field(default_factory=limits)
    epoch: int = 1
    cache_blocks: int = 4096
    fingerprint: str = "f"

    def __post_init__(self) -> None:
        self.waiting: list[Running] = []
        self.running: list[Running] = []
        self.step: Step | None = None
        self.progress = 0
        self.sequence = 0
        self.cache: OrderedDict[bytes, bytes] = OrderedDict()
        self.accepted: list[int] = []
        self.bounces: list[Bounce] = []
        self.events: list[KvEvent] = []
        self.draining = False
        self.frozen = False
        self.dead = False
        self.queue_times: dict[tuple[str, int], float] = {}
        self.prefills = 0
        self.prefilled_tokens = 0

    # --- from the router ---------------------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest, now: float) -> None:
        needed = len(request.prompt_ids) + len(request.emitted_ids) + 1
        if needed > self.limits.max_model_len:
            self.bounces.append(Bounce(request.attempt, BounceReason.NEVER_FITS, "too long"))
        elif self.draining:
            self.bounces.append(Bounce(request.attempt, BounceReason.DRAINING))
        elif len(self.waiting) >= self.limits.max_waiting:
            self.bounces.append(Bounce(request.attempt, BounceReason.QUEUE_FULL))
        else:
            self.waiting.append(Running(request, now, output=len(request.emitted_ids)))
            self.accepted.append(request.attempt)

    def cancel(self, attempt: int) -> None:
        self.waiting = [one for one in self.waiting if one.request.attempt != attempt]
        self.running = [one for one in self.running if one.request.attempt != attempt]

    # --- its life ----------------------------------------------------------------------------------------------------

    def begin(self, now: float) -> float | None:
        """When the step that starts now will end; None: nothing to do."""
        if self.step is not None or not (self.waiting or self.running):
            return None
        decodes = [one for one in self.running if one.computed >= one.prompt]
        context = sum(one.computed for one in self.running)
        base = predict_step_s(self.truth, prefill_tokens=0, decodes=len(decodes), context_tokens=context)
        room = max(1, self.limits.max_num_batched_tokens - len(decodes))
        if self.limits.step_slo_s is not None:
            room = min(room, max(self.limits.block_size, int((self.limits.step_slo_s - base) / self.truth.b)))
        chunks: list[tuple[Running, int]] = []
        for one in [one for one in self.running if one.computed < one.prompt]:
            room = self._chunk(one, room, chunks, now)
        while self.waiting and room > 0 and len(self.running) < self.limits.max_num_seqs:
            one = self.waiting.pop(0)
            self.running.append(one)
            self._hit(one)
            room = self._chunk(one, room, chunks, now)
        tokens = sum(size for _, size in chunks)
        self.prefilled_tokens += tokens
        took = predict_step_s(self.truth, prefill_tokens=tokens, decodes=len(decodes), context_tokens=context)
        self.step = Step(now + took, chunks, decodes)
        return self.step.ends_s

    def _hit(self, one: Running) -> None:
        self.prefills += 1
        hit = 0
        for key in one.request.block_keys:
            if key not in self.cache:
                break
            self.cache.move_to_end(key)
            hit += 1
        one.cached = one.computed = min(hit * self.limits.block_size, one.prompt - 1)

    def _chunk(self, one: Running, room: int, chunks: list[tuple[Running, int]], now: float) -> int:
        size = min(room, one.prompt - one.computed)
        if size > 0:
            if one.waited_s is None:
                one.waited_s = now - one.arrived_s
                self.queue_times.setdefault((one.request.request_id, one.request.choice), one.request.queued_s + one.waited_s)
            chunks.append((one, size))
        return room - max(0, size)

    def end(self, now: float) -> Frame:
        step, self.step = self.step, None
        assert step is not None
        self.progress += 1
        deltas: list[TokenDelta] = []
        for one, size in step.chunks:
            one.computed += size
            if one.computed >= one.prompt:
                self._store(one.request)
        for one in [*step.decodes, *(one for one, _ in step.chunks)]:
            if one in self.running and one.computed >= one.prompt:
                deltas.append(self._token(one))
        return self.frame(deltas)

    def _token(self, one: Running) -> TokenDelta:
        position = len(one.request.prompt_ids) + one.output
        one.output += 1
        one.computed += one.told
        finish = FinishReason.LENGTH if one.output >= one.request.sampling.max_tokens else None
        if finish:
            self.running.remove(one)
        first, one.told = not one.told, True
        return TokenDelta(
            attempt=one.request.attempt,
            token_ids=(token(one.request, position),),
            cached_tokens=one.cached if first else None,
            waited_s=one.waited_s if first else None,
            finish=finish,
        )

    def _store(self, request: GenerateRequest) -> None:
        fresh = tuple(key for key in request.block_keys if key not in self.cache)
        for key in fresh:
            self.cache[key] = b""
        if fresh:
            self.events.append(Stored(fresh, b""))
        gone = []
        while len(self.cache) > self.cache_blocks:
            gone.append(self.cache.popitem(last=False)[0])
        if gone:
            self.events.append(Removed(tuple(gone)))

    def load(self) -> LoadReport:
        queued = sum(one.prompt - one.computed for one in self.running if one.computed < one.prompt)
        for one in self.waiting:
            hit = 0
            while hit < len(one.request.block_keys) and one.request.block_keys[hit] in self.cache:
                hit += 1
            queued += max(1, one.prompt - hit * self.limits.block_size)
        context = sum(one.computed for one in self.running)
        used = sum(-(-(one.computed + 1) // self.limits.block_size) for one in self.running)
        coefficients = self.told or self.truth
        decodes = sum(one.computed >= one.prompt for one in self.running)
        base = predict_step_s(coefficients, prefill_tokens=0, decodes=decodes, context_tokens=context)
        room = self.limits.max_num_batched_tokens
        if self.limits.step_slo_s is not None:
            room = min(room, max(self.limits.block_size, int((self.limits.step_slo_s - base) / coefficients.b)))
        return LoadReport(
            progress=self.progress,
            running=len(self.running),
            waiting=len(self.waiting),
            queued_prefill_tokens=queued,
            context_tokens=context,
            free_blocks=max(0, self.limits.num_blocks - used),
            evictable_blocks=0,
            step_time=coefficients,
            predicted_step_s=base + coefficients.b * min(room, queued),
            draining=self.draining,
        )

    def frame(self, deltas: list[TokenDelta] | None = None) -> Frame:
        batches = 1 if self.events else 0
        self.sequence += batches
        frame = Frame(
            epoch=self.epoch,
            sequence=self.sequence,
            load=self.load(),
            deltas=tuple(deltas or ()),
            accepted=tuple(self.accepted),
            bounces=tuple(self.bounces),
            events=tuple(self.events),
            batches=batches,
        )
        self.accepted, self.bounces, self.events = [], [], []
        return frame

    def snapshot(self) -> Snapshot:
        return Snapshot(self.epoch, self.sequence, tuple((key, b"") for key in self.cache))

    def welcome(self) -> Welcome:
        return Welcome(1, self.replica_id, self.epoch, "m", "r", self.fingerprint, self.limits, self.load())
