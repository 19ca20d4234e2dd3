"""HTML elements of the report. All content of a run is inserted through `escape_text`, which escapes it."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STYLE = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
# Control characters, and bidirectional overrides, which reorder the displayed text.
CONTROL_CHARS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u202a-\u202e\u2066-\u2069]")
MAX_TEXT_CHARS = 6000  # characters of one text


def visible_text(value: Any) -> str:
    """Returns `value` as text in which control characters are visible, and half characters are question marks."""
    shown = CONTROL_CHARS.sub(lambda match: f"\\u{ord(match[0]):04x}", str(value))
    return shown.encode("utf-8", "replace").decode()


def escape_text(value: Any, max_chars: int = MAX_TEXT_CHARS) -> str:
    """Returns `value` as escaped, visible HTML text, cut with a note beyond `max_chars` characters."""
    shown = visible_text(value)
    text = html.escape(shown[:max_chars])
    if len(shown) > max_chars:
        text += f" <i>[{len(shown) - max_chars} more letters]</i>"
    return text


def html_table(head: Sequence[str], rows: Sequence[Sequence[Any]], *, css_class: str = "") -> str:
    """Returns an HTML table; columns after the first are right-aligned numbers. "" without rows."""
    if not rows:
        return ""
    top = "".join(f"<th>{escape_text(name)}</th>" for name in head)
    body = ""
    for row in rows:
        body += f"<tr>{''.join(f'<td>{escape_text(cell, 400)}</td>' for cell in row)}</tr>"
    return (
        f'<div class="wide"><table class="{css_class}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def section(title: str, *texts: str) -> str:
    """Returns a section of the page; "" if all parts are empty."""
    inside = "\n".join(text for text in texts if text)
    return f"<section><h2>{escape_text(title)}</h2>\n{inside}</section>" if inside else ""


def block(css_class: str, inside: str) -> str:
    """Returns a block of the CSS class; "" if nothing is inside."""
    return f'<div class="{css_class}">{inside}</div>' if inside else ""


def notebook_html(inside: str) -> str:
    """Returns HTML for the output of a notebook's cell, with the style of the report."""
    return f'<div class="palestra"><style>{STYLE}</style>{inside}</div>'


def details(summary: str, inside: str) -> str:
    """Returns a collapsible element; `summary` and `inside` are HTML."""
    return f"<details><summary>{summary}</summary>{inside}</details>"


def text_block(value: Any, css_class: str = "") -> str:
    """Returns `value` as escaped preformatted text; `css_class` is its CSS class."""
    max_chars = MAX_TEXT_CHARS
    if css_class == "config":
        max_chars *= 20
    return f'<pre class="{css_class}">{escape_text(value, max_chars)}</pre>'


def format_number(value: float | None, digits: int = 2, kind: str = "f") -> str:
    """Returns a number with `digits` decimals; "-" for None. `kind` "%" writes a share in percent."""
    return "-" if value is None else f"{value:.{digits}{kind}}"
