"""The GPU runner on a stand-in for the device: everything but the device's own calls. `make gpu` runs it on a real one."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels.batch import PagedBatch
from kernels.ops import REFERENCE
from kernels.reference.quantized_weight import QuantizedWeight
from replica import graphed_forward
from replica.config import EngineConfig
from replica.contract.model_error import ModelError
from replica.contract.model_files import resolve
from replica.device import CudaDevice
from replica.graphed_forward import GraphedForward, Staging, bucket_sizes, shapes_max
from replica.held_on_device import OnDevice, hold_on_device, measure, num_blocks
from replica.kv_pool import PoolSize, size_pool
from replica.memory_profile import GRAPHS_BYTES_EACH, Profile, pool_bytes
from replica.models.config import read_model_config
from replica.models.feed_forward import Experts
from replica.models.loader import Placement, load_model, open_source
from replica.parallel.all_reduce import AllReduceError, SizedAllReduce, SizeTable
from replica.parallel.group import SingleRank
from replica.runner import ModelRunner
from tests.replica.host_device import HostDevice, Recorded
from tests.replica.model_driver import Driver, greedy
from tests.replica.thread_ranks import lead
from tests.replica.tiny_families import write_family
from tests.replica.tiny_llama import write_tiny_llama

PROMPTS = [[(7 * i * i + 3 * i) % 130 + 1 for i in range(length)] for length in (40, 17, 1)]


def config_of(directory: Path, **changes: Any) -> EngineConfig:
    fields = {"dtype": "float32", "num_gpu_blocks_override": 64, "num_threads": 1, "max_num_seqs": 6, **changes}
    return EngineConfig(model=str(directory), **fields)


def place_of(config: EngineConfig, device: Any, tp: Any = None) -> OnDevice:
    files = resolve(config.model)
    return OnDevice(config, read_model_config(files), device, REFERENCE, torch.float32, tp or SingleRank())


def held(place: OnDevice) -> tuple[GraphedForward, PoolSize]:
    files = resolve(place.config.model)
    return hold_on_device(place, files, open_source(files, place.model))


def on_device(config: EngineConfig, device: Any, tp: Any = None) -> ModelRunner:
    """A runner whose forward pass is the accelerator's."""
    runner = ModelRunner(config, tp=tp)
    forward, size = held(place_of(config, device, tp))
    runner._held = dataclasses.replace(runner._held, forward=forward, pool=forward.pool, size=size)
    runner._pool = forward.pool
    return runner


def answers(runner: Any) -> list[list[int]]:
    """Three requests that come and go: chunks, decodes of three rows, then of two and of one."""
    driver = Driver(runner, shuffle=3)
    return driver.run([driver.add(prompt, greedy(tokens)) for prompt, tokens in zip(PROMPTS, (24, 9, 15), strict=True)], chunk=11)


@pytest.mark.parametrize(
    ("family", "quantization"),
    [("mistral", None), ("qwen3", None), ("llama", "w8a16"), ("llama", "w4a16"), ("llama", "fp8"), ("qwen3-moe", None)],
)  # with a window: two plans a step; with norms of heads; quantised; with experts
def test_replayed_steps_say_what_computed_ones_say(
    tmp_path: Path, family: str, quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANTANG_KERNELS", "reference")
    config = config_of(write_family(tmp_path, family), quantization=quantization)
    device = HostDevice()
    runner = on_device(config, device)
    forward = runner._held.forward
    assert isinstance(forward, GraphedForward)
    layer = forward.model.layers[0]
    assert isinstance(layer.qkv._weight, QuantizedWeight) == (quantization is not None)
    assert isinstance(layer.feed_forward, Experts) == (family == "qwen3-moe")
    assert forward.recorded == device.captures == len(bucket_sizes(6)) == 4
    assert answers(runner) == answers(ModelRunner(config))
    assert forward.replays > 10


def test_a_replay_on_old_inputs_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a plan that is not copied into the recorded one gives other answers."""
    config = config_of(write_tiny_llama(tmp_path))
    monkeypatch.setattr(graphed_forward, "_overwrite", lambda target, source: None)
    assert answers(on_device(config, HostDevice())) != answers(ModelRunner(config))


def test_two_ranks_record_and_replay_the_same(tmp_path: Path) -> None:
    directory = write_family(tmp_path, "llama")
    devices = {0: HostDevice(), 1: HostDevice()}
    config = config_of(directory, tensor_parallel_size=2)
    shared = lead(2, lambda tp: on_device(config, devices[tp.rank], tp), answers)
    assert shared == answers(ModelRunner(config_of(directory)))
    assert devices[0].captures == devices[1].captures > 0


def test_records_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed_forward, "GRAPHS_MAX", 1)
    config = config_of(write_tiny_llama(tmp_path))
    runner = on_device(config, HostDevice())
    assert answers(runner) == answers(ModelRunner(config))
    assert runner._held.forward.recorded == 1  # type: ignore[attr-defined]


class FailingDevice(HostDevice):
    """Has no memory for every second shape that it is to record."""

    def capture(self, work: Callable[[], None]) -> Recorded:
        record = super().capture(work)
        if self.captures % 2 == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return record


def test_a_shape_that_cannot_be_recorded_is_computed_as_it_comes_and_not_tried_again(tmp_path: Path) -> None:
    config = config_of(write_tiny_llama(tmp_path))
    device = FailingDevice()
    runner = on_device(config, device)
    forward = runner._held.forward
    assert isinstance(forward, GraphedForward)
    assert (forward.recorded, device.captures) == (2, 4)
    assert answers(runner) == answers(ModelRunner(config))
    assert device.captures == len(forward._records) > 4 and forward.recorded == device.captures - device.captures // 2
    assert forward.replays > 0


def test_what_one_rank_cannot_record_no_rank_replays(tmp_path: Path) -> None:
    directory = write_family(tmp_path, "llama")
    devices: dict[int, Any] = {0: HostDevice(), 1: FailingDevice()}
    recorded: dict[int, int] = {}

    def make(tp: Any) -> ModelRunner:
        runner = on_device(config_of(directory, tensor_parallel_size=2), devices[tp.rank], tp)
        recorded[tp.rank] = runner._held.forward.recorded  # type: ignore[attr-defined]
        return runner

    assert lead(2, make, answers) == answers(ModelRunner(config_of(directory)))
    assert recorded == {0: 2, 1: 2} and devices[0].captures == devices[1].captures > 4


@torch.inference_mode()
def test_all_records_write_into_one_pair_of_outputs(tmp_path: Path) -> None:
    runner = on_device(config_of(write_tiny_llama(tmp_path)), HostDevice())
    forward = runner._held.forward
    assert isinstance(forward, GraphedForward) and forward._outputs is not None
    seen: list[tuple[int, int]] = []
    for size in bucket_sizes(6):
        rows = np.zeros(size, np.int32)
        batch = PagedBatch(rows, rows + 1, np.full((size, graphed_forward.PAGES_MIN), 64, np.int32))
        hidden, logits = forward._decode(np.zeros(size, np.int64), np.zeros(size, np.int64), batch)
        assert hidden.shape[0] == logits.shape[0] == size
        seen.append((hidden.data_ptr(), logits.data_ptr()))
    assert forward.replays == 4
    assert set(seen) == {(forward._outputs[0].data_ptr(), forward._outputs[1].data_ptr())}
    assert [output.shape[0] for output in forward._outputs] == [6, 6]


def test_shapes_are_counted_by_batch_and_width() -> None:
    assert shapes_max(6, 1) == shapes_max(6, 64) == 4
    assert shapes_max(6, 65) == 4 * (1 + 2) and shapes_max(6, 512) == 4 * (1 + 2 + 2 + 3)
    assert shapes_max(256, 1 << 20) == graphed_forward.GRAPHS_MAX


def test_pages_of_requests_are_never_those_of_rows_that_pad(tmp_path: Path) -> None:
    config = config_of(write_tiny_llama(tmp_path))
    runner = on_device(config, HostDevice())
    assert runner._pool.shape[1] == 65 and runner.limits.num_blocks == 64
    runner._pool[:, :64] = float("nan")  # whoever reads or writes there is seen
    forward = runner._held.forward
    assert isinstance(forward, GraphedForward)
    forward.warm()
    assert bool(runner._pool[:, :64].isnan().all()) and bool(runner._pool[:, 64].isfinite().all())


@dataclasses.dataclass(frozen=True)
class Plan:
    lengths: torch.Tensor
    splits: int
    page_limit: int = dataclasses.field(metadata={graphed_forward.HOST_ONLY: True})


def test_plans_stand_for_each_other_when_only_contents_differ() -> None:
    shape = graphed_forward._shape
    plan = Plan(torch.zeros(4), 2, 7)
    assert shape(plan) == shape(Plan(torch.ones(4), 2, 900))
    assert shape(plan) != shape(Plan(torch.zeros(5), 2, 7))
    assert shape(plan) != shape(Plan(torch.zeros(4, dtype=torch.int32), 2, 7))
    assert shape(plan) != shape(Plan(torch.zeros(4), 3, 7))
    with pytest.raises(TypeError, match="a plan holds a host array"):
        shape((plan, np.zeros(3)))


def test_buckets_reach_the_most_rows_and_no_further() -> None:
    assert bucket_sizes(1) == (1,)
    assert bucket_sizes(6) == (1, 2, 4, 6)
    assert bucket_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert bucket_sizes(1000)[-1] == 256


def test_a_staging_buffer_is_reused_when_its_copy_has_been_read() -> None:
    device = HostDevice()
    staging = Staging(device, 8)
    for step in range(4):
        ids, positions = staging.stage(np.arange(5) + step, np.arange(5) * step)
        assert ids.tolist() == [step, 1 + step, 2 + step, 3 + step, 4 + step] and positions.tolist() == [
            0,
            step,
            2 * step,
            3 * step,
            4 * step,
        ]
        assert ids.data_ptr() == staging.token_ids.data_ptr()
    assert device.waits == 2  # two buffers in turn: the third and fourth step
    with pytest.raises(ValueError, match="9 tokens exceeds the staging of 8"):
        staging.stage(np.arange(9), np.arange(9))


def test_the_pool_is_what_the_largest_step_leaves() -> None:
    profile = Profile(total=1000, weights=400, activations=100, elsewhere=50, graphs=30)
    assert pool_bytes(profile, 0.9) == 320
    with pytest.raises(ModelError, match=r"gpu_memory_utilization 0\.5 of 1000 bytes leaves no room .*weights 400, largest step 100"):
        pool_bytes(profile, 0.5)


def test_the_profile_counts_weights_activations_and_others(tmp_path: Path) -> None:
    config = config_of(write_tiny_llama(tmp_path), num_gpu_blocks_override=None, max_num_batched_tokens=64, gpu_memory_utilization=0.8)
    pool = 4 * 3 * 2 * 3 * 16 * 8 * 4  # four pages for the step that is tried
    device = HostDevice(total=200_000_000, free=160_000_000, held=10_000_000 + pool, peak=15_000_000 + pool)
    place = place_of(config, device)
    source = open_source(resolve(config.model), place.model)
    model = load_model(place.model, source, Placement(torch.float32, device.torch_device, place.tp, REFERENCE, 512))
    found = measure(place, model)
    assert (found.weights, found.activations, found.elsewhere) == (10_000_000, 5_000_000, 30_000_000 - pool)
    outputs = 4 * 6 * (48 + 132)
    assert found.graphs == 4 * GRAPHS_BYTES_EACH + outputs + 5_000_000  # launches, outputs they share, memory they work in
    left = 160_000_000 - found.weights - found.activations - found.elsewhere - found.graphs
    assert num_blocks(place, model) == left // place.rank_block_bytes - 1
    explicit = dataclasses.replace(place, config=config.model_copy(update={"kv_cache_memory_bytes": 10 * place.rank_block_bytes}))
    assert num_blocks(explicit, model) == 10


@pytest.mark.parametrize("bytes_given", [False, True])
def test_a_device_without_room_is_refused_on_all_ranks_with_the_numbers(tmp_path: Path, bytes_given: bool) -> None:
    """And never given the pool that is the default where nothing is configured."""
    changes = {"kv_cache_memory_bytes": 100} if bytes_given else {}
    config = config_of(write_family(tmp_path, "llama"), tensor_parallel_size=2, num_gpu_blocks_override=None, **changes)
    full = HostDevice(total=2_000_000_000, free=0, held=1_000_000_000, peak=1_000_000_000)
    roomy = HostDevice(total=100_000_000_000, free=100_000_000_000)
    raised: list[str] = []

    def make(tp: Any) -> ModelRunner:
        try:
            held(place_of(config, full if tp.rank else roomy, tp))
        except ModelError as error:
            raised.append(str(error))
        return ModelRunner(config_of(config.model, tensor_parallel_size=2), tp=tp)

    lead(2, make, lambda runner: None)
    assert len(raised) == 2 and not any("\n" in said for said in raised)
    if bytes_given:
        assert all(re.match(r"rank 0 has room for 0 KV blocks of \d+ bytes: ", said) for said in raised)
    else:
        assert sum(said.startswith("gpu_memory_utilization 0.9 of 2000000000 bytes leaves no room") for said in raised) == 1
        assert sum(said.startswith("rank 1 has room for 0 KV blocks") for said in raised) == 1


def test_no_blocks_are_no_reason_to_take_the_default_pool(tmp_path: Path) -> None:
    config = config_of(write_tiny_llama(tmp_path))
    model = read_model_config(resolve(config.model))
    with pytest.raises(ModelError, match="a pool of 0 KV blocks of 16 tokens holds no sequence"):
        size_pool(config.model_copy(update={"num_gpu_blocks_override": 0}), model, 4)


class SymmetricMemory:
    """Torch's operators for a group of one: sums are the tensors themselves; remembers which were asked for."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def rendezvous(self, buffer: torch.Tensor, group: str) -> None:
        self.called.append(f"rendezvous {group} {buffer.numel()}")

    def one_shot_all_reduce(self, tensor: torch.Tensor, reduce: str, group: str) -> torch.Tensor:
        self.called.append(f"one_shot {reduce}")
        return tensor + 1

    def two_shot_all_reduce_(self, tensor: torch.Tensor, reduce: str, group: str) -> None:
        self.called.append(f"two_shot {reduce}")
        tensor += 2


def test_the_all_reduce_goes_by_size() -> None:
    memory = SymmetricMemory()
    nccl: list[int] = []
    table = SizeTable.parse("one_shot:64,two_shot:256")
    reduce = SizedAllReduce(table, lambda tensor: nccl.append(tensor.numel()), "0", torch.device("cpu"), memory, memory)
    for size, expected in ((16, 1.0), (17, 2.0), (64, 2.0), (65, 0.0)):
        tensor = torch.zeros(1, size)
        assert reduce(tensor) is tensor
        assert tensor.tolist() == [[expected] * size]
    assert memory.called == ["rendezvous 0 256", "one_shot sum", "two_shot sum", "two_shot sum"]
    assert nccl == [65]
    assert SizeTable.parse("").method(1) == SizeTable.parse("nccl").method(1 << 30) == "nccl"


@pytest.mark.parametrize("text", ["three_shot:5", "one_shot", "one_shot:x", "one_shot:64,two_shot:64", "one_shot:0"])
def test_a_table_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(AllReduceError, match="is not one of one_shot, two_shot, multimem with a size in bytes"):
        SizeTable.parse(text)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_real_device_graphs_say_what_the_cpu_says(tmp_path: Path) -> None:
    directory = write_family(tmp_path, "qwen3")
    config = config_of(directory, num_gpu_blocks_override=None, gpu_memory_utilization=0.3)
    runner = ModelRunner(config)
    forward = runner._held.forward
    assert isinstance(forward, GraphedForward) and isinstance(forward._device, CudaDevice)
    assert runner.limits.num_blocks > 64
    alone = answers(ModelRunner(config_of(directory, device="cpu")))
    assert answers(runner) == alone
    assert forward.replays > 10
