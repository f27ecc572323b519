"""Write docs/architecture.md from the first sentence of every module: `python scripts/write_tree.py`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent
PAGE = HOME / "docs" / "architecture.md"
HEAD = """# Architecture: every module, in a sentence

Written by `scripts/write_tree.py` from the sources' own first lines; do not edit. A room's top level holds what one may
choose (methods) or call (doors); its sub-folders hold their organs. Imports go down only, as `ROOMS` in
`tests/laws/test_rooms.py` says. `paceline_bench`, in `bench/`, is a distribution of its own. [Seven walks](walks.md)
lead through the code.

"""


def sentence(path: Path) -> str:
    """The first of a module's docstring, without its full stop."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split()).partition(". ")[0].rstrip(".")


def lines(folder: Path, depth: int) -> Iterator[str]:
    """Of a package: itself, its modules, then its sub-packages."""
    yield f"{'  ' * depth}- `{folder.name}/` {sentence(folder / '__init__.py')}"
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            yield f"{'  ' * (depth + 1)}- `{path.name}` {sentence(path)}"
    for below in sorted(path.parent for path in folder.glob("*/__init__.py")):
        yield from lines(below, depth + 1)


def page() -> str:
    packages = [HOME / "src" / "paceline", HOME / "bench" / "src" / "paceline_bench"]
    return HEAD + "\n".join(line for package in packages for line in lines(package, 0)) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
