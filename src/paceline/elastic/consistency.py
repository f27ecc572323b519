"""Consistency check: all nodes were given the same job. Made when they start, and for each joining node."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
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
from paceline.engine.node.several_optimizers import kind_of
from paceline.job import Job
from paceline.registry import says

SAMPLES, PARTS = "numbers of samples", "parts"


def facts(job: Job, engine: contract.Engine, exchange: contract.Exchange, codec: contract.Codec) -> dict[str, Any]:
    """What all nodes must be given alike."""
    shapes = [(bucket.names, bucket.shapes) for bucket in engine.buckets]
    groups = [_plain(group) for group in job.optimizer.param_groups]
    return {
        "batch_size": job.batch_size,
        "seed": job.seed,
        "clip": job.clip,
        "shares": job.shares,
        "batch_norm": job.batch_norm,
        "buffers": job.buffers,
        "optimizer": (kind_of(job.optimizer), groups),
        "scheduler": type(job.scheduler).__name__,
        "loss scaling": engine.precision == "fp16",
        "exchange": _described(exchange),
        "codec": (_described(codec), codec.wire),
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
    """Raises ValueError, on every node, that names what the nodes were given differently."""
    given = facts(job, engine, exchange, codec)
    given["numbers of the scheduler"] = _plain_values(job.scheduler.state_dict()) if job.scheduler else None
    mine = b"".join(_digest(fact) for fact in given.values())
    gathered = link.all_gather(torch.tensor(list(mine), dtype=torch.uint8), "comparing jobs", even=True).wait()
    for i, (name, fact) in enumerate(given.items()):
        hashes = [bytes(part[32 * i : 32 * (i + 1)].tolist()) for part in gathered]
        if len(set(hashes)) > 1:
            names = [f"rank {rank} on {host}" for rank, host in enumerate(link.hosts)]
            others = ", ".join(names[rank] for rank in range(link.size) if hashes[rank] != hashes[link.rank])
            raise ValueError(
                f"join: the nodes were given different {name}: {names[link.rank]} has {str(fact)[:200]}, other "
                f"than {others}; start every node with the same script, arguments, data and versions"
            )


def data_facts(dataset: Any) -> dict[str, Any]:
    """What must be alike on all nodes about their samples: how many; of a folder, the classes and images; of a part
    (`Subset`, as ``random_split`` draws it), which samples."""
    parts = []
    if isinstance(dataset, DataLoader):
        parts, dataset = [getattr(dataset.sampler, "indices", None)], dataset.dataset
    while isinstance(dataset, Subset):
        parts, dataset = [*parts, dataset.indices], dataset.dataset
    drawn = [list(map(str, indices)) for indices in parts if indices is not None]
    mine: dict[str, Any] = {SAMPLES: _length(dataset)}
    mine |= dataset.digests() if isinstance(dataset, EncodedImages) else {}
    return mine | ({PARTS: _digest(drawn).hex()} if drawn else {})


def unlike(mine: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    """How these differ, and what to do; empty where they do not."""
    for name, value in mine.items():
        found = {str(other[name]) for other in others if other.get(name) is not None} | {str(value)}
        if len(found) < 2 or value is None:
            continue
        if name == PARTS:
            return (
                "the processes were given different parts of the dataset, so that one would train on what another "
                "tests: split it alike everywhere, as by random_split(..., generator=torch.Generator().manual_seed(0))"
            )
        counts = f" ({', '.join(sorted(found, key=int))})" if name == SAMPLES else ""
        return (
            f"the processes were given datasets with different {name}{counts}: give every machine the same files, as "
            f"by --send --data, since samples are assigned by their numbers"
        )
    return ""


def compare_data(control: transport.Control, mine: Mapping[str, Any]) -> None:
    """Every process must call it, with its `data_facts`. Raises ValueError, in all, where they differ."""
    reports = [json.loads(text) for text in control.all_gather(json.dumps(mine).encode()) if text]
    # each report is compared, since this process may lack a fact that another has
    if why := next(filter(None, (unlike(one, reports) for one in (mine, *reports))), ""):
        raise ValueError(why)


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:  # a stream need not have a length, and may raise anything
        return None


@functools.cache
def code() -> str:
    """A digest of this package's files: if they differ, nodes may give the same message different meanings."""
    digest, home = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(home.rglob("*.py")):
        digest.update(path.relative_to(home).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def script() -> str:
    """A digest of the file that Python was started with, if any."""
    path = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "")
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""


def digests(facts: dict[str, Any], precision: str) -> dict[str, str]:
    """What a joining node reports of its job: more than nodes that start together compare."""
    # nodes that start together have compared the collective, and cannot connect over unlike links
    names = {name: os.environ.get(name, "") for name in ("PACELINE_COLLECTIVE", "PACELINE_LINK")}
    names["PACELINE_LINK"] = names["PACELINE_LINK"] if says("link", names["PACELINE_LINK"], "by_all") else ""
    return {name: _digest(fact).hex()[:32] for name, fact in {**facts, "precision": precision, **names}.items()}


def _digest(fact: Any) -> bytes:
    return hashlib.sha256(repr(fact).encode()).digest()


def common_precision(link: transport.Link, engine: contract.Engine) -> str:
    """The 16-bit type in which every node computes, else empty: factors sent in it lose nothing."""
    precision = engine.precision
    mine = torch.tensor([list(PRECISION).index(precision)], dtype=torch.uint8)
    gathered = link.all_gather(mine, "comparing precisions", even=True).wait()
    alike = len({int(each) for each in gathered}) == 1
    return precision if alike and precision != "fp32" else ""


def _described(method: contract.Codec | contract.Exchange) -> tuple[Any, ...]:
    """The method with its parameters, and those of the codecs that it has. Addresses in memory differ everywhere."""
    values = {name: _described(v) if isinstance(v, contract.Codec) else v for name, v in vars(method).items()}
    texts = sorted((name, re.sub(r" at 0x[0-9a-f]+", "", str(v))) for name, v in values.items())
    return type(method).__module__, type(method).__qualname__, texts


def _plain_values(value: Any) -> Any:
    """Numbers and strings, at any depth; the text of other values differs in each process."""
    if isinstance(value, dict):
        return sorted((str(key), _plain_values(each)) for key, each in value.items() if key != "_step_count")
    if isinstance(value, list | tuple):
        return [_plain_values(each) for each in value]
    return value if isinstance(value, int | float | str) and not isinstance(value, bool) else None


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """The options of an optimizer's group that are alike on all nodes, and have the same text."""
    plain = {key: value for key, value in group.items() if isinstance(value, bool | int | float | tuple)}
    return {key: value for key, value in plain.items() if key not in OWN}
