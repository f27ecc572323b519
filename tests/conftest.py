"""The user's cache is neither read nor written, and Ctrl-C is heard."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

import needs

_cache = tempfile.TemporaryDirectory(prefix="paceline-test-cache-")
os.environ["XDG_CACHE_HOME"] = _cache.name

# whoever starts the tests in the background may have them ignore Ctrl-C, and children inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)


# the longest files first: where two processes share the tests, neither is left with them at the end
LONGEST = (
    "chaos",
    "simulation",
    *(
        "commands",
        "mpi",
        "faults",
        "stalls",
        "interrupts",
        "shares_over_gloo",
        "resume",
        "engines_are_transparent",
        "ssh_starts",
    ),
    *(
        "plan_over_hosts",
        "joining",
        "bench_cluster",
        "doctor",
        "send",
        "detach",
        "firewalls",
        "links_add_up",
        "examples",
    ),
    *("replicas_hold_together", "plan_explains", "ssh_checks", "collectives", "launchers_say_who"),
    "verify_over_ssh",
)


# what other tests show too, on other numbers: `make test-all` runs them
DEAR = """
[trained0
[trained1
[trained2
a_network_that_becomes_slow
all_of_them_save_and_end[one]
all_of_them_save_and_end[the one that leads]
another_model_is_refused_by_name
any_shape.py::test_several_processes[two nodes-
are_those_of_one_process[processes:3-
between_processes[trained2
but_while_all_others_wait[False
chaos_waits.py::test_a_history_is_as_if
chaos.py::test_a_stopped_node_is_given_up
chaos.py::test_every_class_of_fault_is_outlived
chaos.py::test_of_two_parts_one_goes_on
chaos.py::test_the_launcher_dies_and_rank_0
clocks.py::test_a_clock_that_jumps_by_days
commands.py::test_bytes_on_the_wire
commands.py::test_verify_catches
commands.py::test_verify_on_two_machines
commands.py::test_verify_says_why_batch_norm_differs
dies_while_it_is_given
encryption.py::test_a_node_dies
ends_the_node_and_leaves_nothing[local rank 1]
equal_one_process[processes:3-1
equals_one_process[3-sockets]
every_process_of_every_node[1.0]
examples.py::test_two_processes[own_loop]
fault_has_struck[20000
fault_has_struck[30000
fault_has_struck[40000
fault_has_struck[50000
fault_has_struck[60000
fault_has_struck[70000
faults.py::test_an_exchange_may_take_longer
gloo.py::test_the_same_training[3]
go_on_and_it_comes_back[3-
goes_on_at_most[cable
goes_on_at_most[refused-1-2
goes_on_at_most[refused-2-2
has_left_and_one_that_fails_has_died[raise
has_too_little_memory
held_together[threads]
interrupts.py::test_two_processes_stopped_twice
is_rank_0s_in_every_process[processes:2-2-4
join_ends_nothing[settle1
join_ends_nothing[spread1
kept_apart.py::test_a_refused_folder_ends_all_processes[fixed
leaves_nothing[local rank 2
mpi.py::test_declared_bytes
mpi.py::test_two_processes_on_each
mpi.py::test_verify_under_mpirun
names_who_is_lost[ulfm
never_leaves_less_than_what_was_reported[500]
nodes_equal_one_process[trained2
numerics.py::test_bf16_between_processes
outlived.py::test_a_node_of_several
outlived.py::test_batch_norm_over_everyone
outlived.py::test_wherever_a_node_dies
over_a_real_wire
over_a_real_wire[200mbit
over_shaped_cables_take
over_ssh.py::test_an_exact_run_is
over_ssh.py::test_another_mathematics
processes_dies_as_one[1]
refused_by_every_process[processes:3
returned.py::test_a_node_that_is_started_by_hand
returned.py::test_however_it_trains
returned.py::test_nodes_of_several_processes[momentum
returned.py::test_who_comes_back_and_is_reached_by_nobody
returned.py::test_who_leads_stops_while
says_whom_it_lost[SIGKILL of rank 1
says_whom_it_lost[cable of rank 0-tls
says_whom_it_lost[cable of rank 0-torch
srun.py::
stalls.py::test_a_hang_inside_a_node
stalls.py::test_a_stopped_process_that_goes_on
stalls.py::test_an_undisturbed_run
stalls.py::test_the_others_go_on_without
stands_still_until_all_others_have_ended
still_one_of_all[not long enough
stragglers.py::test_a_node_whose_core_others_take
tells_it_within_fifteen_seconds
test_a_death_inside_a_node_reaches_every_process_of_every_node[0.1]
test_a_firewall_that_lets
test_a_lane_that_cannot_be
test_a_named_budget_is_spent
test_a_node_of_one_process_and_one_of_two_come_together
test_a_plan_over_three_real_hosts
test_a_row_that_was_never_run
test_a_script_that_ends_early
test_a_silent_host_a_hung_login
test_all_but_one_come_back
test_cable.py::
test_emulated_compute_is_labelled
test_going_on_with_another_codec_says_what_is_left_out[processes
test_hosts_of_unlike_slots_train
test_law[mpi-4-
test_law[nccl-3-
test_law[tls-3-
test_law[tls-4-
test_law[tls-5-
test_law[torch-4-
test_memories.py::test_another_number_of_nodes_owes_as_much[processes
test_memories.py::test_two_nodes_go_on_bit_for_bit[processes
test_nodes_of_several_processes_come_together
test_nodes_that_average_now_and_then_stop
test_nodes_that_compute_in_unlike_rows
test_one_process_stopped_twice
test_torchrun_starts_it
test_two_processes_name_the_layer
test_two_processes_play_what_one_does
test_verify_says_the_same_of_an_exact_exchange[how1]
test_who_dies_when_another_is_taken_in
two_that_do_not_reach_each_other_any_more
two_thousand_random_frames
two_threads[micro-batches
verify_says_the_same_of_an_exact_exchange
what_differs[clip
what_differs[model
where_mpirun_lets_it[0-sockets
where_mpirun_lets_it[1-shared memory]
who_is_lost[plain
run_waiting.py::test_joining_nodes_of_several_processes
run_waiting.py::test_more_are_lost_while
whom_it_lost[cable of rank 1-tls
told_nothing[torch]
told_nothing[no data]
one_line[processes-own loop]
one_line[nodes-own loop]
wait_and_both_come_back[victims1
""".strip().splitlines()


MISSED = pytest.StashKey[list[str]]()


@pytest.fixture
def missed(pytestconfig: pytest.Config) -> list[str]:
    """Of DEAR, what no test is called by. Known where all tests are collected."""
    if pytestconfig.args != pytestconfig.getini("testpaths"):
        pytest.skip("not all tests are collected")
    return pytestconfig.stash[MISSED]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    rank = {f"test_{name}": i for i, name in enumerate(LONGEST)}
    missed = set(DEAR)
    for item in items:
        if met := {part for part in DEAR if part in item.nodeid}:
            item.add_marker("dear")
            missed -= met
    config.stash[MISSED] = sorted(missed)
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))  # stable: the order within a file stays


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest's own, so that its reasons stand above this line
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[Any]:
    result = yield
    skipped = terminalreporter.getreports("skipped")
    if line := needs.summary(report.longrepr[2] for report in skipped if isinstance(report.longrepr, tuple)):
        terminalreporter.write_line(line, yellow=True)
    return result


def pytest_unconfigure() -> None:
    _cache.cleanup()
