"""What can be known to fail before anything is started: one line each, nothing to clean up."""

from __future__ import annotations

import errno
import os
import socket
import time

from cluster.config import Config
from cluster.local_ray import joined_address
from kernels.cpu.sizes import SCALE_BYTES
from kernels.names import KNOWN, wanted_kernels
from replica.conflict import conflict
from replica.contract.model_error import ModelError
from replica.contract.model_files import ModelFiles, resolve
from replica.kv_pool import size_pool
from replica.models.config import read_model_config
from replica.models.model_config import ModelConfig, shard_problem
from replica.models.tensors import check_tensors
from router.served_model import load_served_model

RELEASE_S = 3.0  # until who is ending has given its port back
_ASK_AGAIN_S = 0.1
CLUSTER_S = 10.0  # until a cluster to be joined has answered
_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # one of them is there wherever torch can see a GPU


class StartError(Exception):
    """The cluster cannot start; the message is one line for the user.

    `see_logs`: it may not explain itself. `usage`: the settings cannot be served, whatever runs.
    """

    def __init__(self, message: str, *, see_logs: bool = False, usage: bool = False) -> None:
        super().__init__(message)
        self.see_logs = see_logs
        self.usage = usage


def take_port(host: str, port: int) -> socket.socket:
    """Make sure that nobody listens on (host, port), nor another `rantang serve` is about to; keep the answer open. Raises StartError.

    HAProxy shares ports (SO_REUSEPORT) to reload without a gap: two of them on one port would each get half of the
    connections. So the start is guarded by a name in the network's own namespace, which goes when this process does.
    What was killed a moment ago takes another to give its port back: one that is taken is asked for again, for RELEASE_S.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise StartError(f"--host {host}: {error.strerror}") from None
    until_s = time.monotonic() + RELEASE_S
    while True:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claim.bind(f"\0rantang/{host}:{port}")
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                probe.listen(1)
            return claim
        except OSError as error:
            claim.close()
            if error.errno != errno.EADDRINUSE:
                raise StartError(f"cannot listen on {host}:{port}: {error.strerror}") from None
        if time.monotonic() > until_s:
            raise StartError(f"port {port} on {host} is taken; choose another with --port")
        time.sleep(_ASK_AGAIN_S)


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
    problem = unusable(config, model)
    if problem:
        raise StartError(problem, usage=True)
    return files


def unusable(config: Config, model: ModelConfig) -> str:
    """What every replica would refuse, in its own words; '' where one may start.

    A replica asks the same of the device that it finds and of its own environment. Here more than one answer may be possible, on a
    cluster that is joined or where there may be a GPU: then only what is refused in all of them is.
    """
    engine, devices = config.engine, _devices(config)
    if not devices:
        return f"--device cuda: there is no GPU on this machine (none of {', '.join(_GPU_FILES)}); it takes --device cpu or auto"
    wanted = engine.max_model_len
    if wanted is not None and wanted > model.context_max:
        return f"max_model_len {wanted} exceeds the model's context of {model.context_max} tokens"
    names = ("", *KNOWN) if joined_address(config) else (wanted_kernels(),)
    found = [conflict(engine, model, device, name) for device in devices for name in names]
    return shard_problem(model, engine.tensor_parallel_size) or (found[0] if all(found) else "") or _no_pool(config, model, devices)


def _no_pool(config: Config, model: ModelConfig, devices: tuple[str, ...]) -> str:
    """Why the KV pool of a CPU, whose size is configured, holds too little; '' where it may hold enough."""
    if devices != ("cpu",):
        return ""
    in_int8, wide = config.engine.kv_cache_dtype == "int8", config.engine.dtype == "float32"
    try:
        size_pool(config.engine, model, 1 if in_int8 else 4 if wide else 2, SCALE_BYTES if in_int8 else 0)
    except ModelError as error:
        return str(error)
    return ""


def _devices(config: Config) -> tuple[str, ...]:
    """Kinds that a replica may compute on."""
    wanted, may_have_gpu = config.engine.device, joined_address(config) is not None or any(map(os.path.exists, _GPU_FILES))
    kinds = ("cpu", "cuda") if may_have_gpu else ("cpu",)
    return kinds if wanted == "auto" else tuple(kind for kind in kinds if kind == wanted)
