"""The processes of one node: a private socket from each to local rank 0, and memory shared by all.

They meet at a Linux abstract socket, and the memory is an anonymous file passed over it: neither has a name on disk, so
nothing is left when a process is killed. A closed socket reports a failure. A process may compute for long while others
wait for it; if it is stopped (SIGSTOP), that is logged at once.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from paceline.environment import rendezvous_timeout_s
from paceline.errors import LinkError
from paceline.report.activity import Activity
from paceline.transport import Threads, Waits

TIMEOUT_S = 1800.0  # for a process that computes
POLL_S = 1.0  # between two checks of a process that is waited for
MESSAGE_BYTES = 1 << 17  # one packet; votes and outcomes are far smaller

HELLO = struct.Struct("<II")  # local rank, local size
END, RESUME = ENDS = b"E", b"R"  # errors that end all processes of the node; after RESUME the run may be resumed
KINDS = {
    b"b": "a barrier",
    b"f": "the forms of buckets",
    b"g": "adding numbers up",
    b"h": "joining",
    b"e": "the end of a step",
    b"m": "sharing memory",
    b"n": "adding up batch statistics",
    b"p": "a bucket of the gradient",
    b"s": "gathering the optimizer's state",
    b"v": "the vote on a step",
}


class LocalGroupError(LinkError):
    """Another process of this node ended, or reported an error that ends the node."""


class LocalGroup:
    """Local rank 0 receives from all; the others receive from local rank 0."""

    threads = Threads()

    def __init__(self, rank: int, size: int, name: str):
        self.rank, self.size, self.name = rank, size, name
        self.lines: dict[int, socket.socket] = {}
        self.pids: dict[int, int] = {}
        self._join_s = rendezvous_timeout_s()
        self.failure_detector = LocalFailureDetector(rank, self.pids, 2 * self._join_s)
        address = f"\0paceline-{name}"
        end = time.monotonic() + self._join_s
        try:
            if rank == 0:
                self._gather(address, end)
            else:
                self._reach(address, end)
            self._confirm()
        except BaseException:
            self.close()
            raise
        self.failure_detector.patience_s = TIMEOUT_S
        for line in self.lines.values():
            line.settimeout(POLL_S)
            line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MESSAGE_BYTES)

    def _gather(self, address: str, end: float) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            try:
                server.bind(address)
            except OSError as error:
                raise LocalGroupError(
                    f"another run on this machine already uses the name {self.name!r} ({error}); start this one "
                    f"with another MASTER_PORT"
                ) from None
            server.listen(self.size)
            while len(self.lines) < self.size - 1:
                left = end - time.monotonic()
                try:
                    if left <= 0:
                        raise TimeoutError
                    server.settimeout(left)
                    line, _ = server.accept()
                except TimeoutError:
                    missing = sorted(set(range(1, self.size)) - set(self.lines))
                    raise self._failed(
                        f"local rank 0 of {self.size} waited {self._join_s:.0f} s for local ranks {missing}; were all "
                        f"started, with the same MASTER_PORT? Where some need longer, give all "
                        f"PACELINE_RENDEZVOUS_TIMEOUT_S"
                    ) from None
                self._admit(line)

    def _admit(self, line: socket.socket) -> None:
        """Refuses connections of other users, and those that do not identify themselves."""
        line.settimeout(2.0)
        try:
            hello = line.recv(HELLO.size + 2)
        except OSError:
            hello = b""
        if other_end(line)[1] != os.getuid() or hello[:1] != b"h" or len(hello) != HELLO.size + 1:
            line.close()
            return
        rank, size = HELLO.unpack_from(hello, 1)
        fault = None
        if size != self.size:
            fault = f"a process of this node says LOCAL_WORLD_SIZE={size}, local rank 0 says {self.size}"
        elif not 0 < rank < self.size:
            fault = f"a process of this node says it is local rank {rank} of {size}; they count from 0 to {size - 1}"
        elif rank in self.lines:
            fault = f"two processes of this node say they are local rank {rank}"
        if fault:
            with contextlib.suppress(OSError):
                line.send(END + fault.encode())
            line.close()
            raise self._failed(f"{fault}; start each with the same LOCAL_WORLD_SIZE and a LOCAL_RANK of its own")
        self.lines[rank], self.pids[rank] = line, other_end(line)[0]

    def _reach(self, address: str, end: float) -> None:
        while True:
            line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            line.settimeout(self._join_s)
            try:
                line.connect(address)
                break
            except (ConnectionRefusedError, FileNotFoundError, BlockingIOError, TimeoutError):
                line.close()
                if time.monotonic() > end:
                    raise LocalGroupError(
                        f"local rank {self.rank} of {self.size} found no local rank 0 within {self._join_s:.0f} s; "
                        f"was it started? Where it needs longer, give all PACELINE_RENDEZVOUS_TIMEOUT_S"
                    ) from None
                time.sleep(0.01)
        if (user := other_end(line)[1]) != os.getuid():
            line.close()
            raise LocalGroupError(
                f"the run named {self.name!r} on this machine is another user's (uid {user}); start this one with "
                f"another MASTER_PORT"
            )
        self.lines[0], self.pids[0] = line, other_end(line)[0]
        self.send(0, b"h", HELLO.pack(self.rank, self.size))

    def _confirm(self) -> None:
        """Processes continue only when all have joined and the socket is closed: a later join could reach it."""
        if self.rank == 0:
            for peer in self.lines:
                self.send(peer, b"h")
        else:
            self.lines[0].settimeout(2 * self._join_s)
            self.expect(0, b"h", "joining")

    def send(self, peer: int, kind: bytes, body: bytes = b"") -> None:
        try:
            self._retry(peer, f"sending {KINDS.get(kind, repr(kind))}", lambda: self.lines[peer].send(kind + body))
        except LocalGroupError:
            raise
        except OSError as error:
            ended = isinstance(error, BrokenPipeError)
            reason = "it has ended, or left its loop before the others" if ended else str(error)
            why = f"local rank {self.rank} lost local rank {peer} of this node: {reason}"
            raise self._failed(self._last_message(peer) or why) from None

    def recv(self, peer: int, doing: str) -> tuple[bytes, bytes]:
        """(kind, body). Raises LocalGroupError when the peer has failed, or sends nothing for TIMEOUT_S."""
        kind, body, _ = self._recv(peer, doing, 0)
        return kind, body

    def recv_any(self, peers: Collection[int], doing: str) -> tuple[int, bytes, bytes]:
        """(peer, kind, body) of the next message of any of them. Raises as `recv`."""
        poll, of = select.poll(), {self.lines[peer].fileno(): peer for peer in peers}
        for line in of:
            poll.register(line, select.POLLIN)
        begun_s = time.monotonic()
        while not (ready := poll.poll(1000 * POLL_S)):
            for peer in peers:
                self.check_peer(peer, doing, time.monotonic() - begun_s)
        peer = of[ready[0][0]]
        return peer, *self.recv(peer, doing)

    def _recv(self, peer: int, doing: str, num_files: int) -> tuple[bytes, bytes, list[int]]:
        try:
            line = self.lines[peer]
            receive = lambda: socket.recv_fds(line, MESSAGE_BYTES, num_files)  # noqa: E731
            message, files, _, _ = self._retry(peer, doing, receive)
        except LocalGroupError:
            raise
        except OSError as error:
            message, files, why = b"", [], str(error)
            if isinstance(error, ConnectionResetError) and (reason := self._last_message(peer)):
                raise self._failed(reason) from None
        else:
            why = "its process ended"
        if not message:
            raise self._failed(f"local rank {self.rank} lost local rank {peer} of this node while {doing}: {why}")
        if message[:1] in ENDS:
            raise LocalGroupError(message[1:].decode(), resumes=message[:1] == RESUME)
        return message[:1], message[1:], files

    def _retry(self, peer: int, doing: str, operation: Callable[[], Any]) -> Any:
        """Repeats ``operation`` while it times out, after POLL_S each. Raises its other errors, and LocalGroupError."""
        with contextlib.suppress(TimeoutError):
            return operation()
        start = time.monotonic()
        text = f"{doing}: waiting for local rank {peer} of this node, pid {self.pids[peer]}"
        with self.failure_detector.activity.at(text):
            while True:
                self.check_peer(peer, doing, time.monotonic() - start)
                with contextlib.suppress(TimeoutError):
                    return operation()

    def check_peer(self, peer: int, doing: str, waited_s: float) -> None:
        """Raises LocalGroupError where ``peer``, for which this process waits, has failed."""
        if why := self.failure_detector.failure(peer, doing, waited_s):
            raise self._failed(f"local rank {self.rank} lost local rank {peer} of this node while {doing}: {why}")

    def _last_message(self, peer: int) -> str:
        """The error that the peer sent before it closed the connection, if any: a reset arrives before that message."""
        line = self.lines[peer]
        line.settimeout(1.0)
        with contextlib.suppress(OSError):
            while message := line.recv(MESSAGE_BYTES):
                if message[:1] in ENDS:
                    return message[1:].decode()
        return ""

    def expect(self, peer: int, kind: bytes, doing: str) -> bytes:
        got, body = self.recv(peer, doing)
        self.check(peer, got, kind, doing)
        return body

    def check(self, peer: int, got: bytes, kind: bytes, doing: str) -> None:
        """Raises LocalGroupError when another process of this node has sent a message of another kind."""
        if got != kind:
            raise self._failed(
                f"local rank {self.rank} is {doing}, local rank {peer} is at {KINDS.get(got, repr(got))}: every "
                f"process of a node must make the same calls in one order (step, evaluate, save, optimizer.state_dict)"
            )

    def barrier(self, doing: str) -> None:
        """Returns when all processes have called it."""
        if self.rank == 0:
            for peer in self.lines:
                self.expect(peer, b"b", doing)
            for peer in self.lines:
                self.send(peer, b"b")
        else:
            self.send(0, b"b")
            self.expect(0, b"b", doing)

    def gather(self, values: Sequence[float], doing: str) -> list[list[float]]:
        """An all-gather of numbers, in local rank order."""
        shape = f"<{len(values)}d"
        if self.rank:
            self.send(0, b"g", struct.pack(shape, *values))
            flat = struct.unpack(f"<{len(values) * self.size}d", self.expect(0, b"g", doing))
            return [list(flat[i * len(values) : (i + 1) * len(values)]) for i in range(self.size)]
        rows = [list(values)]
        rows += [list(struct.unpack(shape, self.expect(peer, b"g", doing))) for peer in range(1, self.size)]
        for peer in self.lines:
            self.send(peer, b"g", b"".join(struct.pack(shape, *row) for row in rows))
        return rows

    def all_gather_bytes(self, body: bytes, doing: str) -> list[bytes]:
        """An all-gather of bytes of any length, in local rank order."""
        if self.rank:
            self.send_long(0, body, b"s")
            return [self.recv_long(0, b"s", doing) for _ in range(self.size)]
        bodies = [body] + [self.recv_long(peer, b"s", doing) for peer in range(1, self.size)]
        for peer in self.lines:
            for one in bodies:
                self.send_long(peer, one, b"s")
        return bodies

    def send_long(self, peer: int, body: bytes, kind: bytes) -> None:
        self.send(peer, kind, struct.pack("<Q", len(body)))
        for start in range(0, len(body), MESSAGE_BYTES - 1):
            self.send(peer, kind, body[start : start + MESSAGE_BYTES - 1])

    def recv_long(self, peer: int, kind: bytes, doing: str) -> bytes:
        (length,) = struct.unpack("<Q", self.expect(peer, kind, doing))
        parts: list[bytes] = []
        while length > 0:
            parts.append(self.expect(peer, kind, doing))
            length -= len(parts[-1])
        return b"".join(parts)

    def peek(self, peer: int) -> bytes:
        """The kind of the next message; empty if none can arrive any more: then `recv` raises the error."""
        with contextlib.suppress(OSError):
            return bytes(self._retry(peer, "receiving", lambda: self.lines[peer].recv(1, socket.MSG_PEEK)))
        return b""

    def _failed(self, why: str) -> LocalGroupError:
        error = LocalGroupError(why)
        self.broadcast_error(error)
        return error

    def broadcast_error(self, error: BaseException) -> None:
        """Local rank 0 sends its error to the others, so that they end with the same message."""
        if self.rank == 0:
            self.give_up(str(error), RESUME if getattr(error, "resumes", False) else END)

    def give_up(self, why: str, kind: bytes = END) -> None:
        """The processes at the other ends of this process's sockets end with this message."""
        for line in self.lines.values():
            with contextlib.suppress(OSError):
                line.send(kind + why.encode()[: MESSAGE_BYTES - 1])

    def shared_memory(self, num_bytes: int) -> memoryview:
        """Memory shared by all processes, zero at first; pages are allocated when they are written."""
        if self.rank == 0:
            file = os.memfd_create(f"paceline-{self.name}", os.MFD_CLOEXEC)
            os.ftruncate(file, max(num_bytes, 1))
            for peer, line in self.lines.items():
                try:
                    socket.send_fds(line, [b"m"], [file])
                except OSError as error:
                    raise self._failed(f"local rank 0 lost local rank {peer} of this node ({error})") from None
        else:
            got, _, files = self._recv(0, "sharing memory", 1)
            self.check(0, got, b"m", "sharing memory")
            (file,) = files
        view = memoryview(mmap.mmap(file, max(num_bytes, 1)))
        os.close(file)
        return view

    def close(self) -> None:
        for line in self.lines.values():
            line.close()


class LocalFailureDetector:
    """For the local rank ``rank``; ``pids``: of the other local ranks. ``reports``: it logs long waits."""

    def __init__(self, rank: int, pids: dict[int, int], patience_s: float):
        self.rank, self.pids, self.patience_s = rank, pids, patience_s
        self.reports = rank == 0
        self.activity: Waits = Activity()
        self._stopped: dict[int, float] = {}  # when each was first seen stopped
        self._late: dict[int, float] = {}  # when a long wait for each was last logged

    def failure(self, peer: int, doing: str, waited_s: float) -> str:
        """The reason why ``peer`` counts as failed after this wait; empty where it does not."""
        now, pid, limit_s = time.monotonic(), self.pids[peer], self.activity.limit_s
        if waited_s > self.patience_s:
            return f"it sent nothing for {waited_s:.0f} s"
        if (seen := state(pid)) != "T":
            self._stopped.pop(peer, None)
            if self.reports and waited_s > limit_s and self._late.get(peer, -math.inf) < now - waited_s:
                self._late[peer] = now
                self.activity.notice(
                    f"local rank {self.rank} on {self.activity.host} at step {self.activity.step} has waited "
                    f"{waited_s:.0f} s, {doing}, for local rank {peer} (pid {pid}, state {seen or 'unknown'})\n"
                    f"{self.activity.siblings()}".rstrip()
                )
            return ""
        if peer not in self._stopped:
            self._stopped[peer] = now
            self.activity.notice(
                f"local rank {self.rank} on {self.activity.host} waits, {doing}, for local rank {peer}, which is "
                f"stopped (state T); kill -CONT {pid} resumes it, and after {limit_s:.0f} s this node fails"
            )
        stopped_s = now - self._stopped[peer]
        return f"its process {pid} has been stopped (state T) for {stopped_s:.0f} s" if stopped_s > limit_s else ""


def state(pid: int) -> str:
    """The kernel's process state (R, S, T, ...); empty where it cannot be read."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def other_end(line: socket.socket) -> tuple[int, int]:
    """(process id, user id) of the process at the other end of a local socket."""
    pid, uid, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid), int(uid)
