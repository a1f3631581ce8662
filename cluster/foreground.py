"""The process that a terminal, make or a service manager knows. It only passes signals on to the one that does the work.

A signal for the whole process group (Ctrl-C, `kill -- -PGID`, many a supervisor) would reach Ray's own processes at the same
time as ours and end them before a stream has drained. So everything runs in a session of its own, where no such signal comes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from types import FrameType

REPEAT_S = 1.0  # the same signal sent to the group and once more by make, say, is one wish; a second one later is another
_PR_SET_PDEATHSIG = 1


def run_apart(work: Callable[[], int]) -> int:
    """`work()` in a forked process of its own session; returns its exit status, in both processes. Call before threads exist.

    SIGINT, SIGTERM and SIGHUP are passed on, the last as SIGTERM. If this process is killed, so is the other.
    """
    parent = os.getpid()
    blocked = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked)  # until both sides have their handlers
    child = os.fork()
    if child == 0:
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
        if os.getppid() != parent:
            return 128 + signal.SIGKILL
        return work()
    _pass_on(child)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _pass_on(child: int) -> None:
    passed_at_s = -REPEAT_S

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal passed_at_s
        now_s = time.monotonic()
        if now_s - passed_at_s < REPEAT_S:
            return
        passed_at_s = now_s
        os.kill(child, signal.SIGTERM if number == signal.SIGHUP else number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, handle)
