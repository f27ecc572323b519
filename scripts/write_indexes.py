"""Write the indexes of what grows by the day: `python scripts/write_indexes.py`.

LOG.md                 from docs/log/: every entry's title, under its day
benchmarks/README.md   from each record's title, and its lines `*Figure*:` and `*Superseded by*:`
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent
LOG = """# Log

What was tried, what it gave, what failed; newest first, "negative" in the title of what lost. What still holds of it is
in [decisions](docs/decisions/README.md). Written by `scripts/write_indexes.py` from `docs/log/`; do not edit.
"""
RECORDS = """# Records

Every figure that the pages name, with its command, environment and spread. Written by `scripts/write_indexes.py` from
the records' own lines; do not edit.

| day | machine | what | figure | superseded by |
|---|---|---|---|---|
"""
FOLDER = re.compile(r"(\d{4}-\d\d-\d\d)_([^_]+)_(.+)")


def anchor(title: str) -> str:
    """As GitHub makes it of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def log() -> Iterator[str]:
    for path in sorted((HOME / "docs/log").glob("*.md"), reverse=True):
        yield f"\n## [{path.stem}](docs/log/{path.name})\n"
        for title in re.findall(r"(?m)^## (.+)$", path.read_text(encoding="utf-8")):
            yield f"- [{title}](docs/log/{path.name}#{anchor(title)})"


def line(text: str, name: str) -> str:
    found = re.search(rf"(?m)^\*{name}\*: (.+)$", text)
    return found[1] if found else ""


def records() -> Iterator[str]:
    """Raises ValueError for one that names no figure, or one that is not there as its successor."""
    for folder in sorted((HOME / "benchmarks").glob("2*_*"), reverse=True):
        if not (made := FOLDER.fullmatch(folder.name)):
            raise ValueError(f"{folder} is not named <date>_<machine>_<what>")
        text = (folder / "README.md").read_text(encoding="utf-8")
        figure, later = line(text, "Figure"), line(text, "Superseded by")
        if not figure:
            raise ValueError(f"{folder}/README.md has no line that begins with *Figure*:")
        if later and not (HOME / "benchmarks" / later).is_dir():
            raise ValueError(f"{folder}/README.md is superseded by {later}, which is not there")
        link = f"[{FOLDER.fullmatch(later)[3]}]({later}/README.md)" if later else ""  # type: ignore[index]
        day, machine, what = made.groups()
        yield f"| {day} | {machine} | [{what}]({folder.name}/README.md) | {figure} | {link} |"


def pages() -> dict[Path, str]:
    return {
        HOME / "LOG.md": LOG + "\n".join(log()) + "\n",
        HOME / "benchmarks/README.md": RECORDS + "\n".join(records()) + "\n",
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
