"""Runs on different numbers of nodes: speedup, efficiency and bytes are computed from their event logs."""

import json
import re

import pytest

from browser import lacks, opened
from needs import needs
from paceline.planner.plan_file import Plan, Row
from paceline.planner.teams import Team
from paceline.report.page import page
from paceline.report.page.run import load
from paceline.report.page.scaling import scaling
from records import join, step, write


def run(folder, nodes, batch, seconds, predicted=None, **fields):
    """Forty equal steps; if a prediction is given, also a plan for several numbers of nodes."""
    rows = tuple(Row("sequential", s) for n, s in (predicted or {}).items() if n == 1)
    teams = tuple(Team(n, "a,b,c,d"[: 2 * n - 1], batch_size=64, predicted_s=s) for n, s in (predicted or {}).items())
    imagined = Team(nodes, "", batch_size=batch, link="1gbit", predicted_s=9.0)
    plan = [{"event": "plan", **Plan("sequential", rows=rows, teams=(imagined, *teams)).to_dict()}] if predicted else []
    exchange = {"exchange_seconds": 0.1 * seconds, "sent_bytes": 12_500_000} if nodes > 1 else {"exchange_seconds": 0.0}
    steps = [
        step(i, weight=float(batch), seconds=seconds, **exchange, time=1_800_000_001.0 + i * seconds) for i in range(40)
    ]
    join_event = join(engine="sequential", num_nodes=nodes, batch_size=batch, time=1_800_000_000.0, **fields)
    return write(folder, *plan, join_event, *steps)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Strong: batch 64 on 1, 2 and 4 nodes. Weak: 64 rows per node on 1 and 2."""
    folder = tmp_path_factory.mktemp("scaling")
    predicted = {1: 1.0, 2: 0.5, 4: 0.25}
    return [
        run(folder / "four", 4, 64, 0.32, predicted),
        run(folder / "one", 1, 64, 1.0, predicted),
        run(folder / "two", 2, 64, 0.55, predicted),
        run(folder / "two-large", 2, 128, 1.1),
    ]


def items(text, title):
    """A figure's (name, reason, value) for each run."""
    figure = re.search(rf"<h3>Speedup: {re.escape(title)}</h3>.*?</figure>", text, re.DOTALL)[0]
    return re.findall(
        r'<span class="name">(.*?)</span><span class="reason">(.*?)</span>.*?<span class="value">(.*?)</span>',
        figure,
        re.DOTALL,
    )


def words(text):
    return text.replace("\u00a0", " ")


def test_strong_and_weak_are_told_apart_by_the_global_batch(folders):
    text = words(scaling([load(folder) for folder in folders]))
    strong = items(text, "strong scaling, global batch 64")
    assert [(name, value) for name, _, value in strong] == [
        ("1 node", "1.00x<small>1.00x</small>"),
        ("2 nodes", "1.82x<small>2.00x</small>"),
        ("4 nodes", "3.12x<small>4.00x</small>"),
    ]
    assert strong[0][1] == ""
    assert strong[1][1] == "91 % efficient, 12.5 MB per node and step, 10 % exposed"
    assert strong[2][1] == "78 % efficient, 12.5 MB per node and step, 10 % exposed"
    weak = items(text, "weak scaling, 64 rows per node")
    assert [(name, value) for name, _, value in weak] == [
        ("1 node, batch 64", "1.00x<small>1.00x</small>"),
        ("2 nodes, batch 128", "1.82x"),
    ]
    assert text.count("<figure") == 4


def test_the_chart_has_what_was_measured_predicted_and_in_proportion(folders):
    text = words(scaling([load(folder) for folder in folders[:3]]))
    data = re.search(r'id="scaling-0".*?"lines":(\[.*?\])\}<', text, re.DOTALL)[1]
    lines = {line["name"]: (line["x"], line["y"]) for line in json.loads(data)}
    assert lines["measured"][0] == [1, 2, 4]
    assert lines["measured"][1] == pytest.approx([64, 64 / 0.55, 64 / 0.32], rel=1e-5)
    assert lines["in proportion"][1] == pytest.approx([64, 128, 256])
    assert lines["predicted"][1] == pytest.approx([64, 128, 256])


@pytest.mark.parametrize("which", [[0], [0, 0], [2, 3], []])
def test_without_different_nodes_for_like_batches_nothing_is_drawn(folders, which):
    """Two nodes twice, or one run twice, show no scaling."""
    assert scaling([load(folders[i]) for i in which]) == ""


def test_the_fewest_nodes_are_the_base(folders):
    text = words(scaling([load(folders[2]), load(folders[0])]))
    assert "throughput over that of 2 nodes" in text
    (two, four) = items(text, "strong scaling, global batch 64")
    assert (two[2], four[2]) == ("1.00x<small>1.00x</small>", "1.72x<small>2.00x</small>")
    assert four[1].startswith("86 % efficient")


def test_emulated_runs_say_so(folders, tmp_path):
    other = run(tmp_path / "emulated", 8, 64, 0.2, emulated=True)
    assert "8 nodes, emulated" in scaling([load(folders[1]), load(other)])
    for which, shown in ((other, True), (folders[1], False)):
        page.write([which], tmp_path / "report.html")
        text = (tmp_path / "report.html").read_text(encoding="utf-8")
        assert ("sequential, emulated" in text, "Emulated: " in text) == (shown, shown)


def test_one_run_says_what_it_sent_and_did_not_hide(folders, tmp_path):
    page.write([folders[0]], tmp_path / "report.html")
    text = words((tmp_path / "report.html").read_text(encoding="utf-8"))
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text))
    assert facts["sent per step"] == "12.5 MB"
    assert facts["exposed communication"] == "32 ms, 10 %"
    assert facts["predicted step"] == "250 ms"
    assert 'id="exposed-by-step"' in text
    page.write([folders[1]], tmp_path / "one.html")
    one = words((tmp_path / "one.html").read_text(encoding="utf-8"))
    assert "exposed" not in one.partition("<main>")[2].lower(), "one node waits for nobody"
    assert "sent per step" not in one


@pytest.mark.dear
@needs(**lacks())
@pytest.mark.parametrize("colours", ["light", "dark"])
def test_it_fits_phones_and_desks_by_day_and_night(folders, tmp_path, colours):
    page.write(folders, tmp_path / "report.html")
    with opened() as browser:
        for width in (360, 1400):
            context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=colours)
            shown = context.new_page()
            shown.goto((tmp_path / "report.html").as_uri())
            assert shown.evaluate("document.documentElement.scrollWidth") == width
            line = shown.locator("#scaling-0 .line").first
            stroke, paper = (
                line.evaluate("e => getComputedStyle(e).stroke"),
                shown.evaluate("getComputedStyle(document.body).backgroundColor"),
            )
            assert stroke not in ("none", paper)
            shown.locator("#show-0").uncheck()
            assert line.is_visible(), "what is about all runs stays"
            shown.locator("#scaling-0 .plot").hover()
            assert "in proportion" in shown.locator("#scaling-0 .tips").inner_text()
            context.close()
