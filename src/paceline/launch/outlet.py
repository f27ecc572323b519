"""Output by way of a process between: a pipe that something left behind still holds then keeps nobody waiting."""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import sys
import traceback
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
GLANCE_S = 0.02

_libc = ctypes.CDLL(None, use_errno=True)


def through(run: Callable[[], int]) -> int:
    """Calls ``run`` in a child, whose stdout and stderr come out of this process's. Returns its exit code.

    What is written until its end comes out, and nothing later. Where nobody reads any more, it goes nowhere, so that a
    run whose launcher is gone can save in peace. Signals are passed on; the child ends when this process does.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pipes = {1: os.pipe(), 2: os.pipe()}
    parent, child = os.getpid(), os.fork()
    if not child:
        code = 70
        try:
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(143)
            for number, (source, sink) in pipes.items():
                os.dup2(sink, number)
                os.close(source)
                os.close(sink)
            code = run()
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(child, number))
    with selectors.DefaultSelector() as selector:
        for number, (source, sink) in pipes.items():
            os.close(sink)
            selector.register(source, selectors.EVENT_READ, number)
        return _pump(selector, child)


def _pump(selector: selectors.BaseSelector, child: int) -> int:
    ended, code = 0, 0
    while True:
        if not ended:
            ended, status = os.waitpid(child, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if ended else 0
        ready = selector.select(0 if ended else GLANCE_S) if selector.get_map() else []
        for key, _ in ready:
            data = os.read(key.fd, 1 << 16)
            if not data:
                selector.unregister(key.fd)
            _write(key.data, data)
        if ended and not ready:
            return code if code >= 0 else 128 - code


def _write(sink: int, data: bytes) -> None:
    with contextlib.suppress(OSError):  # nobody reads
        while data:
            data = data[os.write(sink, data) :]
