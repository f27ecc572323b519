"""Scripts of libraries that use DistributedDataParallel train to the same weights by our class, with its features."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from launching import unedited
from paceline.launch.local import free_port

SCRIPTS = Path(__file__).parents[1] / "support" / "scripts"
OURS, THEIRS = "paceline.ddp.module", "torch.nn.parallel.distributed"
RUN = "-m", "paceline", "run"
# what starts two processes of each; Lightning does so itself
STARTS = {"trainer": (*RUN, "--plan", "processes:2"), "accelerate": (*RUN, "--plan", "processes:2"), "lightning": RUN}
BATCHES = {"trainer": 12, "lightning": 20}  # that its callbacks have seen: of both ranks, of one
EVALUATED = {"trainer": 11, "accelerate": 11, "lightning": 12}

pytestmark = [pytest.mark.dear, pytest.mark.long]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What each rank of a script wrote, (weights, words); each command runs once."""
    folders, found = {}, {}

    def ran(library, begin, *words):
        key = library, tuple(begin), words
        # a script that resumes finds what it wrote before
        folder = folders.setdefault(key[:2], tmp_path_factory.mktemp(library))
        if key not in found:
            unedited((*begin, SCRIPTS / f"by_{library}.py", folder, *words), folder)
            found[key] = [
                (torch.load(folder / f"{rank}.pt"), json.loads((folder / f"{rank}.json").read_text()))
                for rank in range(2)
            ]
        return found[key]

    return ran


def farthest(ones, others):
    """The largest difference of weights, each rank against the same rank."""
    return max(
        float((one[name] - other[name]).abs().max())
        for (one, _), (other, _) in zip(ones, others, strict=True)
        for name in one
    )


@pytest.mark.parametrize("library", STARTS)
def test_trains_to_the_weights_of_torchs_class(library, run):
    ours, theirs = run(library, STARTS[library]), run(library, (*STARTS[library], "--ddp-off"))
    assert farthest(ours, theirs) < 1e-12
    assert farthest(ours, ours[::-1]) == 0
    for (_, said), (_, others) in zip(ours, theirs, strict=True):
        assert (said["wrapper"], others["wrapper"]) == (OURS, THEIRS)
        assert said["trials"] > 0 == others["trials"]  # the wide layer was sent as factors
        assert said.get("steps") == BATCHES.get(library)
        assert said["evaluated"] == others["evaluated"] == EVALUATED[library]


@pytest.mark.parametrize("library", STARTS)
def test_goes_on_from_a_checkpoint_of_the_librarys_own(library, run):
    whole = run(library, STARTS[library])
    run(library, (*STARTS[library], "--ddp-off"))
    ours = run(library, STARTS[library], "resume")
    assert farthest(ours, run(library, (*STARTS[library], "--ddp-off"), "resume")) < 1e-12
    if library == "trainer":  # the others go on for an epoch more, or draw other random numbers
        assert farthest(ours, whole) < 1e-12
    else:
        assert farthest(ours, whole) > 1e-6


def test_mixed_precision_is_torchs_own(run):
    ours = run("accelerate", STARTS["accelerate"], "bf16")
    assert farthest(ours, run("accelerate", (*STARTS["accelerate"], "--ddp-off"), "bf16")) == 0
    assert ours[0][1]["trials"] == 0


def test_lightnings_strategy_of_our_name(run):
    """By an entry point of the installed package, without a command of ours."""
    ours = run("lightning", (), "paceline")
    assert farthest(ours, run("lightning", (*STARTS["lightning"], "--ddp-off"))) < 1e-12
    assert [said["wrapper"] for _, said in ours] == [OURS, OURS]
    off = run("lightning", (*STARTS["lightning"], "--ddp-off"), "paceline")
    assert [said["wrapper"] for _, said in off] == [THEIRS, THEIRS]


@pytest.mark.parametrize("script", ["test_script", "test_sync", "test_ops"])
def test_accelerates_own_scripts(script, tmp_path):
    launch = "-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_port()
    command = *launch, "-m", "paceline.ddp", "-m", f"accelerate.test_utils.scripts.{script}"
    unedited(command, tmp_path, ACCELERATE_USE_CPU="true")
