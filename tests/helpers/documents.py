"""The runnable blocks of a document; tests/project/test_docs.py says how they are marked."""

import re
from pathlib import Path
from typing import NamedTuple

BLOCK = re.compile(
    r"^<!--\s*(?P<comment>test(?P<slow>:\s*slow)?|file:\s*(?P<file>\S+)|not run: [^\n]*?)\s*-->\s*\n"
    r"```(?P<language>\w+)[^\n]*\n(?P<code>.*?)^```",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    line: int
    language: str
    code: str
    slow: bool
    file: str = ""


def blocks(text: str, comment: str = "test") -> list[Block]:
    """The files of a document, in order, and its blocks whose comments begin with `comment`."""
    return [
        Block(
            text[: match.start("code")].count("\n") + 1,
            match["language"],
            match["code"],
            bool(match["slow"]),
            match["file"] or "",
        )
        for match in BLOCK.finditer(text)
        if match["file"] or match["comment"].startswith(comment)
    ]


def blocks_below(page: Path, heading: str, comment: str = "test") -> list[Block]:
    """The blocks below a heading of any level, to the next of the same or a higher one. Fails if there are none."""
    text = page.read_text(encoding="utf-8")
    (start,) = re.finditer(rf"^(#+) {re.escape(heading)}$", text, re.MULTILINE)
    fences = re.sub(r"^```.*?^```", lambda found: " " * len(found.group()), text, flags=re.MULTILINE | re.DOTALL)
    end = re.compile(rf"^#{{1,{len(start[1])}}} ", re.MULTILINE).search(fences, start.end())
    found = blocks(text[start.start() : end.start() if end else None], comment)
    assert found, f"{page} has no runnable block below {heading}"
    return found
