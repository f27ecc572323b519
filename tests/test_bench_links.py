"""Sums are raced in the same processes, right everywhere, and a message's two numbers come out of its times."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from paceline.bench import links
from paceline.cli import app


def test_two_numbers_of_a_message_come_out_of_its_times():
    sizes = [1 << k for k in range(10, 26, 3)]
    alpha_s, beta_s = links.fit(sizes, [5e-5 + 2e-9 * n for n in sizes])
    assert (alpha_s, beta_s) == pytest.approx((5e-5, 2e-9))


def test_a_wrong_sum_and_a_byte_too_many_are_seen():
    def found(sent_bytes, right, cores=8):
        turns = {"gloo": [{"seconds": 1.0, "sent_bytes": 1, "right": True}]}
        turns["ring"] = [{"seconds": 0.5, "sent_bytes": sent_bytes, "right": right}]
        measured = {"alpha_s": 1e-3, "beta_s_per_byte": 1e-6, "cores": cores, "turns": {"4096": turns}}
        return links._finding(measured, 4096, 2)

    assert found(4096, True).reached
    assert not found(4100, True).reached
    assert not found(4096, False).reached
    assert "| ring | 500.000 | 6.096 | 2.00 | 2 | 4096 | 4096 |" in found(4096, True).details
    assert "| ring | 500.000 | 12.192 |" in found(4096, True, cores=1).details, "four messages, one core"


@pytest.mark.timeout(90)
def test_the_suite_races_gloo_and_writes_a_record(tmp_path, monkeypatch):
    monkeypatch.setattr(links, "SIZES", (links.SIZES[0], links.SIZES[2]))
    asked = ["bench", "links", "--processes", "2", "--rounds", "2", "--only", "ring,two_level", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "findings.json").read_text())
    assert [one["what"] for one in found] == ["sum of 4 KiB over 2 processes", "sum of 1024 KiB over 2 processes"]
    for one in found:
        assert one["reached"]
        assert [line.split()[1] for line in one["details"].splitlines()[4:]] == ["gloo", "ring", "two_level"]
        assert one["details"] in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    ("only", "processes", "message"),
    [(["rings"], 4, "no collective named 'rings'"), ([], 1, "2 processes and 1 round or more, got 1 and 7")],
)
def test_mistakes_are_told_before_anything_starts(only, processes, message):
    with pytest.raises(ValueError, match=message):
        next(links.run(only, 7, print, processes))
