"""Checks all hosts in parallel, within ten seconds, and reports every problem before anything is started."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from paceline.launch.child_processes import ChildProcesses, kill, received
from paceline.launch.deploy.packages import lacking
from paceline.launch.doctor import host_facts
from paceline.launch.hosts import READ, TOO_OLD, Host, Way, program

POLL_S = 0.1
LIMIT_S = 8.5
SSH_FAILED = 255  # ssh's exit code if it could not connect, or the connection failed


def check(
    hosts: Sequence[Host],
    way: Way,
    paths: Sequence[str] = (),
    address: str | None = None,
    needs: Mapping[str, str] | None = None,
) -> tuple[str, int]:
    """The rendezvous endpoint: node 0's address, as ssh reached it or as given, and a port that is free there.

    ``needs``: packages, and what needs each, as `packages.needed` returns them.
    Raises ValueError with a line for each problem of each host.
    """
    own, needs = host_facts.collect(way.folder, list(paths)), needs or {}
    with ThreadPoolExecutor(len(hosts)) as pool, ChildProcesses() as children:
        queries = [pool.submit(_query, children, host, way.at(host), own, list(needs)) for host in hosts]
        while wait(queries, POLL_S).not_done:
            pass  # the timeout lets signal handlers run
        answers = [query.result() for query in queries]
    found: list[str] = []
    for host, answer in zip(hosts, answers, strict=True):
        if isinstance(answer, str):
            found.append(f"{host.name}: {answer}")
        else:
            texts = faults(own, answer, way.at(host)) + lacking(needs, answer["lacks"], way.python)
            found += [f"{host.name}: {text}" for text in texts]
    known = [answer for answer in answers if not isinstance(answer, str)]
    if way.in_slurm:  # Slurm knows its nodes by names that all of them resolve
        address = address or hosts[0].name
    if not found and not address and (text := unreachable(known)):
        found.append(f"{hosts[0].name}: {text}")
    if found:
        raise ValueError("nothing was started, because not every host can take part:\n- " + "\n- ".join(found))
    return address or known[0]["address"] or "127.0.0.1", known[0]["port"]


def _query(
    children: ChildProcesses, host: Host, way: Way, own: Mapping[str, Any], packages: Sequence[str]
) -> dict[str, Any] | str:
    """The host's `host_facts`, or the reason why there are none; ``own``: those of this machine."""
    source = Path(host_facts.__file__).read_text(encoding="utf-8")
    call = f"\nimport json\nprint()\nprint(json.dumps(collect({way.folder!a}, {list(own['paths'])!a}, {packages!a})))\n"
    message = program(f"{TOO_OLD}exec(compile({source + call!a}, 'facts', 'exec'))\n".encode())
    command, pipe = way.command(host, "-c", READ), subprocess.PIPE
    try:
        with children.start(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
            assert process.stdin
            try:
                with contextlib.suppress(OSError):  # the exit code below tells why
                    process.stdin.write(message)
                with contextlib.suppress(OSError):
                    process.stdin.close()
                output, errors = received(process, LIMIT_S)
            except TimeoutError:
                return no_answer(LIMIT_S)
            finally:
                kill(process)
    except OSError as error:
        return not_started(command[0], error)
    if process.returncode:
        return ended(host, way, process.returncode, errors)
    return _read(output, own) or (
        f"{way.python} answered {output[-80:]!r}, which is no answer of Python; name another interpreter with --python"
    )


def _read(output: str, own: Mapping[str, Any]) -> dict[str, Any] | None:
    """The answer in the last line, if it has the keys and types of ``own``; else None."""
    try:
        answer = json.loads(output.strip().splitlines()[-1])
    except (IndexError, ValueError, RecursionError):
        return None
    fits = isinstance(answer, dict) and all(isinstance(answer.get(key), type(own[key])) for key in own)
    return answer if fits else None


def not_started(command: str, error: OSError) -> str:
    if not isinstance(error, FileNotFoundError):
        return f"{command} cannot be started here: {error.strerror or error}"
    return f"there is no {command!r} on this machine; install OpenSSH's client, or name another command with --ssh"


def no_answer(limit_s: float) -> str:
    return f"no answer within {limit_s:.1f} s; is it on, and does its firewall let ssh in?"


def ended(host: Host, way: Way, code: int, errors: str) -> str:
    """Why ssh, or Python there, ended with this exit code and stderr, and the remedy."""
    last = (errors.strip() or "no output").splitlines()[-1].strip()
    if way.in_slurm:
        # after the task's own errors srun tells its exit code
        own = [line.strip() for line in errors.splitlines() if line.strip() and not line.startswith("srun: ")]
        if not own:
            return f"srun could not start a task there ({last}); is it in this allocation, and has that not ended?"
        last = own[-1]
    if code == SSH_FAILED and not way.in_slurm:
        return _why(host, errors, last)
    if code == 1 and last.startswith("Python "):
        return f"{way.python} there is {last}, and 3.10 or newer is needed; name another with --python"
    return (
        f"{way.python} did not run there (exit code {code}: {last}); install Python at that path, or name the one to "
        f"use with --python"
    )


def _why(host: Host, errors: str, last: str) -> str:
    """What ssh's error message means, and the remedy."""
    causes = {
        "IDENTIFICATION HAS CHANGED": "its host key is not the one in known_hosts: another machine answers, or it "
        f"was reinstalled; if you are sure that it is the right one: ssh-keygen -R {host.name}, then connect by hand",
        "Host key verification failed": f"its host key is not known here; connect once by hand and compare it: ssh "
        f"{host.target}",
        "Permission denied": _denied(host, last.rpartition(": ")[2]),
        "Could not resolve": f"no machine of that name is known here ({last}); check the name, or give it a "
        f"HostName in ~/.ssh/config",
        "Connection refused": f"no ssh server listens there ({last}); start sshd, or set its Port in ~/.ssh/config",
        "timed out": f"no answer ({last}); is it on, and does its firewall let ssh in?",
        "No route to host": f"there is no route to it ({last}); check the name and the network",
        "unreachable": f"there is no route to it ({last}); check the name and the network",
    }
    return next((text for sign, text in causes.items() if sign in errors), f"ssh could not reach it: {last}")


def _denied(host: Host, accepted: str) -> str:
    """``accepted``: the methods that the host accepts, as in "Permission denied (publickey,password)."."""
    asks = "password" in accepted or "keyboard-interactive" in accepted
    typed = ", and a password cannot be typed, since ssh runs without a terminal (BatchMode)" if asks else ""
    remedy = f"install your public key there: ssh-copy-id {host.target}"
    if asks and "publickey" not in accepted:
        what = f"it asks for a password ({accepted}){typed}"
        return f"{what}; set PubkeyAuthentication yes in its sshd_config, and {remedy}"
    return f"it accepts none of your keys ({accepted}){typed}; {remedy}; a key with a passphrase needs ssh-add first"


def public(version: str | None) -> str | None:
    """The version without its local part (+cpu, +cu124): builds for CPUs and for GPUs train together."""
    return version and version.partition("+")[0]


def faults(own: Mapping[str, Any], other: Mapping[str, Any], way: Way) -> list[str]:
    """The differences that prevent a run; ``own`` and ``other``: `host_facts` of this machine and of a host."""
    found = []
    if not other["folder"]:
        found.append(
            f"the working directory {way.folder} is not there; make it there, start from one that every host has, or "
            f"add --send"
        )
    else:
        for path, own_hash in own["paths"].items():
            theirs = other["paths"].get(path)
            if theirs is None:
                found.append(f"{path} is not in {way.folder} there; copy it there, or add --send")
            elif theirs.startswith("not readable"):
                found.append(f"{path} is {theirs} there; let {way.python} read it, or add --send")
            elif own_hash not in (None, theirs):
                found.append(f"{path} there differs from the one here; copy it there again, or add --send")
    for name, installed in own["versions"].items():
        their_version, own_version = public(other["versions"].get(name)), public(installed)
        wanted = f"{name}=={own_version}" if own_version else name
        remedy = f"install it there: {way.python} -m pip install {wanted}; or name another interpreter with --python"
        if their_version is None and own_version:
            found.append(f"{name} is not installed for {way.python} there, and here it is {own_version}; {remedy}")
        elif their_version != own_version:
            found.append(f"{name} is {their_version} there and {own_version or 'not installed'} here; {remedy}")
    return found


def unreachable(known: Sequence[Mapping[str, Any]]) -> str | None:
    """Why the other hosts cannot reach node 0's address, as far as the addresses show; None: they may reach it."""
    first, loopback = known[0]["address"], [re.match(r"127\.|::1$", answer["address"]) for answer in known]
    if len(known) == 1:
        return None
    if not first:
        return "the address at which ssh reached it is unknown (SSH_CONNECTION is not set); give it with --address"
    if first.startswith("fe80:"):
        return f"it was reached at {first}, a link-local address; give another of its addresses with --address"
    if loopback[0] and not all(loopback):
        return f"it was reached at {first}, a loopback address; give its address in the network with --address"
    return None
