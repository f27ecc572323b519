"""Diagnoses problems from the reports of hosts and the measurements between them, each with its remedy, worst first."""

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
HALF = 0.5  # of an interface's nominal speed, of the opposite direction, of the median of all pairs

Report = Mapping[str, Any]


@dataclass(frozen=True)
class Finding:
    """``weight``: IN_THE_WAY prevents a run, SLOW slows or endangers it, NOTED does not matter by itself."""

    weight: int
    who: str
    what: str

    def __str__(self) -> str:
        return f"{self.who}: {self.what}"


def diagnose(own: Report, hosts: Mapping[str, Report], pairs: Sequence[Report], way: Way) -> list[Finding]:
    """``own``: `host_facts` of this machine. ``hosts``: the report of each, or its ``fault``; the first is node 0's.

    ``pairs``: the measurements ``from`` one host ``to`` another.
    """
    found = []
    for name, report in hosts.items():
        if "fault" in report:
            found.append(Finding(IN_THE_WAY, name, report["fault"]))
        else:
            found += [Finding(IN_THE_WAY, name, text) for text in _in_the_way(own, report, way)]
            found += [Finding(weight, name, text) for weight, text in _host_problems(report)]
    healthy = {name: report for name, report in hosts.items() if "fault" not in report}
    found += loopback_traps(healthy)
    found += _unreachable_pairs(healthy, pairs)
    found += _speeds(healthy, pairs)
    found += [Finding(NOTED, "all", text) for text in _differences(healthy)]
    return sorted(found, key=lambda finding: finding.weight)


def _in_the_way(own: Report, report: Report, way: Way) -> Iterator[str]:
    yield from faults(own, report, way)
    software = report.get("software", {})
    if all(report["versions"].values()) and "error" in software:
        yield f"`import torch, paceline` fails there: {software['error']}; reinstall both for {way.python}"
    place = report.get("place", {})
    if "error" in place:
        yield place["error"]
    elif "refused" in place:
        if place["errno"] == errno.EADDRINUSE:
            yield (
                f"port {place['asked_port']} is in use at {place['address']} (`ss -ltnp` names the process); end it, "
                f"or give another port: --port, MASTER_PORT"
            )
        else:
            yield f"it cannot listen at {place['address']} ({place['refused']}); check --address"


def _host_problems(report: Report) -> Iterator[tuple[int, str]]:
    own = report["own_name"]
    name, address = own["name"], own.get("address", "")
    if address and is_loopback(address) and name != "localhost":
        outside = [one for card in report["cards"].values() for one in card["addresses"] if not is_loopback(one)]
        better = f", such as {outside[0]}" if outside else ""
        yield (
            SLOW,
            f"its own name {name!r} resolves to loopback ({address}): with MASTER_ADDR={name} other machines would "
            f"connect to themselves; give the name its address in the network{better}, in /etc/hosts there",
        )
    elif not address:
        yield SLOW, f"its own name {name!r} does not resolve ({own['error']}); give it an address in /etc/hosts there"
    if abs(skew_s := report.get("skew_s", 0.0)) > SKEW_S + report.get("skew_error_s", 0.0):
        yield SLOW, f"its clock is {skew_s:+.1f} s from this one, so records disagree; there: timedatectl set-ntp true"
    if 0 <= report["open_files"] < FILES:
        yield SLOW, f"ulimit -n is {report['open_files']}: perhaps too few connections and files; raise nofile"
    if (shared := report["shared_bytes"]) is None or shared < GIB:
        what = "no /dev/shm" if shared is None else f"{shared / GIB:.2f} GiB free in /dev/shm"
        yield SLOW, f"{what}: DataLoader workers then send samples through pipes; a container needs --shm-size 2g"
    if (disk := report["disk_bytes"]) is not None and disk < 2 * GIB:
        yield SLOW, f"{disk / GIB:.2f} GiB free on the disk of the run: checkpoints may not fit; free space there"
    if report["disk_bytes"] is not None and not report["writable"]:
        yield SLOW, "the working directory there is not writable, so records and checkpoints fail; chown it"
    if report["free_memory_bytes"] < GIB:
        yield SLOW, f"{report['free_memory_bytes'] / GIB:.2f} GiB of memory free; end what uses it there"
    if (free := report["free_ports"]) < 1000:
        remedy = "end the processes that use them, or sysctl net.ipv4.ip_local_port_range='32768 60999' there"
        yield SLOW, f"only {free} ephemeral ports are free; {remedy}"
    software = report.get("software", {})
    if report["gpus"] and "torch" in software and not software["gpus"]:
        build = f"CUDA {software['cuda']}" if software["cuda"] else "no CUDA"
        yield SLOW, f"{report['gpus']} NVIDIA GPUs, and torch there ({build}) sees none; install a build for its driver"
    if report["infiniband"] and 0 <= report["locked_bytes"] < GIB:
        limit = f"{report['locked_bytes'] >> 10} KiB"
        yield NOTED, f"ulimit -l is {limit}, with InfiniBand there; raise memlock in limits.conf"
    if "late" in software:
        yield SLOW, f"importing torch took more than {software['late']:.0f} s; a slow disk, or a busy machine"
    card = _card(report)
    if card.get("wireless"):
        yield SLOW, f"{card['name']} is wireless: every step waits for its slowest packet; use a cable"
    if card.get("half_duplex"):
        yield SLOW, f"{card['name']} runs at half duplex; change the cable or the switch's port"


def loopback_traps(hosts: Mapping[str, Report]) -> Iterator[Finding]:
    """Findings where the first host's name or address makes the other hosts connect to themselves."""
    if len(hosts) < 2:
        return
    first = next(iter(hosts))
    known = list(hosts.values())
    address = next((report["place"]["asked"] for report in known if "place" in report), "")
    if not address and (text := unreachable(known)):
        yield Finding(IN_THE_WAY, first, text)
    for name, report in hosts.items() if address and not _is_number(address) else ():
        resolved = report.get("place", {}).get("meeting", "")
        if resolved and is_loopback(resolved) and address != "localhost":
            what = f"{address!r} resolves to {resolved} there, a loopback address, which no other machine reaches; "
            remedy = f"give --address as {first}'s address in the network, or fix /etc/hosts there"
            yield Finding(IN_THE_WAY, name, what + remedy)


def _unreachable_pairs(hosts: Mapping[str, Report], pairs: Sequence[Report]) -> Iterator[Finding]:
    why = {(pair["from"], pair["to"]): pair["why"] for pair in pairs}
    seen: set[frozenset[str]] = set()
    for (one, other), reason in why.items():
        if not reason or frozenset((one, other)) in seen:
            continue
        seen.add(frozenset((one, other)))
        place, reverse = hosts[other]["place"], why.get((other, one))
        if one == other:
            yield Finding(IN_THE_WAY, one, f"it does not reach itself at {place['address']} ({reason}); is lo up?")
            continue
        low, high = hosts[other]["ports"]
        what = (
            f"{one} and {other} do not reach each other ({reason})"
            if reverse
            else f"{one} does not reach {other} at {place['address']}:{place['port']} ({reason}), and {other} reaches "
            f"{one}: a one-way firewall"
        )
        where, own = f"{one} and {other}" if reverse else other, hosts[one]["place"]["address"]
        remedy = f"let TCP ports {low} to {high} and MASTER_PORT in from {own}: `sudo ufw allow from {own}`"
        yield Finding(IN_THE_WAY, where, f"{what}; {remedy}, or firewalld's trusted zone")


def _speeds(hosts: Mapping[str, Report], pairs: Sequence[Report]) -> Iterator[Finding]:
    speeds = {(pair["from"], pair["to"]): pair["bytes_per_s"] for pair in pairs if pair.get("bytes_per_s")}
    median = statistics.median(speeds.values()) if len(speeds) > 2 else 0.0
    for pair in pairs:
        one, other = _card(hosts[pair["from"]]), _card(hosts[pair["to"]])
        label = f"{pair['from']} -> {pair['to']}"
        if "stalled" in pair:
            sizes = f" ({one['name']} {one['mtu']}, {other['name']} {other['mtu']})" if one and other else ""
            what = f"single bytes arrive, a stream stalls ({pair['stalled']}): do MTUs differ on the path? Give"
            yield Finding(IN_THE_WAY, label, f"{what} both interfaces the same{sizes}: ip link set DEVICE mtu 1500")
            continue
        speed = speeds.get((pair["from"], pair["to"]), 0.0)
        nominal = min(one.get("speed_mbit", 0), other.get("speed_mbit", 0)) * 1e6 / 8
        back = speeds.get((pair["to"], pair["from"]), 0.0)
        rate = f"{speed * 8 / 1e6:.0f} Mbit/s"
        if speed and nominal and speed < HALF * nominal:
            nominal_mbit = f"{nominal * 8 / 1e6:.0f}"
            yield Finding(SLOW, label, f"{rate}, and its interface says {nominal_mbit}; cable, switch, or load?")
        elif speed and speed < HALF * back:
            yield Finding(SLOW, label, f"{rate}, and {back * 8 / 1e6:.0f} the other way; cable, duplex, or load?")
        elif speed and speed < HALF * median:
            yield Finding(SLOW, label, f"{rate}, and the median is {median * 8 / 1e6:.0f}: all wait for the slowest")


def _differences(hosts: Mapping[str, Report]) -> Iterator[str]:
    """Differences between hosts that do not prevent a run, with their consequences."""

    def several(what: str, values: Mapping[str, Any], then: str) -> Iterator[str]:
        if len(set(values.values())) > 1:
            yield f"{what} differ ({', '.join(f'{name} {value}' for name, value in values.items())}): {then}"

    software = {name: report["software"] for name, report in hosts.items() if "torch" in report.get("software", {})}
    bits = "sums differ in their last bits"
    yield from several("instruction sets", {n: s["instructions"] for n, s in software.items()}, bits)
    yield from several("BLAS libraries", {n: s["blas"] for n, s in software.items()}, bits)
    yield from several("MKL versions", {n: s["mkl"] for n, s in software.items()}, bits)
    yield from several("oneDNN versions", {n: s["onednn"] for n, s in software.items()}, bits)
    pythons = {name: report["python"].rpartition(".")[0] for name, report in hosts.items()}
    yield from several("Python versions", pythons, "what one can import, another may not")
    cores = {name: report["cores"] for name, report in hosts.items()}
    yield from several("numbers of cores", cores, "batch sizes follow the measured speed")
    cards = {name: card for name, report in hosts.items() if (card := _card(report))}
    yield from several("MTUs", {n: card["mtu"] for n, card in cards.items()}, "large packets may be lost")
    speeds = {n: card["speed_mbit"] for n, card in cards.items() if card["speed_mbit"]}
    yield from several("speeds of interfaces, in Mbit/s,", speeds, "all wait for the slowest")


def _card(report: Report) -> dict[str, Any]:
    """The interface that has the host's own address; empty if that is unknown."""
    address = report.get("place", {}).get("address", "").partition("%")[0]
    found = ({"name": name, **card} for name, card in report["cards"].items() if address in card["addresses"])
    return next(found, {})


def _is_number(address: str) -> bool:
    try:
        ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return True
