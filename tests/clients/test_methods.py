"""Every public method of every generation's clients: whether it works, or the message with which it is refused. The
table is docs/clients.md; `git diff` shows what changed."""

import re
from pathlib import Path

import pytest
from helpers.official import Official

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]
PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
VERSIONS = {"a": "0.15.0", "b": "0.22.0", "c": "0.38.0"}
# Methods of a hosted service that this server does not have, and calls that the client itself refuses.
REFUSED = {
    "RestClient.export_session_trace": ("this server has no GET",),
    # an error of 0.22 itself
    "RestClient.get_audit_log": ("this server has no GET", "called from incorrect event loop"),
    "RestClient.get_billing_usage": ("this server has no GET",),
    "RestClient.get_current_checkpoint_storage_usage": ("this server has no GET",),
    "RestClient.search_sessions": ("this server has no POST",),
    "RestClient.whoami": ("whoami requires JWT auth",),
}
HEAD = """# Client compatibility

Every public method of the official `tinker` clients, called once against this server by `make test-clients`, which
wrote this page. An empty cell: that version has no such method. `x_async` stands for itself where it differs from `x`.

"""


def test_every_client_method_works_or_is_refused_with_a_reason(official: Official) -> None:
    tables = {clients: official.report(clients, "methods") for clients in VERSIONS}
    PAGE.write_text(HEAD + page(tables))
    wrong = {
        f"{VERSIONS[clients]} {method}": said
        for clients, table in tables.items()
        for method, said in table.items()
        if said != "works" and not is_expected_refusal(method, said)
    }
    assert not wrong
    assert len(tables["c"]) > len(tables["b"]) > len(tables["a"]) > 50


def is_expected_refusal(method: str, said: str) -> bool:
    return any(words in said for words in REFUSED.get(method.removesuffix("_async"), ()))


def page(tables: dict[str, dict[str, str]]) -> str:
    """A table of methods by versions, followed by the messages of those that did not work."""
    methods = sorted(set().union(*tables.values()))
    shown = [m for m in methods if not equals_sync(m, tables)]
    notes: list[str] = []
    rows = ["| method | " + " | ".join(VERSIONS.values()) + " |", "|---|" + "---|" * len(VERSIONS)]
    for method in shown:
        cells = [cell(tables[clients].get(method), notes) for clients in VERSIONS]
        rows.append(f"| `{method}` | " + " | ".join(cells) + " |")
    said = [f"{number}. {note}" for number, note in enumerate(notes, 1)]
    return "\n".join([*rows, "", *said]) + "\n"


def equals_sync(method: str, tables: dict[str, dict[str, str]]) -> bool:
    sync = method.removesuffix("_async")
    return sync != method and all(
        method not in table or without_ids(table[method]) == without_ids(table.get(sync, ""))
        for table in tables.values()
    )


def cell(said: str | None, notes: list[str]) -> str:
    if said is None or said == "works":
        return "yes" if said else ""
    if without_ids(said) not in notes:
        notes.append(without_ids(said))
    return f"refused [{notes.index(without_ids(said)) + 1}]"


def without_ids(said: str) -> str:
    """The message without ids, which differ between runs."""
    return re.sub(r"\bs[0-9a-f]{16}\b", "ID", said)
