"""One decision-maker per replica: rank 0 plans, and tells the other ranks each Step before it computes its own part."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol, runtime_checkable

from replica.contract.messages import EngineLimits
from replica.parallel.group import RankGroup, TensorParallel
from replica.parallel.step_channel import GroupBroken
from replica.parallel.step_codec import CodecError, encode_stop
from replica.parallel.step_decoder import StepDecoder
from replica.parallel.step_encoder import StepEncoder
from replica.rank_step import RankStep
from replica.step import AsynchronousRunner, Runner, RunnerLost, Step, StepResult
from replica.step_inputs import StepInputs


class Worker(Protocol):
    """The model's part on a rank that does not sample."""

    @property
    def limits(self) -> EngineLimits: ...

    def follow(self, step: RankStep) -> object:
        """All of the step's collectives, in the same order as rank 0's."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class ToldRunner(AsynchronousRunner, Protocol):
    """A runner that is given a step's arrays: the ranks have them, and rank 0 is one."""

    def begin_told(self, step: Step, inputs: StepInputs | None) -> Callable[[], StepResult]:
        """As AsynchronousRunner.begin. `inputs`: of this step, None where it has no rows."""
        ...


class LeadingRunner:
    """Rank 0's Runner: each Step goes to the other ranks, then to `inner`.

    Once a step failed on this rank alone the others may be inside a collective that will never be completed: the group is
    given up then, and every further step raises RunnerLost.
    """

    def __init__(self, inner: Runner, group: RankGroup) -> None:
        """Blocks until every rank has made its worker. Raises GroupBroken when one could not."""
        self.inner = inner
        self._told = inner if isinstance(inner, ToldRunner) else None
        self._group = group
        self._encoder, self._decoder = StepEncoder(inner.limits.block_size), StepDecoder(inner.limits.block_size)
        group.meet()

    @property
    def limits(self) -> EngineLimits:
        return self.inner.limits

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self.inner.eos_token_ids

    @property
    def overlaps(self) -> bool:
        return self._told is not None and self._told.overlaps

    def execute(self, step: Step) -> StepResult:
        return self.begin(step)()

    def begin(self, step: Step) -> Callable[[], StepResult]:
        with self._or_lost(step):
            data = self._encoder.encode(step)
            self._group.send(data)
            wait = partial(self.inner.execute, step) if self._told is None else self._told.begin_told(step, self._own(data))
            self._encoder.prepare()  # the others compute by now, and perhaps a device of ours
            self._decoder.prepare()

        def end() -> StepResult:
            with self._or_lost(step):
                return wait()

        return end

    def _own(self, data: bytes) -> StepInputs | None:
        """The step's arrays as the other ranks have them, which costs less than to make them of the Step."""
        told = self._decoder.decode(data)
        return None if told is None else told.inputs

    @contextlib.contextmanager
    def _or_lost(self, step: Step) -> Iterator[None]:
        try:
            yield
        except RunnerLost:
            self._group.close()
            raise
        except Exception as error:
            self._group.close()
            raise RunnerLost(f"step {step.step_id} failed on rank 0 alone: {error}") from error

    def close(self) -> None:
        """The other ranks leave their loops."""
        if not self._group.broken:
            with contextlib.suppress(GroupBroken):  # they are gone already
                self._group.send(encode_stop())
            self._group.close()
        self.inner.close()


def rank_main(group: RankGroup, make_worker: Callable[[TensorParallel], Worker]) -> int:
    """The life of a rank > 0: carry out Steps until told to stop; returns how many.

    Raises GroupBroken when a peer is gone or late, and whatever the worker raises; the group is left in either case, which
    the peers notice, and before the first Step rank 0 is told the reason. A step leaves nothing behind but the
    worker's cache, and in the decoder its number and its rows' places, positions and pages, until the next one.
    """
    steps = 0
    worker: Worker | None = None
    try:
        worker = make_worker(group)
        group.meet()
        decoder = StepDecoder(worker.limits.block_size)
        while True:
            try:
                step = decoder.decode(group.receive())
            except CodecError as error:
                raise GroupBroken(f"rank {group.rank}: {error}") from error
            if step is None:
                return steps
            worker.follow(step)
            steps += 1
            decoder.prepare()
    except BaseException as error:
        group.close(" ".join((str(error) or type(error).__name__).split()))
        raise
    finally:
        group.close()
        if worker is not None:
            worker.close()
