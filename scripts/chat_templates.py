"""Compares conversations here with real chat templates, and writes docs/chat-templates.md.

    python scripts/chat_templates.py            # prints the table
    python scripts/chat_templates.py --publish  # writes the page

The templates are the copies that the package trl ships (pip install --no-deps trl==1.16.0); none is stored here.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # helpers

from helpers.chat_templates import real_tokenizer, template_names  # noqa: E402

from palestra.engine.conversation.report import Finding, check_conversations  # noqa: E402

PAGE = ROOT / "docs" / "chat-templates.md"
WORDS = {"equal": "=", "differs": "≠", "refused": "no", "none": "-"}
HEAD = """# Chat templates

Written by `python scripts/chat_templates.py --publish`, with the {count} templates that trl {trl} ships and
transformers {transformers}. Each probe passes through the code that encodes prompts and reads answers in training; the
tokens are compared with the text that the template itself makes of the finished conversation. `palestra info --base
NAME` prints the same for any base, and a run says at its start what differs.

`=`: equal, token for token. `≠`: differs, and the run says how. `no`: refused with the reason. `-`: the template has no
such thing. In all: {totals}.

"""
ROWS = {
    "system role": "system",
    "second turn": "second turn",
    "an answer that was cut": "cut answer",
    "special tokens in a text": "special tokens",
    "thought": "thought",
    "call and its result": "call, result",
    "thought and call": "thought, call",
    "two calls": "two calls",
}


def main() -> None:
    """Prints or writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--publish", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    parser.add_argument("--quick", action="store_true", help="five templates only")
    given = parser.parse_args()
    names = template_names()[:5] if given.quick else template_names()
    found = {name: check_conversations(real_tokenizer(name)) for name in names}
    text = page(found)
    if given.publish:
        PAGE.write_text(text, encoding="utf-8")
    print(f"written: {PAGE}" if given.publish else text)


def page(found: dict[str, list[Finding]]) -> str:
    """Returns the page of the findings of each template."""
    counts: Counter[str] = Counter(finding.verdict for findings in found.values() for finding in findings)
    totals = ", ".join(f"{counts[verdict]} {verdict}" for verdict in WORDS)
    versions = {"trl": version("trl"), "transformers": version("transformers")}
    lines = [f"| template | {' | '.join(ROWS.values())} |", f"|---|{':-:|' * len(ROWS)}"]
    for name, findings in found.items():
        cells = {finding.probe: WORDS[finding.verdict] for finding in findings}
        lines.append(f"| {name} | {' | '.join(cells[probe] for probe in ROWS)} |")
    return HEAD.format(count=len(found), totals=totals, **versions) + "\n".join(lines) + "\n\n" + notes(found)


def notes(found: dict[str, list[Finding]]) -> str:
    """Returns what is said of probes that differ or are refused, with the templates of which it is."""
    told: dict[str, list[str]] = {}
    for name, findings in found.items():
        for finding in findings:
            if finding.verdict in ("differs", "refused") and name not in told.setdefault(finding.note, []):
                told[finding.note].append(name)
    lines = [f"- {note}: {', '.join(names)}" for note, names in sorted(told.items(), key=lambda each: -len(each[1]))]
    return "## What differs or is refused\n\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
