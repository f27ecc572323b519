"""A report is one self-contained file that shows the event log, accessible, on any device, without network access."""

import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import records
from browser import lacks, opened
from needs import want
from paceline.report.page import page
from paceline.report.page.run import load
from paceline.report.record import read
from records import step, write

CSS = (Path(page.__file__).parent / "page.css").read_text()
VOID = {"meta", "input", "path", "wbr"}


def made(tmp_path, *runs):
    out = tmp_path / "report.html"
    page.write(runs, out)
    return out.read_text(encoding="utf-8")


def charts(text):
    """Key -> the chart's data for its script: axes and lines."""
    found = re.findall(
        r'<figure class="card chart[^"]*" id="([^"]+)".*?<script type="application/json">(.*?)</script>',
        text,
        re.DOTALL,
    )
    return {key: json.loads(data) for key, data in found}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run = records.whole(folder / "alexnet", num_steps=120)
    return run, made(folder, run)


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    folder = tmp_path_factory.mktemp("six")
    runs = [records.whole(folder / f"run{i}", num_steps=600, seed=i, speed=1 / (1 + i / 5)) for i in range(6)]
    return made(folder, *runs)


class Checked(HTMLParser):
    """Tags must close in order; ids must be unique, and every id that is referenced must exist."""

    def __init__(self, text):
        super().__init__()
        self.stack, self.ids, self.referred = [], [], set()
        self.feed(text)
        assert self.stack == []
        assert len(self.ids) == len(set(self.ids))
        assert self.referred <= set(self.ids)

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        self.ids += [named["id"]] if "id" in named else []
        for name in ("aria-labelledby", "aria-describedby"):
            self.referred |= set((named.get(name) or "").split())
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag


def test_it_is_one_well_formed_file(whole, six):
    for text in (whole[1], six):
        Checked(text)
        assert not re.search(r"https?://|\bsrc=|\bhref=|url\(|@import|<link|<img|<iframe", text)
        assert "default-src 'none'" in text


def test_curves_are_the_record(whole):
    run, text = whole
    steps = [event for event in read(run) if event["event"] == "step"]
    shown = charts(text)
    (loss,) = shown["loss-by-step"]["lines"]
    assert loss["x"] == [event["step"] for event in steps]
    assert loss["y"] == pytest.approx([event["loss"] for event in steps], rel=1e-5)
    (speed,) = shown["throughput-by-step"]["lines"]
    assert speed["y"] == pytest.approx([event["weight"] / event["seconds"] for event in steps], rel=1e-5)
    assert shown["loss"]["x"][2] == "time (s)"
    test, training = shown["accuracy"]["lines"]
    epochs = [event for event in read(run) if event["event"] == "epoch"]
    assert test["y"] == pytest.approx([100 * event["test_accuracy"] for event in epochs], rel=1e-5)
    assert training["y"] == pytest.approx([100 * event["right"] / event["rows"] for event in epochs], rel=1e-5)
    cores, machine = shown["cpu"]["lines"]
    usage = [event for event in read(run) if event["event"] == "usage"]
    assert cores["y"] == pytest.approx([event["cpu_percent"] / 100 for event in usage], rel=1e-5)
    assert machine["y"] == pytest.approx([event["machine_cpu_percent"] / 50 for event in usage], rel=1e-5)


def test_every_chart_is_there_and_has_a_table(whole):
    _, text = whole
    machine = {"cpu", "memory", "network", "disk", "switches", "bytes", "bytes-by-step"}
    training = {f"{name}{by}" for name in ("loss", "accuracy", "throughput", "exposed") for by in ("", "-by-step")}
    assert set(charts(text)) == machine | training
    assert text.count("<summary>Values</summary>") == len(charts(text)) + 1
    assert "swap" not in charts(text), "nothing was swapped, so nothing is drawn"


def test_the_time_of_a_step_adds_up(whole):
    run, text = whole
    parts = re.search(r"Where a step's time goes.*?<ul>(.*?)</ul>", text, re.DOTALL)[1]
    shares = [int(share) for share in re.findall(r"<i>(\d+) %</i>", parts)]
    assert len(shares) == 5
    assert abs(sum(shares) - 100) <= 3
    compute = np.mean([event["compute_seconds"] for event in read(run) if event["event"] == "step"])
    shown = re.search(r"forward and backward</span><b>([\d.]+)\u00a0ms", parts)[1]
    assert float(shown) == pytest.approx(1000 * compute, rel=0.01)


def test_bars_are_the_plan(whole):
    _, text = whole
    rows = dict(re.findall(r'<span class="name">(.*?)</span>.*?<span class="value">(.*?)</span>', text))
    assert rows == {
        "sequential": "1.00x<small>1.00x</small>",
        "threads:2": "1.23x<small>1.28x</small>",
        "processes:2": "1.39x<small>1.29x</small>",
        "stages:2": "<small>0.64x</small>",
    }
    for row in records.PLAN["rows"]:
        assert row["reason"] in text
    assert "exact, local BN" in text
    assert "<strong>processes:2</strong>, fastest of 3 measured" in text


def test_runs_stand_side_by_side_on_the_same_axes(tmp_path):
    fast = records.whole(tmp_path / "fast", num_steps=60, speed=1.0)
    slow = records.whole(tmp_path / "slow", num_steps=60, speed=0.5, plan=None)
    text = made(tmp_path, fast, slow)
    names = [line["name"] for line in charts(text)["throughput-by-step"]["lines"]]
    assert names == ["fast", "slow"]
    ratio = re.search(r"<th scope=\"row\">samples/s</th>.*?\((1\.00x)\).*?\((.*?)x\)", text)
    assert float(ratio[2]) == pytest.approx(0.5, abs=0.05)
    assert text.count('class="card bars speedups') == 1
    again = made(tmp_path, fast, records.whole(tmp_path / "other" / "fast", num_steps=60))
    assert "other/fast" in again, "two folders of one name are told apart"


def test_a_run_without_plan_epochs_or_usage_still_gives_a_page(tmp_path):
    text = made(tmp_path, write(tmp_path / "bare", records.join(), step(0), step(1)))
    assert set(charts(text)) == {"loss", "loss-by-step", "throughput", "throughput-by-step"}
    only_joined = made(tmp_path, write(tmp_path / "joined", records.join()))
    assert charts(only_joined) == {}
    odd = {"loss": "nan", "weight": 0.0, "seconds": 0.0}
    assert "not yet, or killed" in made(tmp_path, write(tmp_path / "odd", step(0, **odd), {"event": "news", "x": None}))


def test_a_failed_plan_row_is_shown_with_its_reason(tmp_path):
    failed = {"engine": "processes:9", "measured_s": "inf", "speedup": 0.0, "reason": "failed: out of memory"}
    plan = {"event": "plan", "chosen": "sequential", "reason": "only one ran", "rows": [failed, "not a row"]}
    assert "failed: out of memory" in made(tmp_path, write(tmp_path / "run", plan, step(0)))


def test_a_plan_of_many_rows_shows_those_that_were_tried(tmp_path):
    """A candidate that was not measured has a predicted speedup, which must not be shown as measured."""
    tried = {4, 11}
    rows = [
        {"engine": f"row{i}", "predicted_s": 1.0 + i, "measured_s": 2.0 if i in tried | {0} else None, "speedup": 1.0}
        for i in range(20)
    ]
    plan = {"event": "plan", "chosen": "row3", "reason": "why not", "rows": rows}
    text = made(tmp_path, write(tmp_path / "run", plan, step(0)))
    shown = re.findall(
        r'<span class="name">row(\d+)</span>.*?<span class="tracks">(.*?)</span><span class="value">', text
    )
    assert [int(name) for name, _ in shown] == [0, 1, 2, 3, 4, 5, 6, 11]
    assert {int(name) for name, bars in shown if 'class="measured"' in bars} == tried | {0}
    assert "All 20 candidates" in text
    assert "<dt>speedup</dt>" not in text, "the chosen row was not measured"


def test_words_of_a_record_are_never_markup(tmp_path):
    evil = "</script><img src=x onerror=alert(1)>"
    plan = {"event": "plan", "chosen": evil, "reason": evil, "rows": [{"engine": evil, "speedup": 2, "reason": evil}]}
    hint = {"event": "hint", "text": evil}
    run = write(tmp_path / "<b>&\"'", plan, records.join(engine=evil), step(0), hint, {"event": "end", "reason": evil})
    for text in (made(tmp_path, run), made(tmp_path, run, records.whole(tmp_path / "other", num_steps=6))):
        Checked(text)
        assert "<img" not in text
        assert "<b>&\"'" not in text


def test_long_runs_are_thinned_and_keep_their_extremes(tmp_path):
    number = 60_000
    spike = {31_234: 50.0}
    run = write(tmp_path / "long", *(step(n, loss=spike.get(n, 1.0 + n % 7 / 10)) for n in range(number)))
    text = made(tmp_path, run)
    assert len(text) < 200_000
    (line,) = charts(text)["loss-by-step"]["lines"]
    assert len(line["x"]) == 300
    assert "between 1 and 50" in text
    from paceline.report.page.charts import Downsampled

    thin = Downsampled.of(load(run).steps["step"], load(run).steps["loss"], 300)
    assert thin.high.max() == 50
    assert (thin.low <= thin.mid).all()
    assert (thin.mid <= thin.high).all()


def test_six_long_runs_stay_below_a_megabyte(six):
    assert len(six.encode()) < 1_000_000


@pytest.mark.parametrize("count", [0, 7])
def test_no_more_runs_than_colours(tmp_path, count):
    runs = [write(tmp_path / str(i), step(0)) for i in range(count)]
    with pytest.raises(ValueError, match=f"shows 1 to 6 runs, got {count}"):
        page.write(runs, tmp_path / "report.html")


def test_nothing_is_written_over_when_a_run_cannot_be_read(tmp_path):
    out = tmp_path / "report.html"
    out.write_text("before")
    with pytest.raises(ValueError, match="no such folder"):
        page.write([tmp_path / "nowhere"], out)
    assert out.read_text() == "before"
    with pytest.raises(ValueError, match=r"is a folder; name the page to write, such as .*report\.html"):
        page.write([write(tmp_path / "run", step(0))], tmp_path)


# sRGB as seen by people whose long, middle or short cones are missing: Machado, Oliveira & Fernandes 2009
VISIONS = {
    "all": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "no long": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "no middle": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "no short": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def scheme(name):
    light, dark = CSS.split("@media (prefers-color-scheme: dark)")
    part = {"light": light, "dark": dark.split("}\n}")[0]}[name]
    found = re.findall(r"--([\w-]+): #(\w\w)(\w\w)(\w\w)", part)
    return {key: _linear(np.array([int(c, 16) / 255 for c in rgb])) for key, *rgb in found}


def _linear(c):
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def contrast(a, b):
    dark, light = sorted(float(TO_XYZ[1] @ colour) for colour in (a, b))
    return (light + 0.05) / (dark + 0.05)


def lab(linear):
    x, y, z = (np.cbrt(v) if v > 0.008856 else 7.787 * v + 16 / 116 for v in TO_XYZ @ linear / [0.9505, 1, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("name", ["light", "dark"])
def test_words_and_curves_can_be_seen_by_everybody(name):
    colours = scheme(name)
    for words, behind in itertools.product(("ink", "soft"), ("paper", "card")):
        assert contrast(colours[words], colours[behind]) >= 4.5
    curves = [colours[f"run-{i}"] for i in range(page.MAX_RUNS)]
    for curve in (*curves, *(colours[part] for part in ("wait", "compute", "exchange", "update", "other"))):
        assert contrast(curve, colours["card"]) >= 3
    for seen in VISIONS.values():
        shades = [lab(np.clip(np.array(seen) @ curve, 0, 1)) for curve in curves]
        assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(shades, 2)) > 15


@pytest.fixture(scope="module")
def chrome():
    want(**lacks())
    with opened() as browser:
        yield browser


@pytest.fixture
def visit(chrome, whole, six, tmp_path):
    """Opens a page; afterwards there must be no console message and no network request."""
    messages, requests, contexts = [], [], []

    def visit(text, width, colours="light", script=True):
        (tmp_path / "page.html").write_text(text, encoding="utf-8")
        viewport = {"width": width, "height": 800}
        contexts.append(chrome.new_context(viewport=viewport, color_scheme=colours, java_script_enabled=script))
        opened = contexts[-1].new_page()
        opened.on("console", lambda message: messages.append(message.text))
        opened.on("pageerror", lambda error: messages.append(str(error)))
        opened.on("request", lambda request: requests.append(request.url))
        opened.goto((tmp_path / "page.html").as_uri())
        return opened

    yield visit
    for context in contexts:
        context.close()
    assert messages == []
    assert set(requests) == {(tmp_path / "page.html").as_uri()}


@pytest.mark.dear("360")
@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1400])
def test_it_fits_phones_and_desks_by_day_and_night(visit, whole, six, width, colours):
    for text in (whole[1], six):
        opened = visit(text, width, colours)
        assert opened.evaluate("document.documentElement.scrollWidth") == width
        opened.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
        assert opened.evaluate("document.documentElement.scrollWidth") == width
        red = opened.evaluate("Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])")
        assert (red < 60) == (colours == "dark")
        lefts = {
            round(box["x"])
            for box in (c.bounding_box() for c in opened.locator("#loss-by-step, #accuracy-by-step").all())
        }
        assert len(lefts) == (1 if width == 360 else 2)


def test_the_pointer_and_the_arrows_show_values(visit, whole):
    run, text = whole
    losses = {event["step"]: event["loss"] for event in read(run) if event["event"] == "step"}
    opened = visit(text, 1400)
    opened.locator("#loss-by-step .plot").hover()
    text = opened.locator("#loss-by-step .tips").inner_text()
    at, value = re.search(r"step: (\d+)\s+loss\s+([\d.]+)", text).groups()
    assert float(value) == pytest.approx(losses[int(at)], rel=1e-3)
    assert 55 <= int(at) <= 65, "the middle of 120 steps"
    opened.mouse.move(0, 0)
    assert opened.locator(".tips").count() == 0
    opened.locator("#loss-by-step .plot").focus()
    for _ in range(3):
        opened.keyboard.press("ArrowRight")
    assert int(re.search(r"step: (\d+)", opened.locator(".tips").inner_text())[1]) in range(5, 10)


def test_runs_and_axes_can_be_chosen(visit, six):
    opened = visit(six, 1400)
    curve = opened.locator("#loss-by-step .line.run-1")
    assert curve.is_visible()
    opened.locator("#show-1").uncheck()
    assert not curve.is_visible()
    assert opened.locator("#loss-by-step .line.run-2").is_visible()
    opened.locator("#loss-by-step .plot").hover()
    assert "run1" not in opened.locator(".tips").inner_text()
    assert not opened.locator("#loss").is_visible()
    opened.locator("#along-time").check()
    assert opened.locator("#loss").is_visible()
    assert not opened.locator("#loss-by-step").is_visible()


def test_without_a_script_the_curves_are_there(visit, whole):
    opened = visit(whole[1], 360, script=False)
    assert opened.locator("#loss-by-step .line").is_visible()
    opened.locator("#loss-by-step summary").click()
    assert opened.locator("#loss-by-step tbody tr").count() == 12
