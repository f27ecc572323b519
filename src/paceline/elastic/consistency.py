"""Consistency check: all nodes were given the same job. Asked when they start, and of each joining node."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset

from paceline import contract, transport
from paceline.data.encoded_images import EncodedImages
from paceline.engine.checks.optimizer_options import OWN
from paceline.engine.compute.precision import PRECISION
from paceline.job import Job
from paceline.registry import says

SAMPLES, DRAWN = "numbers of samples", "parts"


def facts(job: Job, engine: contract.Engine, exchange: contract.Exchange, codec: contract.Codec) -> dict[str, Any]:
    """What all nodes must have been given alike."""
    shapes = [(bucket.names, bucket.shapes) for bucket in engine.buckets]
    groups = [_plain(group) for group in job.optimizer.param_groups]
    return {
        "batch_size": job.batch_size,
        "seed": job.seed,
        "clip": job.clip,
        "shares": job.shares,
        "batch_norm": job.batch_norm,
        "buffers": job.buffers,
        "optimizer": (type(job.optimizer).__name__, groups),
        "scheduler": type(job.scheduler).__name__,
        "loss scaling": engine.precision == "fp16",
        "exchange": (type(exchange).__module__, sorted(map(str, vars(exchange).items()))),
        "codec": _words(codec),
        "virtual shares": (engine.num_virtual_shards, torch.get_num_threads() if engine.num_virtual_shards else 0),
        "model": [str(shapes), [str(weight.dtype) for weight in engine.weights], len(engine.buffers)],
        "layers to send as factors (none of a compiled model)": [s.names[0] for s in engine.buckets if s.linear],
        "torch": torch.__version__.partition("+")[0],  # builds for a CPU and for GPUs train together
        "files of paceline": code(),
        "script": script(),
    }


def compare(
    link: transport.Link, job: Job, engine: contract.Engine, exchange: contract.Exchange, codec: contract.Codec
) -> None:
    """Raises ValueError, on every node, naming what the nodes were given differently."""
    given = facts(job, engine, exchange, codec)
    given["numbers of the scheduler"] = _plain_values(job.scheduler.state_dict()) if job.scheduler else None
    mine = b"".join(_digest(fact) for fact in given.values())
    everyone = link.all_gather(torch.tensor(list(mine), dtype=torch.uint8), "comparing jobs", even=True).wait()
    for i, (name, fact) in enumerate(given.items()):
        words = [bytes(part[32 * i : 32 * (i + 1)].tolist()) for part in everyone]
        if len(set(words)) > 1:
            who = [f"rank {rank} on {host}" for rank, host in enumerate(link.hosts)]
            others = ", ".join(who[rank] for rank in range(link.size) if words[rank] != words[link.rank])
            raise ValueError(
                f"join: the nodes were given different {name}: {who[link.rank]} has {str(fact)[:200]}, other "
                f"than {others}; start every node with the same script, arguments, data and versions"
            )


def data_facts(dataset: Any) -> dict[str, Any]:
    """What all must have alike of their samples: how many, of a folder the classes and images, and of a part
    (`Subset`, as ``random_split`` draws it) which ones."""
    parts = []
    if isinstance(dataset, DataLoader):
        parts, dataset = [getattr(dataset.sampler, "indices", None)], dataset.dataset
    while isinstance(dataset, Subset):
        parts, dataset = [*parts, dataset.indices], dataset.dataset
    drawn = [list(map(str, indices)) for indices in parts if indices is not None]
    mine: dict[str, Any] = {SAMPLES: _length(dataset)}
    mine |= dataset.digests() if isinstance(dataset, EncodedImages) else {}
    return mine | ({DRAWN: _digest(drawn).hex()} if drawn else {})


def unlike(mine: Mapping[str, Any], everyone: Sequence[Mapping[str, Any]]) -> str:
    """How these differ, and what to do; empty where they do not."""
    for name, value in mine.items():
        found = {str(other[name]) for other in everyone if other.get(name) is not None} | {str(value)}
        if len(found) < 2 or value is None:
            continue
        if name == DRAWN:
            return (
                "the processes were given different parts of the dataset, so that one would train on what another "
                "tests: draw them alike everywhere, as by random_split(..., generator=torch.Generator().manual_seed(0))"
            )
        counts = f" ({', '.join(sorted(found, key=int))})" if name == SAMPLES else ""
        return (
            f"the processes were given datasets with different {name}{counts}: give every machine the same files, as "
            f"by --send --data, since each sample is dealt by its number"
        )
    return ""


def compare_data(control: transport.Control, mine: Mapping[str, Any]) -> None:
    """Every process must call it, with its `data_facts`. Raises ValueError, in all, where they differ."""
    everyone = [json.loads(words) for words in control.all_gather(json.dumps(mine).encode()) if words]
    # each looks at what somebody says, also where it has nothing of the kind
    if why := next(filter(None, (unlike(one, everyone) for one in (mine, *everyone))), ""):
        raise ValueError(why)


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:  # a stream need not know it, and says so as it likes
        return None


@functools.cache
def code() -> str:
    """Of this package's own files: where they differ, nodes may mean different things by the same words."""
    digest, home = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(home.rglob("*.py")):
        digest.update(path.relative_to(home).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def script() -> str:
    """Of the file that Python was started with, if any."""
    path = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "")
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""


def digests(facts: dict[str, Any], thin: torch.dtype | None) -> dict[str, str]:
    """What a node that comes late says of itself: more than those who begin together tell each other."""
    # the first, those who begin together have compared; over another link than theirs nobody is heard
    words = {name: os.environ.get(name, "") for name in ("PACELINE_COLLECTIVE", "PACELINE_LINK")}
    words["PACELINE_LINK"] = words["PACELINE_LINK"] if says("link", words["PACELINE_LINK"], "by_all") else ""
    return {name: _digest(fact).hex()[:32] for name, fact in {**facts, "precision": str(thin), **words}.items()}


def _digest(fact: Any) -> bytes:
    return hashlib.sha256(repr(fact).encode()).digest()


def thin(link: transport.Link, engine: contract.Engine) -> torch.dtype | None:
    """The 16-bit type in which every node computes, if there is one: factors lose nothing by it on the wire."""
    precision = engine.precision
    mine = torch.tensor([list(PRECISION).index(precision)], dtype=torch.uint8)
    everyone = link.all_gather(mine, "comparing precisions", even=True).wait()
    alike = len({int(each) for each in everyone}) == 1
    return PRECISION[precision] if alike and precision != "fp32" else None


def _words(codec: contract.Codec) -> tuple[Any, ...]:
    """With all that it was given, and those that it wraps."""
    said = {name: _words(value) if isinstance(value, contract.Codec) else value for name, value in vars(codec).items()}
    return type(codec).__module__, codec.wire, sorted((name, str(value)) for name, value in said.items())


def _plain_values(value: Any) -> Any:
    """Numbers and words, as deep as they lie; of other things nothing is the same twice."""
    if isinstance(value, dict):
        return sorted((str(key), _plain_values(each)) for key, each in value.items() if key != "_step_count")
    if isinstance(value, list | tuple):
        return [_plain_values(each) for each in value]
    return value if isinstance(value, int | float | str) and not isinstance(value, bool) else None


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """What of an optimizer's group is alike on all nodes, and written alike."""
    plain = {key: value for key, value in group.items() if isinstance(value, bool | int | float | tuple)}
    return {key: value for key, value in plain.items() if key not in OWN}
