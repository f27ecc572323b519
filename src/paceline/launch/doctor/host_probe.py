"""Metadata that a host reports to `paceline doctor`. Sent to it as source: it needs the standard library alone."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import platform
import re
import resource
import shutil
import socket
import struct
import threading
from pathlib import Path
from typing import Any

from paceline.engine.node.cgroup_limits import read
from paceline.launch.machine import survey

SIOCGIFADDR = 0x8915
RESOLVE_S = 2.0

# Runs in its own process, since nothing else here needs torch. SIGALRM ends it after 30 s in any case.
SOFTWARE = r"""
import sys
sys.path = [folder for folder in sys.path if folder]
import ctypes, json, re, signal
signal.alarm(30)
import torch, paceline
shown = torch.__config__.show()
def found(pattern):
    match = re.search(pattern, shown)
    return match[1] if match else ""
def library():  # torch reports no version of a BLAS other than MKL; numpy's BLAS is another one
    for path in {line.split()[-1] for line in open("/proc/self/maps") if "openblas" in line and "numpy" not in line}:
        for name in ("openblas_get_config", "openblas_get_config64_", "scipy_openblas_get_config64_"):
            ask = getattr(ctypes.CDLL(path), name, None)
            if ask:
                ask.restype = ctypes.c_char_p
                return " ".join(ask().decode().split()[:2])
    return found(r"BLAS_INFO=(\w+)")
devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps({
    "torch": torch.__version__,
    "blas": library(),
    "mkl": found(r"Math Kernel Library Version ([\w.]+)"),
    "onednn": found(r"MKL-DNN v([\w.]+)"),
    "instructions": torch.backends.cpu.get_cpu_capability(),
    "cuda": torch.version.cuda or "",
    "gpus": [{"name": device.name, "memory_bytes": device.total_memory} for device in devices],
}))
"""


def collect(folder: str) -> dict[str, Any]:
    """Processor, memory, disk, limits, interfaces, and the address of its own name. *Units*: bytes; -1: no limit."""
    hardware = survey()
    low, high = map(int, read("/proc/sys/net/ipv4/ip_local_port_range").split() or ("32768", "60999"))
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "cpu": hardware.cpu,
        "cores": hardware.cores,
        "cores_of_machine": os.cpu_count(),
        "flags": hardware.flags,
        "memory_bytes": hardware.memory_bytes,
        "free_memory_bytes": min(hardware.memory_bytes, _free_memory_bytes()),
        "shared_bytes": _space("/dev/shm"),
        "disk_bytes": _space(folder),
        "writable": os.access(folder, os.W_OK),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "locked_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "gpus": len(list(Path("/proc/driver/nvidia/gpus").glob("*"))),
        "infiniband": Path("/sys/class/infiniband").is_dir(),
        "driver": driver(read("/proc/driver/nvidia/version")),
        "ports": [low, high],
        "free_ports": high - low + 1 - len({port for port in _ports() if low <= port <= high}),
        "cards": cards(),
        "own_name": resolve(socket.gethostname()),
    }


def cards() -> dict[str, dict[str, Any]]:
    """Every interface: its addresses, MTU, speed (Mbit/s, 0 if unknown), duplex, and whether it is wireless."""
    found: dict[str, dict[str, Any]] = {}
    for _, name in socket.if_nameindex():
        folder = Path("/sys/class/net", name)
        speed = read(folder / "speed")
        found[name] = {
            "addresses": _ipv4(name),
            "mtu": int(read(folder / "mtu") or 0),
            "speed_mbit": max(0, int(speed)) if speed.lstrip("-").isdigit() else 0,
            "half_duplex": read(folder / "duplex") == "half",
            "wireless": (folder / "wireless").exists(),
        }
    for line in read("/proc/net/if_inet6").splitlines():
        digits, *_, name = line.split()
        if name in found:
            found[name]["addresses"].append(str(ipaddress.IPv6Address(int(digits, 16))))
    return found


def driver(text: str) -> str:
    """The version of NVIDIA's kernel module; "" if there is none."""
    match = re.search(r"Kernel Module.*?  ([\d.]+)", text)
    return match[1] if match else ""


def resolve(name: str) -> dict[str, Any]:
    """The address of a name, IPv4 preferred, as in a run; or the reason why there is none."""
    answers: list[dict[str, Any]] = []

    def look_up() -> None:
        try:
            infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            answers.append({"address": str(min(infos, key=lambda info: info[0] != socket.AF_INET)[4][0])})
        except OSError as error:
            answers.append({"error": error.strerror or str(error)})

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(RESOLVE_S)
    return {"name": name, **(answers or [{"error": f"no answer within {RESOLVE_S:.0f} s"}])[0]}


def find_addresses(meeting: str, first: bool, interface: str) -> dict[str, Any]:
    """The address of the rendezvous ``meeting``, resolved here, and this host's own address, as in a run.

    The own address is the source address of packets to the rendezvous, or that of ``interface``: gloo's interface, or,
    after a "=", NCCL's. NCCL's may be a pattern; it is ignored unless it is the name of an interface here.
    """
    resolved = resolve(meeting)
    if "error" in resolved:
        return {"error": f"{meeting!r} does not resolve there ({resolved['error']}); give an address with --address"}
    address = resolved["address"]
    if interface.startswith("="):
        interface = interface[1:] if interface[1:] in cards() else ""
    if interface:
        addresses = cards().get(interface, {}).get("addresses", [])
        if not addresses:
            names = ", ".join(sorted(cards()))
            return {
                "error": f"GLOO_SOCKET_IFNAME={interface!r} is no interface there with an address; there are: {names}; "
                f"name one of these, or unset it"
            }
        return {"meeting": address, "address": addresses[0]}
    if first:
        return {"meeting": address, "address": address}
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # no packet leaves
            return {"meeting": address, "address": probe.getsockname()[0]}
    except OSError as error:
        return {"error": f"it has no route to {address} ({error.strerror}); check its network, or --address"}


def _ports() -> list[int]:
    """The local TCP ports in use on this machine."""
    lines = (read("/proc/net/tcp") + "\n" + read("/proc/net/tcp6")).splitlines()
    ends = (line.split()[1] for line in lines if ":" in line)  # local addresses, as 0100007F:1F90
    return [int(end.rpartition(":")[2], 16) for end in ends]


def _ipv4(name: str) -> list[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return []
    return [socket.inet_ntoa(answer[20:24])]


def _free_memory_bytes() -> int:
    for line in read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


def _space(folder: str) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
