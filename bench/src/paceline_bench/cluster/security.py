"""A run beside a hostile host, and a listener on the wire: what breaks, what is late, what can be read.

    python -m paceline_bench.cluster.security --messages 10000 --seconds 60 [--json]

Four nodes, each in a network namespace of its own, train two models by turns, one over gloo and one with encryption.
In a fifth namespace a stranger connects to every port that is open on any of them, says noise, what it has heard from
others, and that with a bit changed. Another training, undisturbed and alone, says what the weights must be: the same
bits. A weight of a value of its own says whether the listener can read.

A host that does not belong: it says to every open port what it should not, and what it has heard others say.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import secrets
import signal
import socket
import statistics
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from paceline import join
from paceline.link.net.auth import HEADER
from paceline.report.record import read
from paceline_bench.cluster.namespaces import Cluster, unavailable
from paceline_bench.cluster.packet_capture import Listener

NODES = 4
ROWS, INPUTS, CLASSES = 24, 48, 4
MAX_DELAY_S = 1.0
LIMIT_S = 100.0  # beside the time that is asked for
PLAIN, HIDDEN = "plain", "encrypted"
PLANTED = {PLAIN: 0.012345678912345, HIDDEN: 0.054321987654321}  # no other weight of eight in a row
PORTS = {PLAIN: 29500, HIDDEN: 29501}
PR_SET_PDEATHSIG = 1


class Samples:
    """As many batches of rows as there are steps."""

    def __init__(self, steps: int):
        dice = torch.Generator().manual_seed(1)
        self.x = torch.randn(steps * ROWS, INPUTS, generator=dice, dtype=torch.float64)
        self.y = torch.randint(0, CLASSES, (steps * ROWS,), generator=dice)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.y[i]


def train(steps: int, pause_s: float, folder: Path | None = None) -> Iterator[dict[str, str]]:
    """Joins both trainings; then does all their steps; then gives a hash of each one's weights, and leaves."""
    paces, models = [], []
    for name, value in PLANTED.items():
        os.environ["MASTER_PORT"] = str(PORTS[name])
        torch.manual_seed(3)
        first = nn.Linear(INPUTS, 32)
        with torch.no_grad():
            model = nn.Sequential(first, nn.Tanh(), nn.Linear(32, CLASSES)).double()
            first.weight.fill_(value)
        pace = join(
            model,
            torch.optim.SGD(model.parameters(), 0.05, momentum=0.9),
            cross_entropy,
            batch_size=ROWS,
            reproducible=NODES,
            encrypt=name == HIDDEN,
            folder=folder / name if folder else None,
        )
        models.append(model)
        paces.append(pace)
    yield {}
    for batches in zip(*(pace.batches(Samples(steps)) for pace in paces), strict=True):
        for pace, batch in zip(paces, batches, strict=True):
            pace.step(batch)
        time.sleep(pause_s)
    while folder and any(pace.control.all_reduce([float((folder / "enough").exists())])[0] < NODES for pace in paces):
        time.sleep(0.01)
    weights = (b"".join(p.detach().numpy().tobytes() for p in model.parameters()) for model in models)
    yield dict(zip(PLANTED, (hashlib.sha256(each).hexdigest() for each in weights), strict=True))
    for pace in paces:
        pace.close()


def node(rank: int, cluster: Cluster, folder: Path, secret: str, steps: int, pause_s: float) -> None:
    """``rank`` -1: alone, and undisturbed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # one thread each
    os.dup2(os.open(folder / f"{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
    os.environ["PACELINE_SECRET"] = secret
    if rank >= 0:
        enter(cluster.name(rank))
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(NODES), MASTER_ADDR=cluster.address(0))
        os.environ.update(PACELINE_HOST=f"node{rank}", PACELINE_NODES=f"2:{NODES}")
    training = train(steps, pause_s if rank >= 0 else 0.0, folder if rank >= 0 else None)
    next(training)
    (folder / f"{rank}.joined").touch()
    (folder / f"{rank}.json").write_text(json.dumps(next(training)))
    next(training, None)


def run(messages: int, seconds: float, seed: int = 0, pause_s: float = 0.1) -> dict[str, Any]:
    """What happened. Raises ValueError where no cluster can be made, or a node did not even join."""
    if why := unavailable():
        raise ValueError(f"nodes are network namespaces of this machine: {why}")
    steps, secret = max(10, round(seconds / pause_s)), secrets.token_hex(32)
    context = multiprocessing.get_context("fork")
    needles = {name: struct.pack("<8d", *[value] * 8) for name, value in PLANTED.items()}
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)  # torch loads much for the first optimizer: once for all
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as place, Cluster(NODES + 1) as cluster:
        folder, end = Path(place), time.monotonic() + seconds + LIMIT_S
        each = {
            rank: context.Process(target=node, args=(rank, cluster, folder, secret, steps, pause_s))
            for rank in range(-1, NODES)
        }
        for process in each.values():  # before there are threads here
            process.start()
        cables = [f"{cluster.mark}v{number}" for number in range(NODES + 1)]
        try:
            with Listener(cables, [*needles.values(), secret.encode()]) as listener:
                _wait(lambda: all((folder / f"{rank}.joined").exists() for rank in range(NODES)), each, end, folder)
                said = [bytes(words) for words in list(listener.begun.values())]
                stranger, known, astray = Attacker(seed, lambda: said), set[Any](), set[Any]()

                def attack() -> None:
                    enter(cluster.name(NODES))
                    nodes = [(rank, process) for rank, process in each.items() if rank >= 0]

                    def find() -> set[Any]:
                        found = {rank: doors(one.pid or 0) for rank, one in nodes if one.is_alive()}
                        astray.update(
                            door
                            for rank, all_of in found.items()
                            for door in all_of
                            if door[0] != cluster.address(rank)
                        )
                        return set[Any]().union(*found.values())

                    known.update(disturb(stranger, find, messages, seconds, lambda: not _all_well(each)))

                begin = time.monotonic()
                thread = threading.Thread(target=attack, name="paceline stranger", daemon=True)
                thread.start()
                thread.join(max(0.0, end - time.monotonic()))
                took_s = time.monotonic() - begin
                (folder / "enough").touch()
                for process in each.values():
                    process.join(max(0.0, end - time.monotonic()))
            codes = {rank: process.exitcode for rank, process in each.items()}
            got = _result(folder, codes, stranger.sent, took_s, known, listener, needles)
            return {
                **got,
                "astray": sorted(map(str, astray)),
                "told": secret.encode() in listener.found or _holds(folder, secret.encode()),
            }
        finally:
            for process in each.values():
                if process.is_alive():
                    process.kill()
                process.join()


def _holds(folder: Path, words: bytes) -> bool:
    return any(words in path.read_bytes() for path in folder.rglob("*") if path.is_file())


def _all_well(each: Mapping[int, BaseProcess]) -> bool:
    return not any(process.exitcode for process in each.values())


def _wait(ready: Callable[[], bool], each: Mapping[int, BaseProcess], end: float, folder: Path) -> None:
    while not ready():
        if time.monotonic() > end or not _all_well(each):
            raise ValueError(f"the nodes did not join; they said:\n{_words(folder)}")
        time.sleep(0.02)


def _words(folder: Path) -> str:
    return "".join(path.read_text()[-2000:] for path in sorted(folder.glob("*.err")))


def _result(
    folder: Path,
    codes: dict[int, int | None],
    sent: int,
    took_s: float,
    known: set[Any],
    listener: Listener,
    needles: dict[str, bytes],
) -> dict[str, Any]:
    ended = {rank: json.loads(path.read_text()) for rank in codes if (path := folder / f"{rank}.json").exists()}
    delays = {name: max(_step_s(folder / name), default=None) for name in PLANTED}
    apart = [_apart_s(folder / name) for name in PLANTED]
    return {
        "sent": sent,
        "seconds": round(took_s, 1),
        "doors": sorted(f"{address}:{port}" for address, port in known),
        "codes": {str(rank): code for rank, code in codes.items()},
        "equal": len(ended) == len(codes) and all(one == ended[-1] for one in ended.values()),
        "longest_step_s": delays,
        "longest_round_s": max(map(max, apart)) - min(map(statistics.median, apart)) if all(apart) else None,
        "regrouped": sum(e["event"] == "regroup" for name in PLANTED for e in read(folder / name)),
        "readable": {name: needle in listener.found for name, needle in needles.items()},
        "heard_bytes": listener.num_bytes,
        "said": _words(folder),
    }


def _step_s(folder: Path) -> list[float]:
    """Of all but the first, in which all that is needed for a step is made."""
    return [float(event["seconds"]) for event in read(folder) if event["event"] == "step"][1:]


def _apart_s(folder: Path) -> list[float]:
    """From the end of each step to that of the next, in which both trainings take one, and rest."""
    times = [float(event["time"]) for event in read(folder) if event["event"] == "step"][1:]
    return [later - before for before, later in itertools.pairwise(times)]


def faults(got: dict[str, Any], messages: int, most_s: float = MAX_DELAY_S) -> list[str]:
    """What should not have been."""
    longest = max((s for s in got["longest_step_s"].values() if s is not None), default=float("inf"))
    return [
        words
        for words, wrong in (
            (f"{got['sent']} of {messages} messages were sent", got["sent"] < messages),
            (f"exit codes {got['codes']}: {got['said']}", any(code != 0 for code in got["codes"].values())),
            ("the weights are not those of the undisturbed training", not got["equal"]),
            (f"{got['regrouped']} losses of a node that was not lost", got["regrouped"]),
            (f"a step took {longest:.2f} s", longest > most_s),
            (f"a round took {got['longest_round_s']} s longer than usual", (got["longest_round_s"] or 0.0) > most_s),
            (f"listens on another address than its own: {got['astray']}", got["astray"]),
            ("the secret went over the wire, or stands in a file of the run", got["told"]),
            ("the listener could not read what is not encrypted: it heard nothing", not got["readable"][PLAIN]),
            ("the listener could read what is encrypted", got["readable"][HIDDEN]),
        )
        if wrong
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--pause", type=float, default=0.1, help="seconds between two steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print what happened as one JSON object")
    asked = parser.parse_args()
    try:
        got = run(asked.messages, asked.seconds, asked.seed, asked.pause)
    except ValueError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2
    wrong = faults(got, asked.messages)
    if asked.json:
        print(json.dumps(got))
        return 0
    print(f"{got['sent']} messages in {got['seconds']} s to {len(got['doors'])} ports: {', '.join(got['doors'])}")
    print(f"longest step: {', '.join(f'{name} {s:.3f} s' for name, s in got['longest_step_s'].items())}")
    print(f"longest time from step to step, over the usual: {got['longest_round_s']:.3f} s")
    print(f"read by the listener, of {got['heard_bytes'] / 1e6:.1f} MB: {got['readable']}")
    print("\n".join(f"WRONG: {words}" for words in wrong) or "all as it should be")
    return 1 if wrong else 0


LISTENS, UNCONNECTED = "0A", "07"  # in /proc/net/tcp and /proc/net/udp
CLONE_NEWNET = 0x40000000
HELD = 40  # connections that are left open
SAY_S = 1.0
GREETING = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # how a TLS client begins

Door = tuple[str, int]

_libc = ctypes.CDLL(None, use_errno=True)


def enter(namespace: str) -> None:
    """From now on the sockets of this thread are those of another machine. Raises OSError."""
    with open(f"/run/netns/{namespace}", "rb") as place:
        if _libc.setns(place.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"no way into {namespace}")


def doors(process: int) -> set[Door]:
    """Where anything listens on the machine of that process, but for its loopback."""
    found = set()
    for kind, state in (("tcp", LISTENS), ("tcp6", LISTENS), ("udp", UNCONNECTED), ("udp6", UNCONNECTED)):
        with contextlib.suppress(OSError):  # it has ended
            for line in Path(f"/proc/{process}/net/{kind}").read_text().splitlines()[1:]:
                _, place, _, seen, *_ = line.split()
                if seen == state:
                    address, port = place.split(":")
                    found.add((_address(address), int(port, 16)))
    return {door for door in found if not door[0].startswith("127.") and door[0] != "::1"}


def _address(words: str) -> str:
    """Of what /proc writes: whole words of 32 bits, as they lie in memory."""
    numbers = b"".join(struct.pack("=I", int(words[i : i + 8], 16)) for i in range(0, len(words), 8))
    return socket.inet_ntop(socket.AF_INET6 if len(numbers) > 4 else socket.AF_INET, numbers)


class Attacker:
    """``heard()``: what others have said so far. ``sent``: messages that got through to an open port."""

    def __init__(self, seed: int, heard: Callable[[], Sequence[bytes]]):
        self._dice, self._heard, self.sent = random.Random(seed), heard, 0
        self._held: list[socket.socket] = []

    def say(self, open_doors: Sequence[Door]) -> None:
        """One message to one of them, over a connection that is closed at once, later or in the middle."""
        try:
            line = socket.create_connection(self._dice.choice(open_doors), SAY_S)
        except OSError:
            return
        self._held.append(line)
        with contextlib.suppress(OSError):
            if words := self._words():
                line.sendall(words)
        self.sent += 1
        if len(self._held) > HELD or self._dice.random() < 0.5:
            self._held.pop(self._dice.randrange(len(self._held))).close()

    def _words(self) -> bytes:
        dice, heard = self._dice, self._heard()
        recorded = dice.choice(heard) if heard else HEADER
        noise = dice.randbytes(int(10 ** dice.uniform(0, 3.5)))
        spoilt = bytearray(recorded)
        spoilt[dice.randrange(len(spoilt))] ^= 1 << dice.randrange(8)
        return dice.choice(
            (
                b"",
                noise,
                HEADER + noise,
                GREETING + noise,
                bytes(8),  # gloo takes whoever begins with a number that it waits for
                dice.randrange(64).to_bytes(8, "little") + noise,
                b"\xff" * 8,
                recorded,
                recorded,
                bytes(spoilt),
                recorded[: dice.randrange(len(recorded)) + 1],
            )
        )

    def close(self) -> None:
        for line in self._held:
            line.close()


def disturb(
    stranger: Attacker, find: Callable[[], set[Door]], count: int, seconds: float, over: Callable[[], bool]
) -> set[Door]:
    """``count`` messages, spread over that time, to whatever is open: looked for every second. Returns the doors."""
    begin, known, looked = time.monotonic(), set[Door](), 0.0
    open_doors: list[Door] = []
    try:
        while stranger.sent < count and not over():
            now = time.monotonic() - begin
            if not open_doors or now - looked > 1.0:
                open_doors, looked = sorted(find()), now
                known.update(open_doors)
            if open_doors and now >= seconds * stranger.sent / count:
                stranger.say(open_doors)
            else:
                time.sleep(0.002)
    finally:
        stranger.close()
    return known


if __name__ == "__main__":
    sys.exit(main())
