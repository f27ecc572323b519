"""A host's report of its libraries, devices and ports is correct."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from needs import want
from paceline.cli.doctor import _host
from paceline.launch.doctor import host_facts, host_probe


@pytest.mark.parametrize(
    ("words", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build", "550.54.15"),
        ("", ""),
    ],
)
def test_the_driver_is_the_kernel_modules(words, version):
    assert host_probe.driver(words) == version


def test_a_port_that_is_used_is_not_free():
    low, high = host_probe.collect(".")["ports"]
    used = set(host_probe._ports())
    port = next(port for port in range(low, high) if port not in used)
    with socket.create_server(("127.0.0.1", port)):
        assert port in host_probe._ports()


def test_gpus_come_with_their_memory_and_driver():
    report = {**host_facts.collect(".", []), **host_probe.collect("."), "driver": "550.54.15"}
    report["software"] = {"gpus": [{"name": "NVIDIA T4", "memory_bytes": 15 << 30}]}
    assert "NVIDIA T4 (15.0 GiB), NVIDIA driver 550.54.15" in _host(report)


def test_openblas_reports_its_version(tmp_path):
    """For a torch built without MKL, as on ARM; here a fake one with the library of numpy."""
    libraries = list(Path(np.__file__).parents[1].glob("numpy.libs/*.so*"))
    blas = [path for path in libraries if "openblas" in path.name]
    if not blas:
        want(openblas="numpy has none of its own here")
    (tmp_path / "torch").mkdir()
    for path in libraries:
        shutil.copy(path, tmp_path / "torch")
    (tmp_path / "torch" / "__init__.py").write_text(
        "import ctypes, types\n"
        f"ctypes.CDLL({str(tmp_path / 'torch' / blas[0].name)!r})\n"
        "__version__, version = '2', types.SimpleNamespace(cuda=None)\n"
        "__config__ = types.SimpleNamespace(show=lambda: 'BLAS_INFO=open')\n"
        "cpu = types.SimpleNamespace(get_cpu_capability=lambda: 'NEON')\n"
        "backends, cuda = types.SimpleNamespace(cpu=cpu), types.SimpleNamespace(device_count=lambda: 0)\n"
    )
    (tmp_path / "paceline.py").touch()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", host_probe.SOFTWARE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"OpenBLAS \d+\.\d+[\w.]*", json.loads(done.stdout)["blas"])
