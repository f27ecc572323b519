"""Each process gets whole physical cores, neighbours first, and gives them back."""

import os
import threading

import pytest
import torch

from paceline import session
from paceline.engine import replicas
from paceline.engine.node import affinity, cgroup_limits
from paceline.environment import LaunchEnvironment
from paceline.job import Job
from paceline.launch.machine import Machine


def machine(folder, nodes, per_node, siblings=2):
    """/sys as a machine has it whose second hyperthreads are numbered after all first ones."""
    total = nodes * per_node
    for core in range(total):
        for sibling in range(siblings):
            cpu = folder / f"cpu{core + sibling * total}"
            (cpu / "topology").mkdir(parents=True)
            (cpu / f"node{core // per_node}").mkdir()
            (cpu / "topology" / "physical_package_id").write_text(f"{core // per_node}\n")
            (cpu / "topology" / "core_id").write_text(f"{core % per_node}\n")
    return set(range(total * siblings))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_siblings_and_nodes_stay_together(tmp_path, size):
    cpus = machine(tmp_path, nodes=2, per_node=4)
    parts = [affinity.share(rank, size, cpus, tmp_path) for rank in range(size)]
    assert set().union(*(part for part, _ in parts)) == cpus
    assert sum(len(part) for part, _ in parts) == len(cpus)
    for part, num_threads in parts:
        assert len(part) == 2 * num_threads
        assert {cpu % 8 for cpu in part if cpu < 8} == {cpu % 8 for cpu in part if cpu >= 8}
        if size in (2, 4, 8):
            assert len({cpu % 8 // 4 for cpu in part}) == 1, "across NUMA nodes"


def test_more_processes_than_cores_share_hyperthreads_then_everything(tmp_path):
    cpus = machine(tmp_path, nodes=1, per_node=2)
    assert [affinity.share(rank, 4, cpus, tmp_path) for rank in range(4)] == [({0}, 1), ({2}, 1), ({1}, 1), ({3}, 1)]
    assert affinity.share(3, 5, cpus, tmp_path) == (cpus, 1)


def test_a_machine_that_tells_nothing(tmp_path):
    assert [affinity.share(rank, 2, {3, 5, 8}, tmp_path) for rank in range(2)] == [({3}, 1), ({5, 8}, 2)]


def test_there_are_no_more_threads_than_a_container_may_use_the_time_of(tmp_path):
    """Story: with --cpus=2 on 64 cores, two processes took 32 threads each."""
    cpus = machine(tmp_path, nodes=2, per_node=4)
    for allowed, num_threads in ((0, 4), (100, 4), (6, 3), (2, 1), (1, 1)):
        parts = [affinity.share(rank, 2, cpus, tmp_path, allowed) for rank in range(2)]
        assert [(len(part), count) for part, count in parts] == [(8, num_threads)] * 2


def test_engines_and_the_row_that_nobody_asked_for_obey_a_containers_limit(monkeypatch, capsys):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setattr(affinity, "physical", lambda cpus, root=None: [[cpu] for cpu in range(8)])
    monkeypatch.setattr(cgroup_limits, "cores", lambda: 3)
    monkeypatch.setattr(replicas, "_settle", lambda cpus, num_threads: None)
    before, engine = torch.get_num_threads(), replicas.Engine(2)
    engine.open(model, optimizer, None)
    assert (engine.num_threads, engine.num_threads_each) == (3, 1)
    engine.close()
    torch.set_num_threads(before)
    monkeypatch.setattr(session, "survey", lambda: Machine(cores=3))
    monkeypatch.setattr(session.plan_cache, "of_job", lambda *_: None)
    assert session._default_row(LaunchEnvironment(), Job(model, optimizer, None, 8)) == "threads:3"
    assert "threads:3, not measured" in capsys.readouterr().err


def test_all_threads_move_and_come_back():
    before, seen, go, end = os.sched_getaffinity(0), [], threading.Event(), threading.Event()

    def look():
        go.wait(10)
        seen.append(os.sched_getaffinity(0))
        end.wait(10)
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=look)
    thread.start()
    target = {min(before)}
    affinity.move(before, target)
    try:
        assert os.sched_getaffinity(0) == target
        go.set()
        while not seen:
            pass
    finally:
        affinity.move(target, before)
    end.set()
    thread.join(10)
    assert seen == [target, before]
    assert os.sched_getaffinity(0) == before
