"""`rantang serve`: check, start in stages, serve until told to stop, drain, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from types import FrameType

from cluster import deployment, local_ray, processes, stages
from cluster.config import Config
from cluster.cores import usable_cores
from cluster.guardian import Guardian
from cluster.preflight import StartError, find_cluster, find_model, take_port
from cluster.run_directory import RunDirectory

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
_WATCH_PERIOD_S = 1.0
_END_GRACE_S = 1.0


class _Interrupted(BaseException):
    """A signal came while the cluster was starting."""


class Signals:
    """SIGINT and SIGTERM. While starting they raise; then the first asks to drain and the second to stop at once."""

    def __init__(self) -> None:
        self._starting = True
        self._count = 0
        self._wake = threading.Event()

    def install(self) -> None:
        """Again after `ray.init`, which sets a handler of its own."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def started(self) -> None:
        self._starting = False

    @property
    def asked_to_hurry(self) -> bool:
        return self._count > 1

    def wait(self, timeout_s: float) -> bool:
        return self._wake.wait(timeout_s)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._count += 1
        self._wake.set()
        if self._starting:
            self._starting = False
            raise _Interrupted


def run(config: Config) -> int:
    """The whole command; returns the exit status. Prints one line per fault, never a traceback."""
    signals = Signals()
    signals.install()
    show = stages.Stages()
    directory: RunDirectory | None = None
    guardian: Guardian | None = None
    port: socket.socket | None = None
    status = EXIT_FAILED
    see_logs = False
    try:
        with show.stage("model"):
            address = local_ray.joined_address(config)
            if address is None:
                port = take_port(config.serve.host, config.serve.port)
            else:
                find_cluster(address)
            files = find_model(config)
            show.note = config.model_name if files is None else f"{config.model_name} ({files.kind}, {files.revision})"
        directory = RunDirectory.create()
        guardian = Guardian()
        status = _serve(config, signals, show, directory, guardian)
    except (_Interrupted, KeyboardInterrupt, SystemExit):  # the latter two: ray.init sets handlers of its own for a while
        stages.error("stopped while starting")
        status = EXIT_INTERRUPTED
    except StartError as error:
        stages.error(str(error))
        see_logs, status = error.see_logs, EXIT_USAGE if error.usage else EXIT_FAILED
    except Exception as error:
        stages.error(str(deployment.failure([f"{type(error).__name__}: {error}"])))
        see_logs = True
        if config.serve.log_level == "debug":
            raise
    finally:
        signals.started()  # from here on a signal must not cut the cleaning up short
        _clean_up(directory, guardian, see_logs=see_logs)
        if port is not None:
            port.close()
    return status


def _serve(config: Config, signals: Signals, show: stages.Stages, directory: RunDirectory, guardian: Guardian) -> int:
    address = local_ray.joined_address(config)
    haproxy = _start_ray(config, signals, show, directory, address)
    guardian.watch(process.pid for process in processes.living(os.getpid(), but=guardian.pid))
    try:
        _start_application(config, show, haproxy, local=address is None)
    except BaseException:
        if address is not None:  # somebody else's cluster goes on without us: nothing of ours may stay on it
            deployment.withdraw(config)
        raise
    essential = {
        process.pid for process in processes.living(os.getpid(), but=guardian.pid) if process.name in (local_ray.GCS, local_ray.RAYLET)
    }
    signals.started()
    while not signals.wait(_WATCH_PERIOD_S):
        alive = {process.pid for process in processes.living(os.getpid(), but=guardian.pid)}
        guardian.watch(alive)
        if not essential <= alive:
            raise StartError("a process of Ray has died; stopping", see_logs=True)
    show.say("draining; once more to stop at once")
    start = time.monotonic()
    drained = deployment.take_down(config, lambda: signals.asked_to_hurry, delete=address is not None)
    show.say(f"{'drained' if drained else 'stopped without draining'} in {time.monotonic() - start:.1f} s")
    return EXIT_OK


def _start_ray(config: Config, signals: Signals, show: stages.Stages, directory: RunDirectory, address: str | None) -> bool:
    """True if HAProxy serves. Nothing of Ray is imported before the environment is set."""
    haproxy = True
    with show.stage("environment"):
        if address is None:
            processes.adopt_orphans()
            haproxy = local_ray.prepare(config, directory)
            if not haproxy and config.serve.routers > 1:
                raise StartError(f"without HAProxy one router serves, not {config.serve.routers}; give --routers 1")
        show.note = f"{usable_cores()} cores" + _without_haproxy(config, haproxy)
    with show.stage("ray"):
        if address is None:
            local_ray.start(config, directory)
            show.note = "local"
        else:
            local_ray.join(config, address)
            show.note = address
        signals.install()
    return haproxy


def _start_application(config: Config, show: stages.Stages, haproxy: bool, *, local: bool) -> None:
    url = deployment.public_url(config)
    with show.stage("replicas"):
        deployment.check_placement(config)
        deployment.deploy(config, haproxy=haproxy)

        def progress(running: int) -> None:
            show.note = f"{running} of {config.serve.replicas}"

        deployment.wait_running(config, progress)
    with show.stage("router"):
        deployment.wait_ready(config, url, haproxy=haproxy and local)
        show.note = url
    replica = deployment.replica_stats(config)
    kv_tokens = int(replica.get("num_blocks", 0) * replica.get("block_size", 0))
    show.box(
        stages.Summary(
            url=url,
            model=config.model_name,
            dtype=str(replica.get("dtype", config.engine.dtype)),
            kernels=str(replica.get("kernels", "")),
            replicas=config.serve.replicas,
            kv_tokens=kv_tokens * config.serve.replicas or None,
            dashboard=_dashboard_url() if config.serve.dashboard else None,
            seconds=show.elapsed_s,
        )
    )


def _without_haproxy(config: Config, haproxy: bool) -> str:
    if haproxy:
        return ""
    return f"; {'HAProxy cannot run here' if config.serve.haproxy else 'no HAProxy'}: the router's own port serves"


def _dashboard_url() -> str:
    import ray

    return f"http://{ray._private.worker._global_node.webui_url}"


def _clean_up(directory: RunDirectory | None, guardian: Guardian | None, *, see_logs: bool) -> None:
    """No process of ours survives this, nor its files unless they may explain a failure."""
    if directory is None or guardian is None:
        return
    local_ray.stop()
    processes.end_descendants(os.getpid(), _END_GRACE_S, but=guardian.pid)
    guardian.dismiss()
    logs = local_ray.session_logs(directory)
    if see_logs and logs.exists():
        stages.error(f"Ray's logs are in {logs.resolve()} until the next start")
        directory.keep()
    else:
        directory.remove()
