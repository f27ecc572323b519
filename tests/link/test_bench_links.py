"""Sums are raced in the same processes, right everywhere, and a message's two numbers come out of its times."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from machines import left_behind, needs_cluster
from paceline.cli import app
from paceline_bench.cluster import collectives


def test_two_numbers_of_a_message_come_out_of_its_times():
    sizes = [1 << k for k in range(10, 26, 3)]
    alpha_s, beta_s = collectives.fit(sizes, [5e-5 + 2e-9 * n for n in sizes])
    assert (alpha_s, beta_s) == pytest.approx((5e-5, 2e-9))


def test_a_wrong_sum_and_a_byte_too_many_are_seen():
    def found(sent_bytes, right, cores=8):
        turns = {"gloo": [{"seconds": 1.0, "sent_bytes": 1, "right": True}]}
        turns["ring"] = [{"seconds": 0.5, "sent_bytes": sent_bytes, "right": right}]
        measured = {"alpha_s": 1e-3, "beta_s_per_byte": 1e-6, "cores": cores, "turns": {"4096": turns}}
        return collectives._finding(measured, 4096, 2)

    assert found(4096, True).reached
    assert not found(4100, True).reached
    assert not found(4096, False).reached
    assert "| ring | 500.000 | 6.096 | 2.00 | 2 | 4096 | 4096 |" in found(4096, True).details
    assert "| ring | 500.000 | 12.192 |" in found(4096, True, cores=1).details, "four messages, one core"


@pytest.mark.dear
def test_the_suite_races_gloo_and_writes_a_record(tmp_path, monkeypatch):
    monkeypatch.setattr(collectives, "SIZES", (collectives.SIZES[0], collectives.SIZES[2]))
    asked = ["bench", "links", "--processes", "2", "--rounds", "2", "--only", "ring,two_level", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "raw.json").read_text())
    assert [one["what"] for one in found] == ["sum of 4 KiB over 2 processes", "sum of 1024 KiB over 2 processes"]
    for one in found:
        assert one["reached"]
        assert [line.split()[1] for line in one["details"].splitlines()[4:]] == ["gloo", "ring", "two_level"]
        assert one["details"] in (tmp_path / "README.md").read_text()


@pytest.mark.dear
@needs_cluster
def test_sums_over_shaped_cables_take_as_long_as_their_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(collectives, "SIZES", (collectives.SIZES[0], collectives.SIZES[2]))
    asked = ["bench", "links", "--nodes", "2", "--rate", "200mbit", "--rounds", "1", "--only", "binomial"]
    result = CliRunner().invoke(app, [*asked, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    small, large = json.loads((tmp_path / "raw.json").read_text())
    assert large["what"] == "sum of 1024 KiB over 2 nodes, links of 200mbit"
    assert small["reached"]
    assert large["reached"]
    took_ms = {cells[1]: float(cells[2]) for cells in map(_cells, large["details"].splitlines()[4:])}
    # there and back, less what a burst lets through at once
    assert took_ms["binomial"] > 1e3 * (2 * collectives.SIZES[1] - 4 * 256 * collectives.KIB) * 8 / 200e6
    assert not left_behind()


def _cells(line):
    return [cell.strip() for cell in line.split("|")]


@pytest.mark.dear
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rate", "1gbit"], "without --nodes all processes are on one; add it, as in --nodes 4 --rate 1gbit"),
        (["--delay", "5"], "add it, as in --nodes 4 --rate 100mbit"),
        (["--nodes", "1"], "2 nodes and 1 round or more, got 1 and 7"),
        (["--nodes", "2", "--rate", "fast"], "rate 'fast' is none of a link's"),
        (["--nodes", "2", "--delay", "5"], "give --rate 200mbit or less"),
    ],
)
def test_cables_that_cannot_be_are_told_before_anything_starts(words, message):
    with pytest.raises(ValueError, match=message):
        CliRunner().invoke(app, ["bench", "links", *words], catch_exceptions=False)


def test_beside_each_other_on_cables_and_after_each_other_on_cores():
    turns = {"gloo": [{"seconds": 1.0, "sent_bytes": 1, "right": True}]}
    turns["ring"] = [{"seconds": 0.5, "sent_bytes": 4096, "right": True}]
    measured = {"alpha_s": 1e-3, "beta_s_per_byte": 1e-6, "cores": 1, "turns": {"4096": turns}}
    found = collectives._finding(measured, 4096, 2, collectives.Cables(2, "1gbit"))
    assert "| ring | 500.000 | 6.096 |" in found.details
    assert found.what == "sum of 4 KiB over 2 nodes, links of 1gbit"
    large = {"alpha_s": 1e-3, "beta_s_per_byte": 1e-9, "cores": 1, "turns": {str(16 << 20): turns}}
    # 16 MiB on a ring of two: a megabyte at once, and 15 at 94 % of 125 MB/s
    whole_ms = 1e3 * (2e-3 + 2**20 * 1e-9 + 15 * 2**20 / (0.94 * 125e6))
    assert (
        f"| ring | 500.000 | {whole_ms:.3f} |"
        in collectives._finding(large, 16 << 20, 2, collectives.Cables(2, "1gbit")).details
    )
    assert str(collectives.Cables(3, None, 5.0)) == "3 nodes, links of no limited rate, 5 ms one way"


@pytest.mark.parametrize(
    ("only", "processes", "message"),
    [(["rings"], 4, "no collective named 'rings'"), ([], 1, "2 processes and 1 round or more, got 1 and 7")],
)
def test_mistakes_are_told_before_anything_starts(only, processes, message):
    with pytest.raises(ValueError, match=message):
        next(collectives.run(only, 7, print, processes))
