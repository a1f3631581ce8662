"""What can be known to fail before anything is started: one line each, nothing to clean up."""

from __future__ import annotations

import errno
import socket

from cluster.config import Config
from kernels.cpu.pages import SCALE_BYTES
from replica.config import EngineConfig
from replica.contract.model_error import ModelError
from replica.contract.model_files import ModelFiles, resolve
from replica.kv_pool import size_pool
from replica.models.config import read_model_config
from replica.models.model_config import shard_problem
from replica.models.tensors import check_tensors
from router.served_model import load_served_model

CLUSTER_S = 10.0  # until a cluster to be joined has answered


class StartError(Exception):
    """The cluster cannot start; the message is one line for the user. `see_logs`: it may not explain itself."""

    def __init__(self, message: str, *, see_logs: bool = False) -> None:
        super().__init__(message)
        self.see_logs = see_logs


def take_port(host: str, port: int) -> socket.socket:
    """Make sure that nobody listens on (host, port), nor another `rantang serve` is about to; keep the answer open. Raises StartError.

    HAProxy shares ports (SO_REUSEPORT) to reload without a gap: two of them on one port would each get half of the
    connections. So the start is guarded by a name in the network's own namespace, which goes when this process does.
    """
    taken = StartError(f"port {port} on {host} is taken; choose another with --port")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise StartError(f"--host {host}: {error.strerror}") from None
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind(f"\0rantang/{host}:{port}")
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        claim.close()
        if error.errno == errno.EADDRINUSE:
            raise taken from None
        raise StartError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return claim


def find_cluster(address: str) -> None:
    """Somebody answers at HOST:PORT; Ray itself would look for a minute. Raises StartError. Addresses of other forms are Ray's to find."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CLUSTER_S).close()
    except (OSError, OverflowError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise StartError(f"no Ray cluster answers at {address}: {reason}") from None


def find_model(config: Config) -> ModelFiles | None:
    """The model's files, downloaded if need be. None for a mock, which has none.

    Raises StartError, also for what the model cannot do, and for a tokenizer or a chat template that a router could not read.
    """
    is_mock = config.engine.runner == "mock"
    try:
        files = resolve(config.engine.model, config.engine.revision, weights=not is_mock)
        if not is_mock:
            model = read_model_config(files)
            check_tensors(files, model)
        load_served_model(config.model_name, files.gguf if files.kind == "gguf" else files.directory)
    except (ModelError, ValueError, OSError) as error:
        raise StartError(" ".join(str(error).split())) from None
    if is_mock:
        return None
    wanted = config.engine.max_model_len
    if wanted is not None and wanted > model.context_max:
        raise StartError(f"max_model_len {wanted} exceeds the model's context of {model.context_max} tokens")
    if config.engine.device == "cpu" or config.engine.num_gpu_blocks_override is not None:  # else a GPU's memory may size the pool
        try:
            size_pool(config.engine, model, *_element_bytes(config.engine))
        except ModelError as error:
            raise StartError(str(error)) from None
    problem = shard_problem(model, config.engine.tensor_parallel_size)
    if problem:
        raise StartError(problem)
    return files


def _element_bytes(engine: EngineConfig) -> tuple[int, int]:
    """Of keys and values, and of the scale of each. `auto` may turn out wider, never narrower: what does not fit so never does."""
    if engine.kv_cache_dtype == "int8":
        return 1, SCALE_BYTES
    return 4 if engine.dtype == "float32" else 2, 0
