"""The pages tell the truth: architecture, options, variables, keys, messages, links, and the code in them."""

import ast
import dataclasses
import os
import re
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline import registry
from paceline.engine.compute import precision
from paceline.planner.plan_file import Plan, Row
from paceline.planner.teams import Team
from paceline.testing import laws

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
SOURCES = sorted(path for folder in ("src", "bench/src") for path in (ROOT / folder).rglob("*.py"))


def test_the_page_of_the_architecture_is_that_of_the_sources():
    write = runpy.run_path(str(ROOT / "scripts" / "write_tree.py"))
    page = write["page"]()
    kept = (DOCS / "architecture.md").read_text().splitlines()
    assert [line for line in page.splitlines() if line in kept] == kept, "run: python scripts/write_tree.py"
    methods = tuple(f"- `{name}.py`" for room in registry.ROOMS for name in registry.names(room))
    missing = [line for line in page.splitlines() if line not in kept and not line.strip().startswith(methods)]
    assert missing == [], "run: python scripts/write_tree.py"  # a new method is one new file, and may be missing
    assert re.findall(r"^ *- `[\w.]+/?` *$", page, re.MULTILINE) == [], "a module without a sentence"


def test_the_indexes_name_all_that_is_there():
    write = runpy.run_path(str(ROOT / "scripts" / "write_indexes.py"))
    for path, text in write["pages"]().items():
        assert text == path.read_text(), "run: python scripts/write_indexes.py"
    decisions = {path.name for path in (DOCS / "decisions").glob("0*.md")}
    assert set(re.findall(r"\((\d{4}-[\w-]+\.md)\)", (DOCS / "decisions/README.md").read_text())) == decisions


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_bytes()) <= 6000


def test_the_table_of_options_is_that_of_the_command_line():
    write = runpy.run_path(str(ROOT / "scripts" / "write_options.py"))
    old = (DOCS / "options.md").read_text()
    assert write["page"](old) == old, "run: python scripts/write_options.py"


def test_every_variable_key_and_word_is_explained():
    page = (DOCS / "options.md").read_text()
    names = {name for path in SOURCES for name in re.findall(r"PACELINE_[A-Z_]+", path.read_text())}
    names |= {field.name for kind in (Plan, Row, Team) for field in dataclasses.fields(kind)}
    names |= set(precision.OPTIONS)
    assert {name for name in names if f"`{name}`" not in page} == set()


def messages() -> list[str]:
    """Every text in the sources; what a message fills in is a zero byte, unless it is the name of a default."""
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(map(_text, node.values)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def _text(part: ast.expr) -> str:
    if isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name):
        default = vars(registry).get(part.value.id)
        return "\0" if not isinstance(default, str) else repr(default) if part.conversion == ord("r") else default
    return str(part.value) if isinstance(part, ast.Constant) else "\0"


def test_every_message_that_is_explained_exists():
    quoted = re.findall(r"^### `(.+)`$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(quoted) >= 30
    texts = messages()
    strange = []
    for message in quoted:
        parts = [part.strip() for part in message.split("...")]
        assert sum(map(len, parts)) >= 12, message
        wanted = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
        if not any(wanted.search(text) for text in texts):
            strange.append(message)
    assert strange == []


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        assert not target.startswith("http"), "the pages need no network"
        name, _, place = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        if place:
            assert place in map(anchor, re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_in_the_pages_is_python_and_whole_scripts_run(page, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    whole = [block for block in blocks if block.startswith("import ") and "..." not in block]
    for block in blocks:
        ast.parse(block)
    if whole:
        script = tmp_path / "script.py"
        script.write_text("\n".join(whole))
        environment = {**os.environ, "PACELINE_ENGINE": "sequential", "XDG_CACHE_HOME": str(tmp_path)}
        command = [sys.executable, script]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("\n") >= len(whole)


def on_the_page(name):
    """What the first block of a page defines."""
    block = re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)[0]
    names: dict[str, object] = {}
    exec(block, names)
    return names


@pytest.mark.parametrize("law", laws("codec"), ids=str)
def test_the_codec_on_the_page_is_one(law):
    law(on_the_page("adding-a-codec.md")["Codec"])


@pytest.mark.parametrize("law", laws("exchange"), ids=str)
def test_the_exchange_on_the_page_is_one(law):
    law(on_the_page("adding-an-exchange.md")["Exchange"])


@pytest.mark.parametrize("law", laws("engine"), ids=str)
def test_the_engine_on_the_page_is_one(law):
    law(on_the_page("adding-an-engine.md")["Engine"])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("law", laws("link"), ids=str)
def test_the_link_on_the_page_is_one(law, size, tmp_path):
    link = on_the_page("adding-a-link.md")["Link"]
    with ThreadPoolExecutor(size) as ranks:
        list(ranks.map(lambda rank: law(link(tmp_path, rank, size)), range(size)))
