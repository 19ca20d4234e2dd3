"""Tools: their descriptions, validation of arguments, errors and time limits, and confinement to the scratch folder."""

import asyncio
import json
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from palestra.core.chat import ToolCall
from palestra.environments.tools import timeouts
from palestra.environments.tools.builtin_tools import MAX_CELLS, python_tool
from palestra.environments.tools.calculator import calculator, evaluate
from palestra.environments.tools.library import (
    BUILT_IN_CORPUS,
    Document,
    DocumentIndex,
    open_index,
    read_document,
    read_documents,
    search_tool,
)
from palestra.environments.tools.tool_state import (
    MAX_FILES,
    MAX_TOTAL_CHARS,
    ReplCell,
    ToolState,
    list_files,
    normalize_path,
    read_file,
    write_file,
)
from palestra.environments.tools.toolbox import Toolbox, make_tool
from palestra.sandbox import open_sandbox

FILE_TOOLS = (write_file, read_file, list_files)


def convert(kilometres: float) -> float:
    """Converts kilometres to miles."""
    return kilometres / 1.609344


def call(tools, name, arguments, scratch=None, **options):
    return asyncio.run(Toolbox(tools, **options).call(ToolCall(name, arguments), scratch or ToolState()))


# ---- descriptions


@dataclass
class Place:
    town: str


class Order(BaseModel):
    item: str
    count: int = Field(ge=1)


def book(
    json: str,
    schema: Annotated[int, "how many"] = 1,
    kind: Literal["bed", "boat"] = "bed",
    *,
    days: list[int] | None = None,
    place: Place,
    scratch: ToolState,
) -> str:
    """Books a room.

    The rest of the docstring is not part of the tool's description.

    json: who comes
    days: the days
    """
    return f"{json} {schema} {kind} {days} {place.town} {len(scratch.files)}"


def test_tool_description_equals_the_openai_format():
    """By hand after https://platform.openai.com/docs/guides/function-calling, strict mode's additionalProperties."""
    assert make_tool(convert).openai_schema == {
        "type": "function",
        "function": {
            "name": "convert",
            "description": "Converts kilometres to miles.",
            "parameters": {
                "type": "object",
                "properties": {"kilometres": {"type": "number"}},
                "required": ["kilometres"],
                "additionalProperties": False,
            },
        },
    }
    parameters = make_tool(book).openai_schema["function"]["parameters"]
    place = parameters.pop("$defs")["Place"]
    assert place["properties"] == {"town": {"type": "string"}} and place["required"] == ["town"]
    assert parameters == {
        "type": "object",
        "properties": {
            "json": {"type": "string", "description": "who comes"},
            "schema": {"type": "integer", "description": "how many", "default": 1},
            "kind": {"type": "string", "enum": ["bed", "boat"], "default": "bed"},
            "days": {
                "anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}],
                "default": None,
                "description": "the days",
            },
            "place": {"$ref": "#/$defs/Place"},
        },
        "required": ["json", "place"],
        "additionalProperties": False,
    }


def test_arguments_are_validated_by_type_hints():
    found = call(
        [book], "book", {"json": "Ann", "place": {"town": "Arle"}, "days": ["3", 4]}, ToolState(files={"a": ""})
    )
    assert found.is_valid and found.text == "Ann 1 bed [3, 4] Arle 1"

    def order(orders: list[Order]) -> int:
        """Orders."""
        return sum(each.count for each in orders)

    assert call([order], "order", {"orders": [{"item": "a", "count": 2}, {"item": "b", "count": 3}]}).text == "5"
    assert (
        "orders.0.count: input should be greater" in call([order], "order", {"orders": [{"item": "", "count": 0}]}).text
    )


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("convert", {}, "convert takes kilometres: kilometres is missing"),
        ("convert", {"kilometres": "far"}, "kilometres: input should be a valid number"),
        ("convert", {"kilometres": 1, "miles": 2}, "there is no miles"),
        ("convert", {"kilometres": None}, "kilometres: input should be a valid number"),
        ("book", {"json": "Ann", "place": {"town": "Arle"}, "scratch": {}}, "there is no scratch"),
        ("book", {"json": "Ann", "place": {}}, "place.town is missing"),
        ("book", {"json": 3, "kind": "tent", "place": {"town": "Arle"}}, "kind: input should be 'bed' or 'boat'"),
        ("konvert", {}, 'there is no tool "konvert"; there is: convert, book'),
        ("convert", {"kilometres": "\ud800"}, "hold half a character"),
    ],
)
def test_invalid_call_is_explained(name, arguments, message):
    found = call([convert, book], name, arguments)
    assert not found.is_valid and found.failure is None
    assert found.text.startswith("Error: ") and message in found.text


def test_invalid_tools_are_refused():
    def silent(x: int) -> int:
        return x

    def untyped(x):
        """Untyped."""

    def starred(*x: int) -> None:
        """Starred."""

    def odd(x: threading.Lock) -> None:
        """Odd."""

    for function, message in (
        (silent, "no docstring"),
        (untyped, "type hint"),
        (starred, "must not be \\* or positional"),
        (odd, "cannot represent"),
    ):
        with pytest.raises(ValueError, match=message):
            make_tool(function)
    with pytest.raises(ValueError, match="is not a tool"):
        make_tool(lambda x: x)
    with pytest.raises(ValueError, match='two tools called "convert"'):
        Toolbox([convert, convert])


# ---- results and errors


def test_results_are_text_of_bounded_length():
    def give(what: Literal["none", "dict", "long", "half", "circle"]) -> object:
        """Gives something."""
        circle: list[object] = []
        circle.append(circle)
        return {"none": None, "dict": {"a": [1, 2.5]}, "long": "x" * 500, "half": "\ud800", "circle": circle}[what]

    wanted = ("none", "dict", "long", "half")
    found = {what: call([give], "give", {"what": what}, max_result_chars=100) for what in wanted}
    assert found["none"].text == "done" and found["dict"].text == '{"a":[1,2.5]}' and found["half"].text == "?"
    assert found["long"].text == "x" * 100 + "\n[cut off: 500 characters in all]"
    assert call([give], "give", {"what": "circle"}).text.startswith("Error: ")


def test_errors_of_custom_tools_are_reported():
    """ValueError is the agent's mistake, any other error is not."""
    errors = {
        "value": ValueError("no such day"),
        "key": KeyError("x"),
        "end": StopIteration(),
        "exit": SystemExit(3),
        "interrupt": KeyboardInterrupt(),
    }

    def fail(how: str) -> None:
        """Fails."""
        raise errors[how]

    async def fail_later(how: str) -> None:
        """Fails."""
        await asyncio.sleep(0)
        raise errors[how]

    def fail_awaited(how: str) -> object:
        """Fails, as a decorated coroutine function may."""
        return fail_later(how)

    for tool in (fail, fail_later, fail_awaited):
        found = call([tool], tool.__name__, {"how": "value"})
        assert not found.is_valid and found.text == "Error: no such day" and found.failure is None
        for how in ("key", "end", "exit"):
            found = call([tool], tool.__name__, {"how": how})
            assert found.is_valid and found.failure and "failed with" in found.failure and found.failure in found.text
    assert call([fail], "fail", {"how": "interrupt"}).failure


def test_errors_of_builtin_tools_propagate():
    def broken() -> None:
        """Breaks."""
        raise KeyError("x")

    with pytest.raises(KeyError):
        call([make_tool(broken, is_built_in=True)], "broken", {})


def test_hung_tool_is_abandoned():
    released = threading.Event()

    def wait(scratch: ToolState) -> str:
        """Waits."""
        released.wait()
        scratch.files["late"] = ""
        return "late"

    async def wait_stubbornly() -> None:
        """Waits, and does not let itself be cancelled."""
        while not released.is_set():
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                await asyncio.sleep(0.2)
                released.set()

    async def both():
        box, before = Toolbox([wait, wait_stubbornly], time_limit=0.5), ToolState()
        calls = [ToolCall("wait", {}), ToolCall("wait_stubbornly", {})]
        started = time.monotonic()
        found = await box.call_all(calls, before)
        took = time.monotonic() - started
        await asyncio.sleep(0.5)  # by now both have ended
        return found, took, before

    found, took, before = asyncio.run(both())
    assert [one.failure for one in found] == [
        f"{n} did not answer within 0.5 seconds" for n in ("wait", "wait_stubbornly")
    ]
    assert took < 0.95, "they are waited for side by side"
    assert found[-1].scratch.files == before.files == {}


def test_number_of_hung_tools_is_limited(monkeypatch):
    monkeypatch.setattr(timeouts, "MAX_STUCK_CALLS", 3)
    released = threading.Event()

    def wait() -> None:
        """Waits."""
        released.wait()

    async def several():
        box = Toolbox([wait], time_limit=0.05)
        found = await box.call_all([ToolCall("wait", {})] * 3, ToolState())
        found += await box.call_all([ToolCall("wait", {})], ToolState())
        released.set()
        while timeouts._stuck:
            await asyncio.sleep(0.01)
        return [*found, await box.call(ToolCall("wait", {}), ToolState())]

    *_, fourth, fifth = asyncio.run(several())
    assert "earlier calls still hang" in (fourth.failure or "")
    assert fifth.failure is None and fifth.text == "done"


def test_calls_on_the_scratch_folder_run_in_order():
    box = Toolbox([*FILE_TOOLS, convert])
    calls = [
        ToolCall("write_file", {"path": "a.txt", "text": "one"}),
        ToolCall("convert", {"kilometres": 1.609344}),
        ToolCall("read_file", {"path": "a.txt"}),
        ToolCall("write_file", {"path": "../a.txt", "text": "two"}),
        ToolCall("list_files", {}),
    ]
    before = ToolState()
    found = asyncio.run(box.call_all(calls, before))
    assert [one.text for one in found[:3]] == ["wrote a.txt: 3 characters", "1.0", "one"]
    assert not found[3].is_valid and found[4].text == "a.txt: 3 characters"
    assert found[-1].scratch.files == {"a.txt": "one"} and before.files == {}


# ---- the scratch folder

ESCAPES = (
    "../x",
    "a/../../x",
    "/etc/passwd",
    "//x",
    "..",
    ".",
    "",
    "/",
    "a/",
    "a\x00b",
    "a\nb",
    "..\\x",
    "x" * 101,
    "é" * 60,
    "a/" * 150 + "b",
)


@pytest.mark.parametrize("path", ESCAPES)
@pytest.mark.parametrize(("tool", "more"), [("write_file", {"text": "x"}), ("read_file", {})])
def test_paths_outside_the_scratch_folder_are_refused(path, tool, more):
    found = call(FILE_TOOLS, tool, {"path": path, **more}, ToolState(files={"a": "1"}))
    assert not found.is_valid and found.text.startswith("Error: ") and found.scratch.files == {"a": "1"}


@given(st.text(max_size=300))
def test_paths_are_normalised_or_refused(path):
    try:
        name = normalize_path(path)
    except (ValueError, UnicodeEncodeError):
        return
    assert (Path("/scratch") / name).resolve() == Path("/scratch") / name
    assert normalize_path(name) == name


def test_scratch_folder_is_limited_in_size():
    files = {f"{i}.txt": "" for i in range(MAX_FILES)}
    assert not call(FILE_TOOLS, "write_file", {"path": "one-more", "text": ""}, ToolState(files=files)).is_valid
    assert not call(FILE_TOOLS, "write_file", {"path": "a", "text": "x" * (MAX_TOTAL_CHARS + 1)}).is_valid
    assert call(FILE_TOOLS, "write_file", {"path": "a", "text": "x" * MAX_TOTAL_CHARS}).is_valid
    assert "is a file" in call(FILE_TOOLS, "write_file", {"path": "a/b", "text": ""}, ToolState(files={"a": ""})).text
    assert "is a file" in call(FILE_TOOLS, "write_file", {"path": "a", "text": ""}, ToolState(files={"a/b": ""})).text


def test_long_files_are_read_in_parts():
    scratch = ToolState(files={"a": "0123456789" * 5})
    assert call(FILE_TOOLS, "read_file", {"path": "./a", "start": 45}, scratch).text == "56789"
    assert call(FILE_TOOLS, "read_file", {"path": "b"}, scratch).text == "Error: there is no file 'b'; there is: a"
    assert not call(FILE_TOOLS, "read_file", {"path": "a", "start": -1}, scratch).is_valid


# ---- the calculator


@pytest.mark.parametrize(
    ("expression", "worth"),
    [
        ("48211 - 12002 * 3", "12205"),
        ("(2 + 3) * -4", "-20"),
        ("6 / 2", "3"),
        ("7 / 2", "3.5"),
        ("10**40 / 10**38", "100"),
        ("2 ** 0.5 ** 2", str(2**0.25)),
        ("27478429 ** 45 % 99587", str(pow(27478429, 45, 99587))),
        ("sqrt(16) + max(1, 2, 3)", "7"),
        ("round(2.567, 2)", "2.57"),
        ("(-1) ** 99999999999", "-1"),
        ("1e3", "1000"),
    ],
)
def test_calculator_by_hand(expression, worth):
    assert calculator(expression) == worth


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1 +",
        "9 ** 9 ** 9",
        "2 ** 99999",
        "round(5, -1000000000)",
        "1 / 0",
        "0 ** -1",
        "sqrt(-1)",
        "(-8) ** 0.5",
        "1e400",
        "1e308 * 10",
        "48,211 + 1",
        "__import__('os').getcwd()",
        "().__class__",
        "[1 for _ in (1,)]",
        "lambda: 1",
        "1 if 2 else 3",
        "a := 1",
        "'a' * 9",
        "True + 1",
        "1\x00",
        "0x10",
        "min(*1)",
        "e.real",
        "(" * 300,
        "1" * 401,
    ],
)
def test_other_or_large_expressions_are_refused(expression):
    with pytest.raises(ValueError, match=r"\w"):
        calculator(expression)


NUMBERS = st.integers(0, 10**9).map(str)
SIGNS = st.sampled_from(["+", "-", "*", "//", "%"])
SUMS = st.recursive(
    NUMBERS, lambda part: st.tuples(part, SIGNS, part).map("({0[0]} {0[1]} {0[2]})".format), max_leaves=6
)


@given(SUMS)
def test_calculator_is_exact(expression):
    try:
        expected = eval(expression)
    except ZeroDivisionError:
        with pytest.raises(ValueError, match="division by zero"):
            evaluate(expression)
    else:
        assert evaluate(expression) == expected


# ---- the documents

SEARCH = [make_tool(search_tool(3, False), is_built_in=True), make_tool(read_document, is_built_in=True)]
INJECTIONS = (
    *('"', '""', "*", "(", ")", "+", "_", "💥", "^a", "-a", "a*", "a AND", "a NOT", "title:a", "{title text}: a"),
    *('a" OR "b', "NEAR(a b, 2)", "a\x00b", "'; DROP TABLE documents; --", "a" * 10_000, "a " * 10_000),
)


@pytest.mark.parametrize("query", INJECTIONS)
def test_query_syntax_is_ignored(query):
    index = DocumentIndex((Document("Arle", "a and near or not"), Document("Tor", "b")))
    found = call(SEARCH, "search", {"query": query}, ToolState(index))
    assert found.is_valid and found.text
    assert [document.title for document in index.search("tor", 3)] == ["Tor"]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_no_query_raises(query):
    assert len(open_index(BUILT_IN_CORPUS).search(query, 3)) <= 3


def test_best_documents_are_ranked_first():
    index = DocumentIndex((
        Document("Weather", "It rains in Arle. " + "It rains. " * 40),
        Document("Arle", "A town with 512 people."),
        Document("Tor", "A town with 77 people."),
    ))  # fmt: skip
    assert [found.title for found in index.search("Arle", 2)] == ["Arle", "Weather"]
    assert index.search("how many peoples live in tor?", 3)[0].title == "Tor"
    assert call(SEARCH, "search", {"query": "arle people"}, ToolState(index)).text.startswith(
        "1. Arle: A town with 512 people."
    )
    assert call(SEARCH, "search", {"query": "zzz"}, ToolState(index)).text == "Nothing was found. Try other words."
    assert call(SEARCH, "read_document", {"title": " arle "}, ToolState(index)).text == "Arle\nA town with 512 people."
    assert call(SEARCH, "read_document", {"title": "Arla Tor"}, ToolState(index)).text == (
        "Error: there is no document of title 'Arla Tor'; there is: Tor"
    )
    assert call(SEARCH, "read_document", {"title": "Arle"}).text.endswith("there is: nothing near")


def test_index_is_built_once_and_read_only(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    assert open_index(tmp_path) is open_index(tmp_path)
    with pytest.raises(Exception, match="readonly"):
        open_index(tmp_path)._table.execute("DELETE FROM documents")


def test_custom_documents_are_read(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "arle.md").write_text("# Arle\n512 people")
    (tmp_path / "tor.txt").write_text("77 people")
    (tmp_path / "picture.png").write_bytes(b"\xff")
    assert [document.title for document in read_documents(tmp_path)] == ["deep/arle", "tor"]
    lines = tmp_path / "documents.jsonl"
    rows = [{"title": "Arle", "text": "512", "facts": {"people": 512}}, {"title": "arle", "text": "other"}]
    lines.write_text("\n\n".join(map(json.dumps, rows)))
    assert [document.title for document in read_documents(lines)] == ["Arle", "arle (2)"]
    assert read_documents(lines)[0].facts == {"people": "512"}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", "", "holds no rows"),
        ("a.jsonl", "{", "line 1 is not a JSON object"),
        ("a.jsonl", "[1]", "line 1 is not a JSON object"),
        ("a.jsonl", '{"title": "a"}', 'row 1 needs a "title" and a "text"'),
        ("a.csv", "a,b", "give .jsonl, .json or .parquet"),
        ("a.jsonl", b"\xff", "line 1 is not a JSON object"),
    ],
)
def test_invalid_document_files_are_refused(tmp_path, name, text, message):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message):
        read_documents(tmp_path / name)


def test_corpus_texts_contain_their_facts():
    documents = open_index(BUILT_IN_CORPUS).documents
    assert len(documents) >= 150 and len({document.title for document in documents}) == len(documents)
    for document in documents:
        assert document.facts and all(value in document.text for value in document.facts.values())


# ---- python


def sandbox():
    try:
        return open_sandbox()
    except ValueError:
        return open_sandbox(unsafe=True)


def run(codes, scratch=None, seconds=5.0):
    """The output of each program, and the scratch folder after them."""
    box = Toolbox([make_tool(python_tool(sandbox(), seconds), is_built_in=True)])

    async def one_by_one():
        shown, state = [], scratch or ToolState()
        for code in codes:
            found = await box.call(ToolCall("python", {"code": code}), state)
            state = found.scratch
            shown.append(found.text)
        return shown, state

    return asyncio.run(one_by_one())


def test_repl_keeps_state_between_programs():
    codes = [
        "x = 2\nprint('once')\nx + 1",
        "x *= 10\nx",
        "raise KeyError(x)",
        "x",
        "import random\nrandom.random() == y",
    ]
    shown, scratch = run(codes)
    assert shown[:2] == ["once\n3", "20"]
    assert "KeyError: 20" in shown[2] and "<cell 3>" in shown[2] and "cells.py" not in shown[2]
    assert shown[2].endswith("[it failed; nothing of this call is kept]") and shown[3] == "20"
    assert "NameError" in shown[4] and len(scratch.cells) == 3


def test_replayed_programs_see_their_original_files():
    """A replayed program's changes of files are not applied again."""
    first = ["open('log', 'a').write('one ')", "text = open('log').read()\nopen('log', 'a').write('two ')"]
    shown, scratch = run(first, ToolState(files={"log": "zero "}))
    assert scratch.files == {"log": "zero one two "}
    scratch.write("log", "new")
    shown, scratch = run(["print(text, open('log').read())", "import os\nos.remove('log')"], scratch)
    assert shown[0] == "zero one  new" and scratch.files == {}


def test_forked_tool_state_forks_the_repl():
    _, scratch = run(["x = 1"])
    one, _ = run(["x += 1", "x"], scratch)
    other, _ = run(["x"], scratch)
    assert one[-1] == "2" and other == ["1"]


def test_only_small_plain_text_files_are_returned():
    codes = [
        "open('b.bin', 'wb').write(b'\\xff')",
        "import os\nos.symlink('/etc/passwd', 'link')\nos.makedirs('d')\nopen('d/a.txt', 'w').write('in a folder')",
        f"open('big', 'w').write('x' * {MAX_TOTAL_CHARS + 1})",
        "open('odd\\nname', 'w').write('x')",
    ]
    shown, scratch = run(codes)
    assert "[not kept, for it is no plain text file: b.bin]" in shown[0]
    assert "no changes to files were kept" in shown[2]
    assert scratch.files == {"d/a.txt": "in a folder"}


def test_failed_programs_are_reported():
    shown, scratch = run(["import time\ntime.sleep(60)", "x = = 1", "a\x00", "import sys\nsys.exit(3)"], seconds=1.0)
    assert shown[0] == "[it took too long; nothing of this call is kept]"
    assert "SyntaxError" in shown[1] and "null bytes" in shown[2] and scratch.cells == ()
    assert run(["import sys\nprint(1)\nsys.exit()"])[0] == ["1"]


def test_number_and_length_of_programs_are_limited():
    scratch = ToolState(cells=(ReplCell("", {}),) * MAX_CELLS)
    assert "which is all there is" in run(["1"], scratch)[0][0]
    assert "give at most" in run(["1" * 30_000])[0][0]
