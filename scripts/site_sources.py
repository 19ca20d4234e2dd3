"""Pages of the site for files outside docs/: a link to a file of the repository leads to its text with highlighting, a
link to a folder to a list of its entries, a link to a Markdown file to that file as a page.

Paths are relative to the repository, with `/`. The page of `configs/demo.yaml` is `source/configs/demo.yaml.md`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = "source/"
LANGUAGES = {
    ".py": "python",
    ".proto": "protobuf",
    ".yaml": "yaml",
    ".sbatch": "bash",
    ".toml": "toml",
    ".json": "json",
    ".jsonl": "json",
    ".ipynb": "json",
    ".jinja": "jinja",
    ".txt": "text",
    "": "text",
    ".md": "",
}
CODE = re.compile(r"(^(?P<fence>```+|~~~+).*?^(?P=fence)|`[^`\n]*`)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?P<path>[^)\s:#]+)(?P<anchor>#[^)\s]*)?\)")
FIRST = re.compile(r'\A(?:"""|# )(?P<line>.+?)(?:"""|\n|\Z)')  # first line of a docstring or comment at the top


def pages(documents: Iterable[str]) -> dict[str, str]:
    """The pages that `documents` link to, directly or through other such pages: content by the page's path."""
    found: dict[str, str] = {}
    waiting = [target for document in documents for target in outside(document)]
    while waiting:
        path = waiting.pop()
        if page_of(path) not in found and readable(ROOT / path):
            found[page_of(path)] = text = _page(path)
            origin = origin_of(page_of(path))
            waiting += [target for target in _targets(text, origin) if not target.startswith("docs/")]
    return found


def outside(document: str) -> list[str]:
    """The paths outside docs/ that a document links to."""
    targets = _targets((ROOT / document).read_text(encoding="utf-8"), document)
    return [target for target in targets if not target.startswith("docs/")]


def rewritten(text: str, page: str) -> str:
    """The `text` of the page `page` with links into the repository replaced by links to pages."""
    origin = origin_of(page)

    def lead(match: re.Match[str]) -> str:
        target = resolve(match["path"], origin)
        inside = target is None or (target.startswith("docs/") and origin.startswith("docs/"))
        if inside or not readable(ROOT / str(target)):
            return match[0]
        path = posixpath.relpath(page_of(str(target)), posixpath.dirname(page) or ".")
        return f"]({path}{match['anchor'] or ''})"

    return _outside_code(text, lambda piece: LINK.sub(lead, piece))


def origin_of(page: str) -> str:
    """The path of the file that a page shows; the page of a folder counts as a file in it."""
    if not page.startswith(SOURCE):
        return f"docs/{page}"
    return page.removeprefix(SOURCE)


def page_of(path: str) -> str:
    """The path of the page that shows a file or folder."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"{SOURCE}{path}/index.md"
    # MkDocs would make README.md the index of its folder, whose page lists the files.
    is_named = path.endswith(".md") and not path.endswith("README.md")
    return f"{SOURCE}{path}{'' if is_named else '.md'}"


def resolve(link: str, origin: str) -> str | None:
    """The path that a link in the file `origin` leads to; None if it does not exist."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))
    return path if not path.startswith("..") and (ROOT / path).exists() else None


def readable(path: Path) -> bool:
    """True if the path is a folder or a text file of a known language."""
    return not path.name.startswith((".", "__")) and (path.is_dir() or path.suffix in LANGUAGES)


def _targets(text: str, origin: str) -> Iterator[str]:
    found: list[str] = []

    def find_links(piece: str) -> str:
        found.extend(match["path"] for match in LINK.finditer(piece))
        return piece

    _outside_code(text, find_links)
    return (target for link in found if (target := resolve(link, origin)))


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    """The `text` with `change` applied to everything outside code."""
    done, at = [], 0
    for match in CODE.finditer(text):
        done += [change(text[at : match.start()]), match[0]]
        at = match.end()
    return "".join([*done, change(text[at:])])


def _page(path: str) -> str:
    where = ROOT / path
    if where.is_dir():
        return _head(path, f"# {path}/\n\n{_listing(where)}")
    text = where.read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    fence = max(["``", *re.findall(r"`{3,}", text)], key=len) + "`"
    return _head(path, f"# {path}\n\n{fence}{LANGUAGES.get(where.suffix, 'text')}\n{text.rstrip()}\n{fence}\n")


def _head(path: str, text: str) -> str:
    """The text of a page with front matter that excludes it from the search."""
    return f"---\ntitle: {posixpath.basename(path)}\nhide: [toc]\nsearch: {{exclude: true}}\n---\n{text}"


def _listing(folder: Path) -> str:
    rows = ["| | |", "|---|---|"]
    for entry in sorted(folder.iterdir(), key=lambda entry: (entry.is_file(), entry.name)):
        if readable(entry):
            rows.append(f"| [{entry.name}{'/' * entry.is_dir()}]({entry.name}) | {_about(entry)} |")
    return "\n".join(rows) + "\n"


def _about(path: Path) -> str:
    match = None if path.is_dir() else FIRST.match(path.read_text(encoding="utf-8"))
    return match["line"].replace("|", "\\|") if match else ""
