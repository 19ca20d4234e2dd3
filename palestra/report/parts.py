"""HTML elements of the report. All content of a run is inserted through `text`, which escapes it."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Any

# Control characters, and bidirectional overrides, which reorder the displayed text.
CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u202a-\u202e\u2066-\u2069]")
LONGEST = 6000  # characters of one text


def text(value: Any, longest: int = LONGEST) -> str:
    """Returns `value` as escaped HTML text: control characters are made visible, text beyond `longest` characters is
    cut with a note."""
    shown = CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", str(value))
    shown = shown.encode("utf-8", "replace").decode()
    rest = len(shown) - longest
    return html.escape(shown[:longest]) + (f" <i>[{rest} more letters]</i>" if rest > 0 else "")


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], *, kind: str = "") -> str:
    """Returns an HTML table; columns after the first are right-aligned numbers. "" without rows."""
    if not rows:
        return ""
    top = "".join(f"<th>{text(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(_cell(cell) for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table class="{kind}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(value: Any) -> str:
    return f"<td>{text(value, 400)}</td>"


def section(title: str, *parts: str) -> str:
    """Returns a section of the page; "" if all parts are empty."""
    inside = "\n".join(part for part in parts if part)
    return f"<section><h2>{text(title)}</h2>\n{inside}</section>" if inside else ""


def details(summary: str, inside: str) -> str:
    """Returns a collapsible element; `summary` and `inside` are HTML."""
    return f"<details><summary>{summary}</summary>{inside}</details>"


def pre(value: Any, kind: str = "") -> str:
    """Returns `value` as escaped preformatted text; `kind` is its CSS class."""
    return f'<pre class="{kind}">{text(value, 20 * LONGEST if kind == "config" else LONGEST)}</pre>'


def figure(value: float | None, digits: int = 2) -> str:
    """Returns a number with `digits` decimals; "-" for None."""
    return "-" if value is None else f"{value:.{digits}f}"
