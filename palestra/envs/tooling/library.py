"""Documents and a full-text index over them (SQLite's FTS5, ranked by BM25), built once in a process and only read."""

from __future__ import annotations

import json
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from palestra.envs.tooling.scratch import Found, Scratch

OURS = Path(__file__).parent.parent / "text" / "data" / "corpus.jsonl"
MOST_WORDS = 32  # of a query that are looked for
TITLE_WEIGHT = 4.0  # a word of a title counts for so many of a text
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Document:
    """`facts` say in few words what the text holds: `{"inhabitants": "48,211"}`. Tasks are made of them."""

    title: str
    text: str
    facts: Mapping[str, str] = field(default_factory=dict)


class Index:
    """The library of these documents."""

    def __init__(self, documents: tuple[Document, ...], snippet: int = 24) -> None:
        self.documents, self.snippet = documents, snippet
        self._by_title = {document.title.casefold(): document for document in documents}
        self._lock = threading.Lock()
        self._table = sqlite3.connect(":memory:", check_same_thread=False)
        self._table.execute("CREATE VIRTUAL TABLE documents USING fts5(title, text, tokenize='porter unicode61')")
        self._table.executemany("INSERT INTO documents VALUES (?, ?)", [(d.title, d.text) for d in documents])
        self._table.execute("PRAGMA query_only = 1")

    def search(self, query: str, k: int) -> list[Found]:
        """Documents with any of the query's words. Only its words count: nothing in it is read as FTS5's language."""
        words = _WORD.findall(query)[:MOST_WORDS]
        if not words:
            return []
        asked = " OR ".join(f'"{word}"' for word in words)
        with self._lock:
            rows = self._table.execute(
                "SELECT title, snippet(documents, 1, '', '', '...', ?) FROM documents WHERE documents MATCH ? "
                "ORDER BY bm25(documents, ?, 1.0), rowid LIMIT ?",
                (self.snippet, asked, TITLE_WEIGHT, k),
            ).fetchall()
        return [Found(title, " ".join(snippet.split())) for title, snippet in rows]

    def read(self, title: str) -> str | None:
        document = self._by_title.get(title.strip().casefold())
        return f"{document.title}\n{document.text}" if document else None


@cache
def open_index(path: Path) -> Index:
    """The index over the documents at `path`, the same for all who ask in this process."""
    return Index(tuple(read_documents(path)))


def read_documents(path: Path) -> list[Document]:
    """The documents of a folder with .txt and .md files, whose titles are their paths without the ending, or of a
    .jsonl file with a title, a text and, if tasks are to be made of them, facts in each line.

    Raises ValueError, saying what would do, where there are none. Of equal titles the second becomes "title (2)".
    """
    if path.is_dir():
        found = [
            Document(str(file.relative_to(path).with_suffix("")), _text(file))
            for file in sorted(path.rglob("*"))
            if file.suffix in (".txt", ".md")
        ]
    elif path.suffix == ".jsonl" and path.exists():
        found = [_document(path, number, row) for number, row in rows(path)]
    else:
        raise ValueError(f"no documents at {path}: give a folder of .txt and .md files, or a .jsonl of title and text")
    if not found:
        raise ValueError(f"{path} holds no documents: put .txt or .md files, or lines of title and text, there")
    return list(_told_apart(found))


def rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects in a .jsonl file with the numbers of their lines. Raises ValueError for a line that is none."""
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}; was the file cut off?") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number} is no object: write {{...}} in each line")
        yield number, row


def search_tool(k: int, is_short: bool) -> Callable[..., str]:
    """A tool that shows `k` documents; in short, nothing but titles and what is found in them."""

    def search(query: str, scratch: Scratch) -> str:
        """Searches the documents for words and shows the parts that fit best; read_document shows a whole document.

        query: a few words to look for
        """
        found = scratch.library.search(query, k)
        if is_short:
            return "\n".join(f"{title} {snippet}" for title, snippet in found) or "nothing"
        shown = [f"{i}. {title}: {snippet}" for i, (title, snippet) in enumerate(found, start=1)]
        return "\n".join(shown) or "Nothing was found. Try other words."

    return search


def read_document(title: str, scratch: Scratch, start: int = 0) -> str:
    """Shows a document.

    title: the document's title, as the search shows it
    start: the first character to show, for documents that are too long to be shown at once
    """
    text = scratch.library.read(title)
    if text is None:
        near = ", ".join(found.title for found in scratch.library.search(title, 3)) or "nothing near"
        raise ValueError(f"there is no document of title {title!r}; there is: {near}")
    if start < 0:
        raise ValueError("start must be 0 or more")
    return text[start:]


def _document(path: Path, number: int, row: Mapping[str, Any]) -> Document:
    title, text, facts = row.get("title"), row.get("text"), row.get("facts", {})
    if not (isinstance(title, str) and title.strip() and isinstance(text, str) and isinstance(facts, dict)):
        raise ValueError(f'{path}, line {number} needs a "title" and a "text", and "facts" as an object if it has any')
    return Document(title.strip(), text, {str(name): str(value) for name, value in facts.items()})


def _told_apart(documents: list[Document]) -> Iterator[Document]:
    seen: dict[str, int] = {}
    for document in documents:
        count = seen[document.title.casefold()] = seen.get(document.title.casefold(), 0) + 1
        yield document if count == 1 else Document(f"{document.title} ({count})", document.text, document.facts)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}; convert it") from error
