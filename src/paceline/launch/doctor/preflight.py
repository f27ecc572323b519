"""Checks all hosts at once, within ten seconds, and reports every problem before anything is started."""

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
LOST = 255  # how ssh ends when it could not do its part


def check(
    hosts: Sequence[Host],
    way: Way,
    paths: Sequence[str] = (),
    address: str | None = None,
    needs: Mapping[str, str] | None = None,
) -> tuple[str, int]:
    """Where the nodes will meet: node 0's address, as ssh reached it or as given, and a port that is free there.

    ``needs``: packages, and who needs each, as `packages.needed` gives them.
    Raises ValueError with a line for each fault of each host.
    """
    mine, needs = host_facts.tell(way.folder, list(paths)), needs or {}
    with ThreadPoolExecutor(len(hosts)) as pool, ChildProcesses() as calls:
        asked = [pool.submit(_ask, calls, host, way.at(host), mine, list(needs)) for host in hosts]
        while wait(asked, POLL_S).not_done:
            pass  # a signal that comes just before a wait is seen after it
        answers = [each.result() for each in asked]
    found: list[str] = []
    for host, answer in zip(hosts, answers, strict=True):
        if isinstance(answer, str):
            found.append(f"{host.name}: {answer}")
        else:
            texts = faults(mine, answer, way.at(host)) + lacking(needs, answer["lacks"], way.python)
            found += [f"{host.name}: {text}" for text in texts]
    known = [answer for answer in answers if not isinstance(answer, str)]
    if not found and not address and (text := unreachable(known)):
        found.append(f"{hosts[0].name}: {text}")
    if found:
        raise ValueError("nothing was started, because not every host can take part:\n- " + "\n- ".join(found))
    return address or known[0]["address"] or "127.0.0.1", known[0]["port"]


def _ask(
    calls: ChildProcesses, host: Host, way: Way, mine: Mapping[str, Any], packages: Sequence[str]
) -> dict[str, Any] | str:
    """What the host says, or why it does not; ``mine``: what this one says."""
    source = Path(host_facts.__file__).read_text(encoding="utf-8")
    tell = f"\nimport json\nprint()\nprint(json.dumps(tell({way.folder!a}, {list(mine['paths'])!a}, {packages!a})))\n"
    words = program(f"{TOO_OLD}exec(compile({source + tell!a}, 'facts', 'exec'))\n".encode())
    command, pipe = way.command(host, "-c", READ), subprocess.PIPE
    try:
        with calls.start(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
            assert process.stdin
            try:
                with contextlib.suppress(OSError):  # its end is seen below
                    process.stdin.write(words)
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
    return _read(output, mine) or (
        f"{way.python} answered {output[-80:]!r}, which no Python does; name another with --python"
    )


def _read(output: str, mine: Mapping[str, Any]) -> dict[str, Any] | None:
    """An answer like ``mine``, in the last line; None where it is none."""
    try:
        answer = json.loads(output.strip().splitlines()[-1])
    except (IndexError, ValueError, RecursionError):
        return None
    fits = isinstance(answer, dict) and all(isinstance(answer.get(key), type(mine[key])) for key in mine)
    return answer if fits else None


def not_started(command: str, error: OSError) -> str:
    if not isinstance(error, FileNotFoundError):
        return f"{command} cannot be started here: {error.strerror or error}"
    return f"there is no {command!r} here to reach it with; install OpenSSH's client, or name another with --ssh"


def no_answer(limit_s: float) -> str:
    return f"no answer within {limit_s:.1f} s; is it on, and does its firewall let ssh in?"


def ended(host: Host, way: Way, code: int, errors: str) -> str:
    """Why ssh, or Python there, ended with a code and these last words, and the remedy."""
    last = (errors.strip() or "nothing was said").splitlines()[-1].strip()
    if code == LOST:
        return _why(host, errors, last)
    if code == 1 and last.startswith("Python "):
        return f"{way.python} there is {last}, and 3.10 or newer is needed; name another with --python"
    return (
        f"{way.python} did not run there (exit code {code}: {last}); install Python at that path, or name the one to "
        f"use with --python"
    )


def _why(host: Host, errors: str, last: str) -> str:
    """What ssh's complaint means, and the remedy."""
    causes = {
        "IDENTIFICATION HAS CHANGED": "its host key is not the one that is known here: another machine answers, or it "
        f"was set up anew; if you are sure that it is the right one: ssh-keygen -R {host.name}, then connect by hand",
        "Host key verification failed": f"its host key is not known here; connect once by hand and compare it: ssh "
        f"{host.target}",
        "Permission denied": _denied(host, last.rpartition(": ")[2]),
        "Could not resolve": f"no machine of that name is known here ({last}); check the name, or give it a "
        f"HostName in ~/.ssh/config",
        "Connection refused": f"nothing takes ssh connections there ({last}); start sshd, or set its Port in "
        f"~/.ssh/config",
        "timed out": f"no answer ({last}); is it on, and does its firewall let ssh in?",
        "No route to host": f"no way leads there ({last}); check the name and the network",
        "unreachable": f"no way leads there ({last}); check the name and the network",
    }
    return next((said for sign, said in causes.items() if sign in errors), f"ssh could not reach it: {last}")


def _denied(host: Host, said: str) -> str:
    """``said``: with what it would have been content, as in "Permission denied (publickey,password)."."""
    asks = "password" in said or "keyboard-interactive" in said
    typed = ", and a password cannot be typed, since ssh is asked without a terminal (BatchMode)" if asks else ""
    remedy = f"let it know a key: ssh-copy-id {host.target}"
    if asks and "publickey" not in said:
        return f"it asks for a password ({said}){typed}; set PubkeyAuthentication yes in its sshd_config, and {remedy}"
    return f"it accepts none of your keys ({said}){typed}; {remedy}; a key with a passphrase needs ssh-add first"


def public(version: str | None) -> str | None:
    """Without what tells builds apart: those for a CPU and for GPUs train together."""
    return version and version.partition("+")[0]


def faults(mine: Mapping[str, Any], theirs: Mapping[str, Any], way: Way) -> list[str]:
    """What differs there and must not; ``mine`` and ``theirs`` as `facts.tell` gives them."""
    found = []
    if not theirs["folder"]:
        found.append(
            f"the working directory {way.folder} is not there; make it there, start from one that every host has, or "
            f"add --send"
        )
    else:
        for path, content in mine["paths"].items():
            there = theirs["paths"].get(path)
            if there is None:
                found.append(f"{path} is not in {way.folder} there; copy it there, or add --send")
            elif there.startswith("not readable"):
                found.append(f"{path} is {there} there; let {way.python} read it, or add --send")
            elif content not in (None, there):
                found.append(f"{path} there is another than here; copy it there again, or add --send")
    for name, found_here in mine["versions"].items():
        version, here = public(theirs["versions"].get(name)), public(found_here)
        wanted = f"{name}=={here}" if here else name
        remedy = f"install it there: {way.python} -m pip install {wanted}; or name another interpreter with --python"
        if version is None and here:
            found.append(f"{name} is not installed for {way.python} there, and here it is {here}; {remedy}")
        elif version != here:
            found.append(f"{name} is {version} there and {here or 'not installed'} here; {remedy}")
    return found


def unreachable(known: Sequence[Mapping[str, Any]]) -> str | None:
    """Why the others could not meet at node 0's address, where that can be told from here."""
    first, loopback = known[0]["address"], [re.match(r"127\.|::1$", answer["address"]) for answer in known]
    if len(known) == 1:
        return None
    if not first:
        return "nothing there says at which address it was reached (SSH_CONNECTION is not set); give it with --address"
    if first.startswith("fe80:"):
        return f"it was reached at {first}, an address of one cable alone; give another of its with --address"
    if loopback[0] and not all(loopback):
        return f"it was reached at {first}, where the other hosts find only themselves; give its address with --address"
    return None
