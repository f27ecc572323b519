"""A machine returns from a power failure with another address and the same name: the run admits it."""

import json
import time

import pytest
import torch

import launching
from launching import finish
from machines import Machines, needs_machines
from paceline.report.record import read

ELSEWHERE = "10.77.0.51"
SCRIPT = """
import json, os, sys, time
from pathlib import Path
import torch
import paceline
folder, node, late = Path(sys.argv[1]), os.environ["GROUP_RANK"], "PACELINE_JOIN_TICKET" in os.environ
torch.manual_seed(0)
model, together = torch.nn.Linear(4, 2).double(), 0
data = torch.utils.data.TensorDataset(torch.randn(48, 4).double(), torch.randn(48, 2).double())
sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
with paceline.join(model, sgd, torch.nn.functional.mse_loss, batch_size=12, folder=folder / "run") as pace:
    for batch in pace.batches(data, epochs=10_000):
        pace.step(batch)
        late |= pace.world.num_nodes == 2
        together += late and pace.world.num_nodes == 3
        if together == 5:
            break
        (folder / f"stepped-{node}").touch()
        time.sleep(0.05)
    place = pace.run.members.join_desk.me
torch.save(model.state_dict(), folder / f"{node}.pt")
(folder / f"{node}.json").write_text(json.dumps([place.address, pace.num_steps, pace.world.num_nodes]))
"""


@needs_machines
@pytest.mark.dear
@pytest.mark.parametrize("silent", [False, True])
def test_a_machine_that_returns_with_another_address_is_admitted(tmp_path, silent):
    """Its connections are closed, or silent. The launcher and the other nodes identify it by its name."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with Machines(3) as machines:
        hosts = "-H", machines.hosts(3), "--ssh", machines.ssh
        process = launching.begin("run", *hosts, "--nodes", "2:3", "--plan", "sequential", script, tmp_path)
        try:
            end = time.monotonic() + 60
            while len(list(tmp_path.glob("stepped-*"))) < 3:
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < end
                time.sleep(0.02)
            if silent:
                machines.cluster.pull_cable(1)
            machines.fail_power(1)
            machines.move(1, ELSEWHERE)
            _, errors = finish(process, 0)
        finally:
            process.kill()
            process.wait()
    assert "the connection to node1 failed; reconnecting" in errors
    results = [json.loads((tmp_path / f"{node}.json").read_text()) for node in range(3)]
    assert [address for address, *_ in results] == ["10.77.0.1", ELSEWHERE, "10.77.0.3"]
    assert len({tuple(rest) for _, *rest in results}) == 1
    assert results[0][-1] == 3
    states = [torch.load(tmp_path / f"{node}.pt", weights_only=True) for node in range(3)]
    assert all(torch.equal(value, states[0][name]) for state in states for name, value in state.items())
    changes = [event for event in read(tmp_path / "run") if event["event"] == "regroup"]
    assert [(event["num_nodes"], len(event["came"])) for event in changes] == [(2, 0), (3, 1)]
