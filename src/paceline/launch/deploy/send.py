"""Copies a snapshot of the working tree, and the data, to every host before the run starts: only what a host lacks."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.launch.child_processes import MAX_BYTES, ChildProcesses, kill
from paceline.launch.deploy import receive
from paceline.launch.deploy.snapshot import PART, Tree
from paceline.launch.hosts import READ, Host, Way, program

STALL_S = 300.0  # in which nothing was sent and nothing answered: longer than a disk needs to look at what it has
MAX_LINES, LONGEST = 1000, 64 << 20  # of what a host says before it answers; bytes of an answer


@dataclass
class Delivery:
    """To one host. ``home`` is the user's home folder there; ``there``: files that it had."""

    host: Host
    home: str = ""
    files: int = 0
    there: int = 0
    done_bytes: int = 0
    all_bytes: int = 0
    listed_bytes: int = 0  # of the list of all files
    waits: int = 0  # times that it has said so
    seconds: float = 0.0
    process: subprocess.Popen[bytes] | None = None
    stalled: bool = False
    since: tuple[object, float] = ((), 0.0)  # how far it was, and when it got there

    def look(self) -> None:
        """Ends it where nothing has moved for long: a stopped process there keeps a line open for ever."""
        sent = self.listed_bytes, self.done_bytes
        far, now = (sent, self.all_bytes, self.waits, self.process is None), time.monotonic()
        if far != self.since[0]:
            self.since = far, now
        process = self.process  # another thread's, and gone when it is done
        if process and now - self.since[1] > STALL_S:
            self.stalled = True
            kill(process)

    def __str__(self) -> str:
        if self.waits:
            return f"{self.host.name}: another sender is at work there"
        return f"{self.host.name}: {self.done_bytes / 1e6:.1f} of {self.all_bytes / 1e6:.1f} MB"


class Broken(Exception):
    """Why one host has not got everything."""


def send(
    hosts: Sequence[Host], way: Way, trees: Sequence[Tree], show: Callable[[str], None] = lambda doing: None
) -> tuple[list[Host], list[Delivery]]:
    """The hosts, each with the folder there in which the last of the ``trees`` lies, and what went to each.

    ``show`` gets the progress now and then. What has arrived when something fails stays there, and is not sent
    again. Raises ValueError with a line for each host that has not got everything.
    """
    deliveries = [Delivery(host) for host in hosts]
    with ThreadPoolExecutor(len(hosts)) as pool, ChildProcesses() as calls:
        waiting = [pool.submit(_deliver, calls, each, way, trees) for each in deliveries]
        while not all(one.done() for one in waiting):
            for each in deliveries:
                each.look()
            show("; ".join(map(str, deliveries)))
            time.sleep(0.05)
        ends = [one.result() for one in waiting]
    if faults := [f"{host.name}: {end}" for host, end in zip(hosts, ends, strict=True) if isinstance(end, Broken)]:
        raise ValueError(
            "nothing was started, because not every host has got what --send sends:\n- " + "\n- ".join(faults)
        )
    return [dataclasses.replace(host, folder=str(end)) for host, end in zip(hosts, ends, strict=True)], deliveries


def _deliver(calls: ChildProcesses, to: Delivery, way: Way, trees: Sequence[Tree]) -> str | Broken:
    start = time.monotonic()
    with tempfile.TemporaryFile() as errors:
        command, piped = way.command(to.host, "-c", READ), subprocess.PIPE
        process = calls.start(command, stdin=piped, stdout=piped, stderr=errors)
        to.process = process
        try:
            answer = _talk(process, to, trees)
        except Broken as error:
            return error
        finally:
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]
            process.wait()
            to.process = None
        to.seconds = time.monotonic() - start
        if answer and isinstance(answer.get("folders"), list) and answer["folders"]:
            to.home = str(answer.get("home", ""))
            return str(answer["folders"][-1])
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - MAX_BYTES))
        last = (errors.read().decode(errors="replace").strip() or "no output").splitlines()[-1]
    if answer and "error" in answer:
        return Broken(answer["error"])
    if to.stalled:
        last = f"nothing moved for {STALL_S:.0f} s; look at the machine and its disk"
    return Broken(
        f"the connection was lost after {to.done_bytes / 1e6:.1f} of {to.all_bytes / 1e6:.1f} MB ({last}); start "
        f"again: what has arrived there stays"
    )


def _talk(process: subprocess.Popen[bytes], to: Delivery, trees: Sequence[Tree]) -> dict[str, Any] | None:
    """The last answer; None where the connection ended without one."""
    assert process.stdin
    said = [tree.said() for tree in trees]
    sources = {name: path for tree in trees for name, path in tree.sources.items()}
    contents = list({name: size for tree in said for _, name, size, _ in tree["files"]}.items())  # the far end's order
    with contextlib.suppress(OSError):  # then its last words are read below
        process.stdin.write(program(Path(receive.__file__).read_bytes()))
        listed = json.dumps({"trees": said}).encode() + b"\n"
        for start in range(0, len(listed), PART):
            process.stdin.write(listed[start : start + PART])
            to.listed_bytes += PART
        process.stdin.flush()
        while (answer := _answer(process)) and "waiting" in answer:
            to.waits += 1
        to.waits = 0
        if not answer or "missing" not in answer:
            return answer
        try:
            wanted = [contents[i] for i in answer["missing"]]
        except (IndexError, TypeError):
            raise Broken("it asks for what it was not offered; look at what answers there") from None
        to.files, to.there = len(wanted), len(contents) - len(wanted)
        to.all_bytes = sum(size for _, size in wanted)
        for name, size in wanted:
            for data in _parts(sources[name], size):
                process.stdin.write(data)
                to.done_bytes += len(data)
        process.stdin.flush()
    return _answer(process)


def _answer(process: subprocess.Popen[bytes]) -> dict[str, Any] | None:
    """The next line that is an object: a login may greet before."""
    assert process.stdout
    for _ in range(MAX_LINES):
        if not (line := process.stdout.readline(LONGEST)):
            break
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(said := json.loads(line), dict):
                return said
    return None


def _parts(path: Path, size: int) -> Iterator[bytes]:
    """``size`` bytes; what has been changed without getting shorter, the far end notices."""
    try:
        with open(path, "rb") as file:
            while size:
                data = file.read(min(PART, size))
                if not data:
                    raise Broken(f"{path} became shorter while it was sent; start again")
                size -= len(data)
                yield data
    except OSError as error:
        raise Broken(f"{path} cannot be read any more: {error.strerror}") from None
