"""Diagnoses problems from what hosts reported and what passed between them, each with its remedy, worst first."""

from __future__ import annotations

import errno
import ipaddress
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.launch.doctor.preflight import faults, unreachable
from paceline.launch.hosts import Way
from paceline.link.net.route import is_loopback

IN_THE_WAY, SLOW, NOTED = range(3)
GIB = 1 << 30
SKEW_S = 1.0
FILES = 1024
HALF = 0.5  # of what an interface promises, of the other direction, of the other pairs

Told = Mapping[str, Any]


@dataclass(frozen=True)
class Finding:
    """``weight``: IN_THE_WAY of a run, makes it SLOW or endangers it, or is merely NOTED."""

    weight: int
    who: str
    what: str

    def __str__(self) -> str:
        return f"{self.who}: {self.what}"


def diagnose(mine: Told, hosts: Mapping[str, Told], pairs: Sequence[Told], way: Way) -> list[Finding]:
    """``mine``: `host_facts.tell` here. ``hosts``: what each reported, or its ``fault``; the nodes meet at the first.

    ``pairs``: what passed ``from`` one ``to`` another.
    """
    found = []
    for name, told in hosts.items():
        if "fault" in told:
            found.append(Finding(IN_THE_WAY, name, told["fault"]))
        else:
            found += [Finding(IN_THE_WAY, name, text) for text in _in_the_way(mine, told, way)]
            found += [Finding(weight, name, text) for weight, text in _of_one(told)]
    well = {name: told for name, told in hosts.items() if "fault" not in told}
    found += meeting(well)
    found += _ways(well, pairs)
    found += _speeds(well, pairs)
    found += [Finding(NOTED, "all", text) for text in _differences(well)]
    return sorted(found, key=lambda finding: finding.weight)


def _in_the_way(mine: Told, told: Told, way: Way) -> Iterator[str]:
    yield from faults(mine, told, way)
    software = told.get("software", {})
    if all(told["versions"].values()) and "error" in software:
        yield f"`import torch, paceline` fails there: {software['error']}; install both anew for {way.python}"
    place = told.get("place", {})
    if "error" in place:
        yield place["error"]
    elif "refused" in place:
        if place["errno"] == errno.EADDRINUSE:
            yield (
                f"port {place['asked_port']} is taken at {place['address']} (`ss -ltnp` names by whom); end that, or "
                f"meet at another: --port, MASTER_PORT"
            )
        else:
            yield f"it cannot listen at {place['address']} ({place['refused']}); check --address"


def _of_one(told: Told) -> Iterator[tuple[int, str]]:
    own = told["own_name"]
    name, address = own["name"], own.get("address", "")
    if address and is_loopback(address) and name != "localhost":
        outside = [one for card in told["cards"].values() for one in card["addresses"] if not is_loopback(one)]
        better = f", such as {outside[0]}" if outside else ""
        yield (
            SLOW,
            f"its own name {name!r} resolves to loopback ({address}): with MASTER_ADDR={name} other machines would "
            f"look for it at themselves; give the name its address in the network{better}, in /etc/hosts there",
        )
    elif not address:
        yield SLOW, f"its own name {name!r} does not resolve ({own['error']}); give it an address in /etc/hosts there"
    if abs(skew_s := told.get("skew_s", 0.0)) > SKEW_S + told.get("skew_error_s", 0.0):
        yield SLOW, f"its clock is {skew_s:+.1f} s from this one, so records disagree; there: timedatectl set-ntp true"
    if 0 <= told["open_files"] < FILES:
        yield SLOW, f"ulimit -n is {told['open_files']}: a run's connections and files may not fit; raise nofile there"
    if (shared := told["shared_bytes"]) is None or shared < GIB:
        said = "no /dev/shm" if shared is None else f"{shared / GIB:.2f} GiB free in /dev/shm"
        yield SLOW, f"{said}: DataLoader processes then send rows through pipes; a container needs --shm-size 2g"
    if (disk := told["disk_bytes"]) is not None and disk < 2 * GIB:
        yield SLOW, f"{disk / GIB:.2f} GiB free on the disk of the run: checkpoints may not fit; make room there"
    if told["disk_bytes"] is not None and not told["writable"]:
        yield SLOW, "the working directory cannot be written there, so no record or checkpoint can; chown it"
    if told["free_memory_bytes"] < GIB:
        yield SLOW, f"{told['free_memory_bytes'] / GIB:.2f} GiB of memory free; end what uses it there"
    if (free := told["free_ports"]) < 1000:
        remedy = "end what holds them, or sysctl net.ipv4.ip_local_port_range='32768 60999' there"
        yield SLOW, f"only {free} ports to give out; {remedy}"
    software = told.get("software", {})
    if told["gpus"] and "torch" in software and not software["gpus"]:
        build = f"CUDA {software['cuda']}" if software["cuda"] else "no CUDA"
        yield SLOW, f"{told['gpus']} NVIDIA GPUs, and torch there ({build}) sees none; install a build for its driver"
    if told["infiniband"] and 0 <= told["locked_bytes"] < GIB:
        limit = f"{told['locked_bytes'] >> 10} KiB"
        yield NOTED, f"ulimit -l is {limit}, with InfiniBand there; raise memlock in limits.conf"
    if "late" in software:
        yield SLOW, f"importing torch took more than {software['late']:.0f} s; a slow disk, or a busy machine"
    card = _card(told)
    if card.get("wireless"):
        yield SLOW, f"{card['name']} is wireless: every step waits for its slowest packet; use a cable"
    if card.get("half_duplex"):
        yield SLOW, f"{card['name']} runs at half duplex; change the cable or the switch's port"


def meeting(hosts: Mapping[str, Told]) -> Iterator[Finding]:
    """Loopback traps: where the other hosts would look for the first host at themselves."""
    if len(hosts) < 2:
        return
    first = next(iter(hosts))
    known = list(hosts.values())
    asked = next((told["place"]["asked"] for told in known if "place" in told), "")
    if not asked and (text := unreachable(known)):
        yield Finding(IN_THE_WAY, first, text)
    for name, told in hosts.items() if asked and not _is_number(asked) else ():
        at = told.get("place", {}).get("meeting", "")
        if at and is_loopback(at) and asked != "localhost":
            what = f"{asked!r} is {at} there, where no other machine comes: a name that resolves to loopback; "
            remedy = f"give --address as {first}'s address in the network, or fix /etc/hosts there"
            yield Finding(IN_THE_WAY, name, what + remedy)


def _ways(hosts: Mapping[str, Told], pairs: Sequence[Told]) -> Iterator[Finding]:
    why = {(pair["from"], pair["to"]): pair["why"] for pair in pairs}
    seen: set[frozenset[str]] = set()
    for (one, other), reason in why.items():
        if not reason or frozenset((one, other)) in seen:
            continue
        seen.add(frozenset((one, other)))
        place, back = hosts[other]["place"], why.get((other, one))
        if one == other:
            yield Finding(IN_THE_WAY, one, f"it does not reach itself at {place['address']} ({reason}); is lo up?")
            continue
        low, high = hosts[other]["ports"]
        what = (
            f"{one} and {other} do not reach each other ({reason})"
            if back
            else f"{one} does not reach {other} at {place['address']}:{place['port']} ({reason}), and {other} reaches "
            f"{one}: a one-way firewall"
        )
        where, own = f"{one} and {other}" if back else other, hosts[one]["place"]["address"]
        remedy = f"let TCP ports {low} to {high} and MASTER_PORT in from {own}: `sudo ufw allow from {own}`"
        yield Finding(IN_THE_WAY, where, f"{what}; {remedy}, or firewalld's trusted zone")


def _speeds(hosts: Mapping[str, Told], pairs: Sequence[Told]) -> Iterator[Finding]:
    speeds = {(pair["from"], pair["to"]): pair["bytes_per_s"] for pair in pairs if pair.get("bytes_per_s")}
    usual = statistics.median(speeds.values()) if len(speeds) > 2 else 0.0
    for pair in pairs:
        one, other = _card(hosts[pair["from"]]), _card(hosts[pair["to"]])
        who = f"{pair['from']} -> {pair['to']}"
        if "stalled" in pair:
            sizes = f" ({one['name']} {one['mtu']}, {other['name']} {other['mtu']})" if one and other else ""
            words = f"bytes come through, a flood of them does not ({pair['stalled']}): an MTU that differs on the way?"
            yield Finding(IN_THE_WAY, who, f"{words} Give both interfaces the same{sizes}: ip link set DEVICE mtu 1500")
            continue
        speed = speeds.get((pair["from"], pair["to"]), 0.0)
        promised = min(one.get("speed_mbit", 0), other.get("speed_mbit", 0)) * 1e6 / 8
        back = speeds.get((pair["to"], pair["from"]), 0.0)
        rate = f"{speed * 8 / 1e6:.0f} Mbit/s"
        if speed and promised and speed < HALF * promised:
            promise = f"{promised * 8 / 1e6:.0f}"
            yield Finding(SLOW, who, f"{rate}, and its interface says {promise}; cable, switch, or load?")
        elif speed and speed < HALF * back:
            yield Finding(SLOW, who, f"{rate}, and {back * 8 / 1e6:.0f} the other way; cable, duplex, or load?")
        elif speed and speed < HALF * usual:
            yield Finding(SLOW, who, f"{rate}, and {usual * 8 / 1e6:.0f} is usual here: all wait for the slowest link")


def _differences(hosts: Mapping[str, Told]) -> Iterator[str]:
    """What may differ, and what that means."""

    def several(what: str, values: Mapping[str, Any], then: str) -> Iterator[str]:
        if len(set(values.values())) > 1:
            yield f"{what} differ ({', '.join(f'{name} {value}' for name, value in values.items())}): {then}"

    software = {name: told["software"] for name, told in hosts.items() if "torch" in told.get("software", {})}
    bits = "sums differ in their last bits"
    yield from several("instruction sets", {n: s["instructions"] for n, s in software.items()}, bits)
    yield from several("BLAS libraries", {n: s["blas"] for n, s in software.items()}, bits)
    yield from several("MKL versions", {n: s["mkl"] for n, s in software.items()}, bits)
    yield from several("oneDNN versions", {n: s["onednn"] for n, s in software.items()}, bits)
    pythons = {name: told["python"].rpartition(".")[0] for name, told in hosts.items()}
    yield from several("Python versions", pythons, "what one can import, another may not")
    cores = {name: told["cores"] for name, told in hosts.items()}
    yield from several("numbers of cores", cores, "shares of the batch follow measured speed")
    cards = {name: card for name, told in hosts.items() if (card := _card(told))}
    yield from several("MTUs", {n: card["mtu"] for n, card in cards.items()}, "large packets may be lost")
    speeds = {n: card["speed_mbit"] for n, card in cards.items() if card["speed_mbit"]}
    yield from several("speeds of interfaces, in Mbit/s,", speeds, "all wait for the slowest")


def _card(told: Told) -> dict[str, Any]:
    """The interface that a host's own address is of; empty where that is not known."""
    address = told.get("place", {}).get("address", "").partition("%")[0]
    found = ({"name": name, **card} for name, card in told["cards"].items() if address in card["addresses"])
    return next(found, {})


def _is_number(address: str) -> bool:
    try:
        ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return True
