"""`rantang serve`: check, start in stages, serve until told to stop, drain, and leave nothing behind."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from cluster import deployment, local_ray, processes, stages
from cluster.config import Config
from cluster.cores import usable_cores
from cluster.early_exit import EXIT_INTERRUPTED, INTERRUPTED
from cluster.guardian import Guardian
from cluster.losses import Losses, line
from cluster.preflight import StartError, find_cluster, find_model, take_port
from cluster.run_directory import RunDirectory
from cluster.signals import Signals, mute

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
_WATCH_PERIOD_S = 1.0
_END_GRACE_S = 1.0
_WITHDRAW_TIMEOUT_S = 5.0


@dataclass(slots=True)
class _Held:
    """What this command has taken so far, and must give back however it ends."""

    port: socket.socket | None = None
    directory: RunDirectory | None = None
    guardian: Guardian | None = None


def run(config: Config) -> int:
    """The whole command; returns the exit status. Prints one line per fault, never a traceback."""
    held = _Held()
    show = stages.Stages()
    signals = Signals(lambda: _abort(config, show, held))
    signals.install()
    signals.watch()
    status = EXIT_FAILED
    see_logs = False
    try:
        with show.stage("model"):
            address = local_ray.joined_address(config)
            if address is None:
                held.port = take_port(config.serve.host, config.serve.port)
            else:
                find_cluster(address)
            files = find_model(config)
            show.note = config.model_name if files is None else f"{config.model_name} ({files.kind}, {files.revision})"
        with signals.taking():
            held.directory = RunDirectory.create()
            held.guardian = Guardian()
        status = _serve(config, signals, show, held.directory, held.guardian)
    except (KeyboardInterrupt, SystemExit):  # ray.init sets handlers of its own for a while
        signals.give_way()
        stages.error(INTERRUPTED)
        status = EXIT_INTERRUPTED
    except StartError as error:
        signals.started()
        stages.error(str(error))
        see_logs, status = error.see_logs, EXIT_USAGE if error.usage else EXIT_FAILED
    except Exception as error:
        signals.started()
        stages.error(str(deployment.failure([f"{type(error).__name__}: {error}"])))
        see_logs = True
        if config.serve.log_level == "debug":
            raise
    finally:
        signals.started()  # from here on a signal must not cut the cleaning up short
        local_ray.stop()
        _clean_up(held, see_logs=see_logs)
    return status


def _abort(config: Config, show: stages.Stages, held: _Held) -> None:
    """A signal came while the cluster was starting: ends this process and all below it, whatever the main thread waits for."""
    show.let_go()
    stages.error(INTERRUPTED)
    if config.serve.log_level != "debug":
        mute()
    if local_ray.joined_address(config) is not None and local_ray.connected():
        deployment.finished(partial(_withdraw, config), _after(_WITHDRAW_TIMEOUT_S))
    _clean_up(held, see_logs=False)
    processes.end_descendants(os.getpid(), 0.0)  # that the main thread has started meanwhile
    os._exit(EXIT_INTERRUPTED)


def _withdraw(config: Config) -> bool:
    deployment.withdraw(config)
    return True


def _after(seconds: float) -> Callable[[], bool]:
    end_s = time.monotonic() + seconds
    return lambda: time.monotonic() > end_s


def _serve(config: Config, signals: Signals, show: stages.Stages, directory: RunDirectory, guardian: Guardian) -> int:
    address = local_ray.joined_address(config)
    haproxy = _start_ray(config, signals, show, directory, address)
    guardian.watch(process.pid for process in processes.living(os.getpid(), but=guardian.pid))
    signals.go_on()
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
    losses = Losses()
    losses.observe(processes.titles(process.pid for process in processes.living(os.getpid(), but=guardian.pid)))
    while not signals.wait(_WATCH_PERIOD_S):
        alive = {process.pid for process in processes.living(os.getpid(), but=guardian.pid)}
        guardian.watch(alive)
        if not essential <= alive:
            raise StartError("a process of Ray has died; stopping", see_logs=True)
        if lost := losses.observe(processes.titles(alive)):
            stages.error(line(lost, local_ray.causes_of_death([each.pid for each in lost])))
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
    signals.go_on()
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


def _clean_up(held: _Held, *, see_logs: bool) -> None:
    """No process of ours survives this, nor its files unless they may explain a failure."""
    guardian, directory = held.guardian, held.directory
    processes.end_descendants(os.getpid(), _END_GRACE_S, but=None if guardian is None else guardian.pid)
    if guardian is not None:
        guardian.dismiss()
    if directory is not None:
        _leave(directory, see_logs=see_logs)
    if held.port is not None:  # only now: another start may take it
        held.port.close()


def _leave(directory: RunDirectory, *, see_logs: bool) -> None:
    logs = local_ray.session_logs(directory)
    if see_logs and logs.exists():
        stages.error(f"Ray's logs are in {logs.resolve()} until the next start")
        directory.keep()
    else:
        directory.remove()
