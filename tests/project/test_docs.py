"""Documents: their examples run, and their links resolve.

A fenced `bash` or `python` block runs when the line before it is an HTML comment:

    <!-- test -->         in the fast suite
    <!-- test: slow -->   in the slow suite only

    <!-- not run: why -->  nowhere, for instance since it needs a GPU

A block of any language after `<!-- file: NAME -->` is written to that file, for the blocks that run after it. The site
shows the name above it (scripts/site_hooks.py).

All runnable blocks of one document run in order, in one temporary folder that holds links to the repository's folders
`configs`, `examples` and `scripts`, with the virtual environment first on the path; each must end with exit code 0.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import GROUP, LINK, refusal
from helpers.documents import Block, blocks

ROOT = Path(__file__).parents[2]
FOLDERS = ("*.md", "docs/**/*.md", "examples/**/*.md", "results/*/*.md", "palestra/environments/*/README.md")
DOCUMENTS = sorted(path for folder in FOLDERS for path in ROOT.glob(folder))
COMMENT = re.compile(r"^<!--\s*(?:test|file)\b[^>]*-->", re.MULTILINE)
OPENED = re.compile(r"(?P<before>[^\n]*)\n```(?:bash|python)\b")
MARKED = re.compile(r"<!--\s*(test(: slow)?|file: \S+|not run: \S.*?)\s*-->")
SHELL = re.compile(r"^```bash[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
HEADING = re.compile(r"^#+\s+(.*)$", re.MULTILINE)


def run(document: Path, folder: Path, *, slow: bool) -> None:
    for name in ("configs", "examples", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    for block in blocks(document.read_text(encoding="utf-8")):
        if block.file:
            (folder / block.file).write_text(block.code, encoding="utf-8")
        elif slow or not block.slow:
            done = subprocess.run(_command(block), cwd=folder, env=environment, capture_output=True, text=True)
            where = f"{document.relative_to(ROOT)}, line {block.line}"
            assert done.returncode == 0, f"{where}:\n{block.code}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def _command(block: Block) -> list[str]:
    if block.language == "python":
        return [sys.executable, "-c", block.code]
    return ["bash", "-euo", "pipefail", "-c", block.code]


def with_blocks(*, slow: bool) -> list[Path]:
    texts = {document: document.read_text(encoding="utf-8") for document in DOCUMENTS}
    return [document for document, text in texts.items() if any(_runs(block, slow) for block in blocks(text))]


def _runs(block: Block, slow: bool) -> bool:
    return not block.file and block.slow == slow


def identifier(document: Path) -> str:
    return str(document.relative_to(ROOT))


@pytest.mark.parametrize("document", with_blocks(slow=False), ids=identifier)
def test_examples_run(document: Path, tmp_path: Path) -> None:
    run(document, tmp_path, slow=False)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("document", with_blocks(slow=True), ids=identifier)
def test_slow_examples_run(document: Path, tmp_path: Path) -> None:
    run(document, tmp_path, slow=True)


@pytest.mark.parametrize("document", DOCUMENTS, ids=identifier)
def test_every_mark_precedes_a_runnable_block(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    found = blocks(text)
    assert len(found) == len(COMMENT.findall(text)), (
        "a <!-- test --> or <!-- file --> comment is misspelt or not followed by a block"
    )
    assert {block.language for block in found if not block.file} <= {"bash", "python"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=identifier)
def test_every_code_block_is_marked(document: Path) -> None:
    assert unmarked_blocks(document.read_text(encoding="utf-8")) == []


def unmarked_blocks(text: str) -> list[int]:
    """The lines of `bash` and `python` blocks that neither run nor give a reason."""
    found = [match for match in OPENED.finditer(text) if not MARKED.fullmatch(match["before"].strip())]
    return [text[: match.end()].count("\n") + 1 for match in found]


@pytest.mark.parametrize("document", DOCUMENTS, ids=identifier)
def test_every_command_is_valid(document: Path) -> None:
    """Also in blocks that do not run: the command, its options and their types, and `--set` for shipped configs."""
    lines = [line for block in SHELL.findall(document.read_text(encoding="utf-8")) for line in _lines(block)]
    assert [message for line in lines if (message := refusal(line))] == []


def test_every_help_example_is_valid() -> None:
    lines = [line for command in commands(GROUP) for line in _lines(command.help or "")]
    examples = [line for line in lines if line.startswith("palestra ")]
    assert len(examples) > 40
    assert [message for line in examples if (message := refusal(line))] == []


def commands(group: Any) -> list[Any]:
    """The commands of the program and of its groups."""
    own = list(group.commands.values())
    return own + [deeper for command in own if hasattr(command, "commands") for deeper in commands(command)]


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.replace("\\\n", " ").split("\n")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=identifier)
def test_every_relative_link_resolves(document: Path) -> None:
    text = CODE.sub("", FENCE.sub("", document.read_text(encoding="utf-8")))
    targets = [match[1] or match[2] for match in LINK.finditer(text)]
    relative = [target for target in targets if not re.match(r"[a-z]+:", target)]
    assert [target for target in relative if not _leads_somewhere(document, target)] == []


def _leads_somewhere(document: Path, target: str) -> bool:
    name, _, anchor = target.partition("#")
    path = document.parent / name if name else document
    if not path.exists():
        return False
    return not anchor or path.suffix != ".md" or anchor in _anchors(path.read_text(encoding="utf-8"))


def _anchors(text: str) -> set[str]:
    """The anchors that hosts make from headings: lower case, words and hyphens only."""
    headings = HEADING.findall(FENCE.sub("", text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_documents_name_only_tests_that_exist() -> None:
    files = {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/test_*.py")}
    columns = {"test_list"}  # of MBPP
    known = {name for text in files.values() for name in re.findall(r"def (test_\w+)", text)} | files.keys() | columns
    named = [
        (d, n)
        for d in DOCUMENTS
        for n in re.findall(r"`(?:[\w/]*/)?(test_\w+(?:\.py)?)`", d.read_text(encoding="utf-8"))
    ]
    assert len(named) > 40
    assert not [f"{document.relative_to(ROOT)}: {name}" for document, name in named if name not in known]


def test_helpers_of_the_docs_tests() -> None:
    text = "a\n\n<!-- test -->\n```bash\ntrue\n```\n\n```bash\nfalse\n```\n<!-- test: slow -->\n```python\nx = 1\n```\n"
    assert blocks(text) == [Block(5, "bash", "true\n", False), Block(13, "python", "x = 1\n", True)]
    assert _command(blocks(text)[0])[0] == "bash"
    assert blocks("<!-- file: a.yaml -->\n```yaml\nx: 1\n```\n") == [Block(3, "yaml", "x: 1\n", False, "a.yaml")]
    assert unmarked_blocks(text) == [8]
    assert refusal("palestra train --sett x # why") and refusal("x && palestra nosuch")
    assert (
        not refusal("palestra runs | head") and not refusal("palestra train <config>") and not refusal("# palestra x")
    )
    assert refusal("palestra train configs/demo.yaml --set steps=x")
    assert unmarked_blocks("<!-- not run: needs a GPU -->\n```bash\nx\n```\n<!-- not run: -->\n```bash\nx\n```\n") == [
        6
    ]
    assert _anchors("# The house, again\n```\n# no\n```\n## `x` y") == {"the-house-again", "x-y"}
