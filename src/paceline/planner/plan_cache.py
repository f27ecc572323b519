"""Plan cache on disk: finds plans by the fingerprint of the job, or by the command that trains it.

    plans/FINGERPRINT-MACHINE-VERSIONS.toml    by `join`'s arguments, fidelity and input shapes; needs the model
    plans/jobs/KEY.json                        by command; needs neither the model nor torch
    plans/hosts/KEY.toml                       for several machines: by their names, the command and fidelity

A stale entry (another torch, machine, script or model) is reported and not used. A corrupt entry is ignored. Files are
written atomically, so several planners may run at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paceline.launch.machine import Machine, survey
from paceline.planner.plan_file import Plan
from paceline.report.record import write_whole

if TYPE_CHECKING:
    import torch


class Trained(Protocol):
    """The arguments of `join` on which the cost of a step depends."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    batch_size: int
    clip: float | None
    accumulate: int
    precision: str | None
    batch_norm: str


# the settings of `paceline train` on which the cost of a step depends
STEP = (
    *("model", "data", "batch_size", "optimizer", "accumulate", "precision", "batch_norm"),
    *("device", "codec", "exchange", "clip", "momentum"),
)
LINK = "PACELINE_LINK", "PACELINE_ENCRYPT", "PACELINE_COLLECTIVE", "PACELINE_OVERLAP"  # how and when nodes communicate
BY_ROW = "fused", "foreach"  # optimizer options that a configuration's own options change


def cache() -> Path:
    """The user's cache folder for this package. Raises OSError if there is no home folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"
    except RuntimeError as error:
        raise OSError(f"{error}; set HOME or XDG_CACHE_HOME") from None


def folder() -> Path:
    """The folder of the plans, readable by its owner only."""
    plans = cache() / "plans"
    plans.mkdir(parents=True, exist_ok=True, mode=0o700)
    plans.chmod(0o700)
    return plans


def versions() -> dict[str, str]:
    """Versions of Python, paceline and torch, without importing them."""
    found = {"python": platform.python_version()}
    for name in ("paceline", "torch"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found


def fingerprint(job: Trained, fidelity: str, inputs: Sequence[Any] | None = None) -> str:
    """A hash that is equal for jobs that can share a plan: it covers shapes and types, not values.

    ``inputs``: the shapes of a sample (`layers.shapes`), unknown before the first batch; their hash follows a dash.
    """
    from paceline.engine.node.several_optimizers import kind_of  # which imports torch

    parameters = [
        (name, tuple(p.shape), str(p.dtype), str(p.device), p.requires_grad) for name, p in job.model.named_parameters()
    ]
    modules = [type(module).__name__ for module in job.model.modules()]
    options = [
        sorted(
            (key, value)
            for key, value in group.items()
            if (isinstance(value, bool) and key not in BY_ROW) or key in ("momentum", "dampening")
        )
        for group in job.optimizer.param_groups
    ]
    how = job.batch_size, job.clip is not None, job.accumulate, job.precision, job.batch_norm
    mark = _hash(parameters, modules, kind_of(job.optimizer), options, how, fidelity)
    return mark if inputs is None else f"{mark}-{_hash(list(inputs))}"


def by_fingerprint(mark: str, machine: Machine) -> Plan | None:
    try:
        return Plan.read(_path(mark, machine))
    except (ValueError, OSError):
        return None


def of_job(job: Trained, fidelity: str, command: Sequence[str]) -> Plan | None:
    """The plan of a job whose input shapes are still unknown. If plans for different input shapes chose different
    configurations, only the plan made for this command is returned, if any."""
    machine, found = survey(), []
    with contextlib.suppress(OSError):
        place = _path(f"{fingerprint(job, fidelity)}-*", machine)
        for path in sorted(place.parent.glob(place.name)):
            with contextlib.suppress(ValueError):
                found.append(Plan.read(path))
    if len({plan.chosen for plan in found}) < 2:
        return found[-1] if found else None
    own, _ = cached(command, fidelity, machine)
    return own if own in found else None


def cached(command: Sequence[str], fidelity: str, machine: Machine | None = None) -> tuple[Plan | None, str]:
    """The plan made for this command; or None, with the reason if a plan exists but is stale."""
    machine = machine or survey()
    try:
        entry = json.loads(_entry(command, fidelity).read_text())
        stored = {name: entry[name] for name in ("script", "versions", "machine", "fingerprint")}
    except (OSError, ValueError, KeyError, TypeError):
        return None, ""
    current = versions()
    if stored["versions"] != current:
        old = stored["versions"] if isinstance(stored["versions"], dict) else {}
        changed = [f"{key} {old.get(key)} is now {new}" for key, new in current.items() if old.get(key) != new]
        return None, f"the cached plan is stale: {', '.join(changed)}"
    if stored["machine"] != machine.digest():
        return None, "the cached plan is stale: it was made on another machine, or with other cores or memory"
    if stored["script"] != _script(command):
        return None, "the cached plan is stale: the script has changed"
    return by_fingerprint(str(stored["fingerprint"]), machine), ""


def store(plan: Plan, command: Sequence[str], machine: Machine) -> None:
    """Ignores a full or read-only disk: planning works without a cache."""
    entry = {
        "command": list(command),
        "script": _script(command),
        "versions": versions(),
        "machine": machine.digest(),
        "fingerprint": plan.fingerprint,
    }
    with contextlib.suppress(OSError):
        write_whole(_path(plan.fingerprint, machine), plan.to_toml())
        write_whole(_entry(command, plan.fidelity), json.dumps(entry))


def store_over(plan: Plan, hosts: Sequence[str], command: Sequence[str]) -> None:
    """Stores a plan over several machines, for `cached_over`."""
    with contextlib.suppress(OSError):
        write_whole(_path_over(hosts, command, plan.fidelity), plan.to_toml())


def cached_over(hosts: Sequence[str], command: Sequence[str], fidelity: str) -> Plan | None:
    """The plan made for these hosts, this command and fidelity by the same versions; else None."""
    try:
        plan = Plan.read(_path_over(hosts, command, fidelity))
    except (ValueError, OSError):
        return None
    return plan if plan.versions == versions() else None


def _path_over(hosts: Sequence[str], command: Sequence[str], fidelity: str) -> Path:
    """Keyed by the settings that a step depends on: epochs or learning rate do not change a plan."""
    arguments = list(command)
    if arguments[:2] == ["-m", "paceline.train.run"] and len(arguments) > 2:
        settings = json.loads(arguments[2])
        arguments[2] = json.dumps({name: settings[name] for name in STEP if name in settings})
    sent = [os.environ.get(name, "") for name in LINK]
    return folder() / "hosts" / f"{_hash(sorted(hosts), arguments, fidelity, _script(command), os.getcwd(), sent)}.toml"


def promise(plan: Plan, command: Sequence[str]) -> dict[str, str]:
    """Environment for processes that start with a cached plan, so that they can `confirm` it."""
    try:
        entry = str(_entry(command, plan.fidelity))
    except OSError:
        return {}
    return {"PACELINE_PROMISE": json.dumps([plan.fingerprint, plan.fidelity, entry])}


def confirm(job: Trained) -> str:
    """Checks the plan of PACELINE_PROMISE against the job: "" if it fits; else deletes it and returns a message."""
    promised = os.environ.get("PACELINE_PROMISE")
    if not promised:
        return ""
    mark, fidelity, entry = json.loads(promised)
    if mark.partition("-")[0] == fingerprint(job, fidelity):
        return ""
    with contextlib.suppress(OSError):
        Path(entry).unlink(missing_ok=True)
    return "the cached plan is stale: it was made for another model, optimizer, batch size, precision or accumulation"


def _path(mark: str, machine: Machine) -> Path:
    return folder() / f"{mark}-{machine.digest()}-{_hash(versions())}.toml"


def _entry(command: Sequence[str], fidelity: str) -> Path:
    """One entry per host, since machines of different hardware may share a home folder."""
    return folder() / "jobs" / f"{_hash(list(command), os.getcwd(), fidelity, platform.node())}.json"


def _script(command: Sequence[str]) -> str:
    """A hash of the script's file; empty if the command does not run a single file."""
    path = Path(command[0]) if command else Path()
    if command and command[0] == "-m" and len(command) > 1:
        path = Path(*command[1].split(".")).with_suffix(".py")
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def _hash(*facts: Any) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
