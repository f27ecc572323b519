"""Rows of words as an HTML table that scrolls by itself where it is wider than the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

NONE = "\N{EN DASH}"  # what was not measured


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], name: str, kind: str = "", by: Sequence[str] = ()
) -> str:
    """``rows`` begin with their own heading. ``name`` is read aloud; ``by`` gives each column, or else row, a class."""
    body = []
    for i, (first, *cells) in enumerate(rows):
        whole = "" if len(by) == len(heads) or not by else f' class="{by[i]}"'
        tds = "".join(f"<td{_class(by, heads, j)}>{escape(cell) or NONE}</td>" for j, cell in enumerate(cells, 1))
        body.append(f'<tr{whole}><th scope="row">{escape(first)}</th>{tds}</tr>')
    head = "".join(f'<th scope="col"{_class(by, heads, j)}>{escape(text)}</th>' for j, text in enumerate(heads))
    return (
        f'<div class="scroll {kind}" tabindex="0" role="region" aria-label="{escape(name)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _class(by: Sequence[str], heads: Sequence[str], column: int) -> str:
    return f' class="{by[column]}"' if len(by) == len(heads) and by[column] else ""
