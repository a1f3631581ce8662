"""What can be known to fail before anything is started: one line each, nothing to clean up."""

from __future__ import annotations

import errno
import socket

from cluster.config import Config
from replica.contract.model_error import ModelError
from replica.contract.model_files import ModelFiles, resolve


class StartError(Exception):
    """The cluster cannot start; the message is one line for the user. `see_logs`: it may not explain itself."""

    def __init__(self, message: str, *, see_logs: bool = False) -> None:
        super().__init__(message)
        self.see_logs = see_logs


def check_port(host: str, port: int) -> None:
    """Raises StartError when (host, port) cannot be listened on."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise StartError(f"--host {host}: {error.strerror}") from None
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise StartError(f"port {port} on {host} is taken; choose another with --port") from None
            raise StartError(f"cannot listen on {host}:{port}: {error.strerror}") from None


def find_model(config: Config) -> ModelFiles | None:
    """The model's files, downloaded if need be. None for a mock, which has none. Raises StartError."""
    if config.engine.runner == "mock":
        return None
    try:
        return resolve(config.engine.model, config.engine.revision)
    except ModelError as error:
        raise StartError(str(error)) from None
