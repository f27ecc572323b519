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

STALL_S = 300.0  # without progress, after which a transfer ends: longer than a host needs to check the files it has
MAX_LINES, MAX_LINE_BYTES = 1000, 64 << 20  # lines of other output before an answer; bytes of an answer


@dataclass
class Delivery:
    """A transfer to one host. ``home``: the user's home folder there; ``num_present``: files that the host had."""

    host: Host
    home: str = ""
    num_files: int = 0
    num_present: int = 0
    done_bytes: int = 0
    all_bytes: int = 0
    listed_bytes: int = 0  # bytes sent of the list of all files
    num_waits: int = 0  # messages that it waits for another sender
    seconds: float = 0.0
    process: subprocess.Popen[bytes] | None = None
    stalled: bool = False
    progress: tuple[object, float] = ((), 0.0)  # the last state, and when it was reached

    def check_progress(self) -> None:
        """Ends the transfer after STALL_S without progress: a stopped process there would keep the connection open."""
        sent = self.listed_bytes, self.done_bytes
        progress, now = (sent, self.all_bytes, self.num_waits, self.process is None), time.monotonic()
        if progress != self.progress[0]:
            self.progress = progress, now
        process = self.process  # set and reset by another thread
        if process and now - self.progress[1] > STALL_S:
            self.stalled = True
            kill(process)

    def __str__(self) -> str:
        if self.num_waits:
            return f"{self.host.name}: another sender is at work there"
        return f"{self.host.name}: {self.done_bytes / 1e6:.1f} of {self.all_bytes / 1e6:.1f} MB"


class Broken(Exception):
    """The reason why the transfer to one host failed."""


def send(
    hosts: Sequence[Host], way: Way, trees: Sequence[Tree], show: Callable[[str], None] = lambda doing: None
) -> tuple[list[Host], list[Delivery]]:
    """Returns the hosts, each with the folder there that holds the last of the ``trees``, and the transfers.

    ``show`` is called with the progress. Files that have arrived before a failure stay there, and are not sent again.
    Raises ValueError with a line for each host that has not received everything.
    """
    deliveries = [Delivery(host) for host in hosts]
    with ThreadPoolExecutor(len(hosts)) as pool, ChildProcesses() as children:
        pending = [pool.submit(_deliver, children, delivery, way, trees) for delivery in deliveries]
        while not all(each.done() for each in pending):
            for delivery in deliveries:
                delivery.check_progress()
            show("; ".join(map(str, deliveries)))
            time.sleep(0.05)
        ends = [each.result() for each in pending]
    if faults := [f"{host.name}: {end}" for host, end in zip(hosts, ends, strict=True) if isinstance(end, Broken)]:
        raise ValueError(
            "nothing was started, because not every host received what --send sends:\n- " + "\n- ".join(faults)
        )
    return [dataclasses.replace(host, folder=str(end)) for host, end in zip(hosts, ends, strict=True)], deliveries


def _deliver(children: ChildProcesses, to: Delivery, way: Way, trees: Sequence[Tree]) -> str | Broken:
    start = time.monotonic()
    with tempfile.TemporaryFile() as errors:
        command, piped = way.command(to.host, "-c", READ), subprocess.PIPE
        process = children.start(command, stdin=piped, stdout=piped, stderr=errors)
        to.process = process
        try:
            answer = _transfer(process, to, trees)
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
        last = f"no progress for {STALL_S:.0f} s; check the machine and its disk"
    return Broken(
        f"the connection failed after {to.done_bytes / 1e6:.1f} of {to.all_bytes / 1e6:.1f} MB ({last}); start "
        f"again: the files that have arrived are not sent again"
    )


def _transfer(process: subprocess.Popen[bytes], to: Delivery, trees: Sequence[Tree]) -> dict[str, Any] | None:
    """Sends the list of files, then those that the host lacks. Returns its last answer; None if there was none."""
    assert process.stdin
    listings = [tree.listing() for tree in trees]
    sources = {name: path for tree in trees for name, path in tree.sources.items()}
    contents = list({name: size for tree in listings for _, name, size, _ in tree["files"]}.items())
    with contextlib.suppress(OSError):  # its answer, read below, tells why
        process.stdin.write(program(Path(receive.__file__).read_bytes()))
        listed = json.dumps({"trees": listings}).encode() + b"\n"
        for start in range(0, len(listed), PART):
            process.stdin.write(listed[start : start + PART])
            to.listed_bytes += PART
        process.stdin.flush()
        while (answer := _answer(process)) and "waiting" in answer:
            to.num_waits += 1
        to.num_waits = 0
        if not answer or "missing" not in answer:
            return answer
        try:
            wanted = [contents[i] for i in answer["missing"]]  # both ends number the contents in the same order
        except (IndexError, TypeError):
            raise Broken("it requests files that it was not offered; check which program answers there") from None
        to.num_files, to.num_present = len(wanted), len(contents) - len(wanted)
        to.all_bytes = sum(size for _, size in wanted)
        for name, size in wanted:
            for data in _parts(sources[name], size):
                process.stdin.write(data)
                to.done_bytes += len(data)
        process.stdin.flush()
    return _answer(process)


def _answer(process: subprocess.Popen[bytes]) -> dict[str, Any] | None:
    """The next line that is a JSON object; a login's output may precede it."""
    assert process.stdout
    for _ in range(MAX_LINES):
        if not (line := process.stdout.readline(MAX_LINE_BYTES)):
            break
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(answer := json.loads(line), dict):
                return answer
    return None


def _parts(path: Path, size: int) -> Iterator[bytes]:
    """Reads ``size`` bytes of a file in parts. The receiver's hash detects a change that does not shorten the file."""
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
