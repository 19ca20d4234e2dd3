"""Pieces of a page. Whatever a run says is text here: `text` escapes it, and nothing else lets it into a page."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Any

CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u202a-\u202e\u2066-\u2069]")  # unseen, or turning what is seen
LONGEST = 6000  # letters of one text


def text(value: Any, longest: int = LONGEST) -> str:
    """`value` as escaped text; controls become visible, what is longer is cut and said to be."""
    shown = CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", str(value))
    shown = shown.encode("utf-8", "replace").decode()
    rest = len(shown) - longest
    return html.escape(shown[:longest]) + (f" <i>[{rest} more letters]</i>" if rest > 0 else "")


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], *, kind: str = "") -> str:
    """A table of texts; every column but the first holds figures. "" where there are no rows."""
    if not rows:
        return ""
    top = "".join(f"<th>{text(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(_cell(cell) for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table class="{kind}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(value: Any) -> str:
    return f"<td>{text(value, 400)}</td>"


def section(title: str, *parts: str) -> str:
    """A part of the page; "" where there is nothing in it."""
    inside = "\n".join(part for part in parts if part)
    return f"<section><h2>{text(title)}</h2>\n{inside}</section>" if inside else ""


def details(summary: str, inside: str) -> str:
    """What is folded until it is asked for, or printed; `summary` and `inside` are HTML."""
    return f"<details><summary>{summary}</summary>{inside}</details>"


def pre(value: Any, kind: str = "") -> str:
    return f'<pre class="{kind}">{text(value, 20 * LONGEST if kind == "config" else LONGEST)}</pre>'


def figure(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
