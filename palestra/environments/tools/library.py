"""Documents and a full-text index over them (SQLite FTS5, ranked by BM25), built once per process and read-only."""

from __future__ import annotations

import re
import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from palestra.environments.tools.tool_state import SearchHit, ToolState
from palestra.envs.support.row_reader import Row, read_rows

BUILT_IN_CORPUS = Path(__file__).parent / "data" / "corpus.jsonl"
MAX_QUERY_WORDS = 32  # of a query; the rest are ignored
SNIPPET_TOKENS = 24  # length of a snippet
TITLE_WEIGHT = 4.0  # BM25 weight of the title; that of the text is 1
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Document:
    """A document. `facts` state its content in few words: `{"inhabitants": "48,211"}`; tasks are made from them."""

    title: str
    text: str
    facts: Mapping[str, str] = field(default_factory=dict)


class DocumentIndex:
    """A full-text index over documents; implements `Library`."""

    def __init__(self, documents: tuple[Document, ...]) -> None:
        self.documents = documents
        self._by_title = {document.title.casefold(): document for document in documents}
        self._lock = threading.Lock()
        self._table = sqlite3.connect(":memory:", check_same_thread=False)
        weakref.finalize(self, self._table.close)
        self._table.execute("CREATE VIRTUAL TABLE documents USING fts5(title, text, tokenize='porter unicode61')")
        self._table.executemany("INSERT INTO documents VALUES (?, ?)", [(d.title, d.text) for d in documents])
        self._table.execute("PRAGMA query_only = 1")

    def search(self, query: str, k: int) -> list[SearchHit]:
        """Returns the best documents with any of the query's words. FTS5's query syntax is not interpreted."""
        words = _WORD.findall(query)[:MAX_QUERY_WORDS]
        if not words:
            return []
        asked = " OR ".join(f'"{word}"' for word in words)
        with self._lock:
            rows = self._table.execute(
                "SELECT title, snippet(documents, 1, '', '', '...', ?) FROM documents WHERE documents MATCH ? "
                "ORDER BY bm25(documents, ?, 1.0), rowid LIMIT ?",
                (SNIPPET_TOKENS, asked, TITLE_WEIGHT, k),
            ).fetchall()
        return [SearchHit(title, " ".join(snippet.split())) for title, snippet in rows]

    def read(self, title: str) -> str | None:
        document = self._by_title.get(title.strip().casefold())
        return f"{document.title}\n{document.text}" if document else None


@cache
def open_index(path: Path) -> DocumentIndex:
    """Returns the index over the documents at `path`, cached per process."""
    return DocumentIndex(tuple(read_documents(path)))


def read_documents(path: Path) -> list[Document]:
    """Returns the documents of a folder or of a file of rows (.jsonl, .json or .parquet).

    In a folder, .txt and .md files are documents, titled by their path without the suffix. In a file each row has a
    title, a text and optionally facts, from which tasks are generated. Of equal titles the second becomes "title (2)".
    Raises ValueError if there are no documents.
    """
    if path.is_dir():
        documents = [
            Document(str(file.relative_to(path).with_suffix("")), _text(file))
            for file in sorted(path.rglob("*"))
            if file.suffix in (".txt", ".md")
        ]
    elif path.exists():
        documents = [_document(row, f"{path}, row {number}") for number, row in enumerate(read_rows(path), start=1)]
    else:
        raise ValueError(f"no documents at {path}: give a folder of .txt and .md files, or a .jsonl of title and text")
    if not documents:
        raise ValueError(f"{path} holds no documents: put .txt or .md files there")
    return list(_unique_titles(documents))


def search_tool(num_results: int, is_compact: bool) -> Callable[..., str]:
    """Returns a tool that shows the best `num_results` documents; `is_compact`: titles and snippets."""

    def search(query: str, scratch: ToolState) -> str:
        """Searches the documents for words and shows the parts that fit best; read_document shows a whole document.

        query: a few words to look for
        """
        hits = scratch.library.search(query, num_results)
        if is_compact:
            return "\n".join(f"{title} {snippet}" for title, snippet in hits) or "nothing"
        shown = [f"{i}. {title}: {snippet}" for i, (title, snippet) in enumerate(hits, start=1)]
        return "\n".join(shown) or "Nothing was found. Try other words."

    return search


def read_document(title: str, scratch: ToolState, start: int = 0) -> str:
    """Shows a document.

    title: the document's title, as the search shows it
    start: the first character to show, for documents that are too long to be shown at once
    """
    text = scratch.library.read(title)
    if text is None:
        near = ", ".join(document.title for document in scratch.library.search(title, 3)) or "nothing near"
        raise ValueError(f"there is no document of title {title!r}; there is: {near}")
    if start < 0:
        raise ValueError("start must be 0 or more")
    return text[start:]


def _document(row: Row, where: str) -> Document:
    title = row.get("title")
    text = row.get("text")
    facts = row.get("facts", {})
    if not (isinstance(title, str) and title.strip() and isinstance(text, str) and isinstance(facts, dict)):
        raise ValueError(f'{where} needs a "title" and a "text", and "facts" as an object if it has any')
    return Document(title.strip(), text, {str(name): str(value) for name, value in facts.items()})


def _unique_titles(documents: list[Document]) -> Iterator[Document]:
    seen: dict[str, int] = {}
    for document in documents:
        count = seen[document.title.casefold()] = seen.get(document.title.casefold(), 0) + 1
        yield document if count == 1 else Document(f"{document.title} ({count})", document.text, document.facts)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}; convert it") from error
