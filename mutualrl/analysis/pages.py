"""Parts of HTML pages that need nothing else: tables with coloured cells, lists, and the page around them; and the same
tables for the terminal."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from rich.table import Table

CSS = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 1280px; margin: 2em auto;
  padding: 0 1.2em }
table { border-collapse: collapse; margin: .6em 0 1.2em; font-variant-numeric: tabular-nums; font-size: 13.5px }
th, td { padding: .25em .7em; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
th:first-child, td:first-child { text-align: left } .wide { overflow-x: auto }
.better { color: #00527f; font-weight: 600 } .worse { color: #a84600; font-weight: 600 }
svg { max-width: 100%; height: auto } .note { color: #555; font-size: 13.5px }
"""

Cell = tuple[str, str]  # text; `better`, `worse`, or '' or anything else for no colour


def document(title: str, parts: Sequence[str]) -> str:
    """A whole page of HTML parts; empty ones are left out."""
    body = "\n".join(p for p in parts if p)
    return (
        f"<!DOCTYPE html>\n<html lang=en><head><meta charset=utf-8><title>{text(title)}</title><style>{CSS}</style>"
        f"</head><body>\n{body}\n</body></html>\n"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A table; its first column is for names."""
    lines = ["<div class=wide><table><tr>" + "".join(f"<th>{text(h)}</th>" for h in head) + "</tr>"]
    for row in rows:
        cells = (f"<td{f' class={mark}' if mark in ('better', 'worse') else ''}>{text(t)}</td>" for t, mark in row)
        lines.append("<tr>" + "".join(cells) + "</tr>")
    return "\n".join(lines) + "\n</table></div>"


def printable(title: str, head: Sequence[str], rows: Sequence[Sequence[Cell]], names: int) -> Table:
    """The same for the terminal; the first columns, `names` of them, are for names."""
    out = Table(title=title)
    for i, name in enumerate(head):
        out.add_column(name, justify="left" if i < names else "right", no_wrap=i < names)
    for row in rows:
        out.add_row(*(t.replace("[", r"\[") for t, _ in row))
    return out


def bullets(texts: Sequence[str]) -> str:
    """A list; '' without texts."""
    return "<ul>" + "".join(f"<li>{text(t)}</li>" for t in texts) + "</ul>" if texts else ""


def text(plain: str) -> str:
    """Plain text as HTML."""
    return html.escape(plain)


def number(x: float | None) -> str:
    """Three digits; '' where there is no number."""
    return "" if x is None or not math.isfinite(x) else f"{x:.3g}"
