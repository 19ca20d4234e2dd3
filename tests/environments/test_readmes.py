"""README.md of every environment: headings, options with their defaults, a transcript that its command prints, and
baselines that its commands measure. It ships in the wheel with the environment's code."""

import contextlib
import io
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import palestra

from palestra.envs import TEXT_ENVS, VECTOR_ENVS, env_options, load_env_class

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / "palestra" / "environments"
FOLDERS = sorted(path.parent.name for path in ENVIRONMENTS.glob("*/__init__.py"))
TEMPLATES = sorted((ROOT / "palestra" / "data" / "env_package").glob("*/README.md"))
HEADINGS = [
    "Seats, rewards, splits",
    "Options",
    "A transcript",
    "Baselines",
    "Check an answer by hand",
]
MAX_LINES = 75  # about a screen
BLOCK = re.compile(r"^(?P<fence>```+)(?P<language>\w*)\n(?P<text>.*?)^(?P=fence)$", re.MULTILINE | re.DOTALL)
MEASURED = r"(?P<what>(?:success|return)(?: of \w+)?) (?P<value>-?[\d.]+)"
BASELINE = re.compile(rf"^(?P<command>palestra eval .*?) +# {MEASURED}")
NOT_AN_OPTION = "–"


def readme(folder: str) -> str:
    return (ENVIRONMENTS / folder / "README.md").read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    return re.split(r"^## ", text.partition(f"\n## {title}\n")[2], flags=re.MULTILINE)[0]


def blocks(text: str) -> list[tuple[str, str]]:
    """The language and the text of each block."""
    return [(match["language"], match["text"]) for match in BLOCK.finditer(text)]


def documented_options(text: str) -> dict[str, dict[str, str]]:
    """The default of each option of each env, as written in the table of options."""
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in re.findall(r"^\|.*$", text, re.MULTILINE)]
    envs = rows[0][1:-1]
    found: dict[str, dict[str, str]] = {env: {} for env in envs}
    for row in rows[2:]:
        for env, default in zip(envs, row[1:-1], strict=True):
            if default != NOT_AN_OPTION:
                found[env] |= dict.fromkeys(re.findall(r"`(\w+)`", row[0]), default)
    return found


def true_options(env: str) -> dict[str, str]:
    """The default of each option of an env, as the table should have it."""
    fields = env_options(load_env_class(env)).model_fields
    return {name: written(field.default) for name, field in fields.items()}


def written(default: Any) -> str:
    if default is None:
        return "none"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def envs_of(folder: str) -> list[str]:
    """The names of the envs whose code is in the folder."""
    named = TEXT_ENVS | VECTOR_ENVS
    return [name for name, path in named.items() if path.startswith(f"palestra.environments.{folder}.")]


def baselines() -> list[Any]:
    found = []
    for folder in FOLDERS:
        for line in section(readme(folder), "Baselines").splitlines():
            if match := BASELINE.match(line):
                found.append(pytest.param(match["command"], match["what"], float(match["value"]), id=match["command"]))
    return found


def printed(language: str, text: str) -> str:
    """What the program of a block prints."""
    if language == "bash":
        return palestra(*shlex.split(text)[1:])
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(text, "transcript", "exec"), {})
    return output.getvalue()


def missing(transcript: str, output: str) -> str | None:
    """The first line of a transcript that does not follow the one before in `output`; `[...]` stands for a rest of a
    line, or for lines."""
    lines = iter(output.splitlines())
    for wanted in transcript.splitlines():
        start = wanted.removesuffix("[...]")
        if start.strip() and not any(line.startswith(start) if start != wanted else line == wanted for line in lines):
            return wanted
    return None


def test_every_environment_has_a_readme() -> None:
    assert len(FOLDERS) >= 10
    assert [folder for folder in FOLDERS if not (ENVIRONMENTS / folder / "README.md").is_file()] == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_readme_has_the_headings_on_one_screen(folder: str) -> None:
    text = readme(folder)
    assert re.findall(r"^## (.*)$", BLOCK.sub("", text), re.MULTILINE) == HEADINGS
    assert len(text.splitlines()) <= MAX_LINES
    assert "@@" not in text and all(section(text, title).strip() for title in HEADINGS)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.parent.name)
def test_readme_of_a_package_of_ones_own_has_the_same_headings(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", BLOCK.sub("", text), re.MULTILINE) == HEADINGS and "@@" not in text


@pytest.mark.parametrize("folder", FOLDERS)
def test_options_and_defaults_are_those_of_the_code(folder: str) -> None:
    documented = documented_options(section(readme(folder), "Options"))
    assert documented == {env: true_options(env) for env in envs_of(folder)}


@pytest.mark.parametrize("folder", FOLDERS)
def test_transcript_is_what_its_command_prints(folder: str) -> None:
    (language, program), (_, transcript) = blocks(section(readme(folder), "A transcript"))
    output = printed(language, program)
    assert missing(transcript, output) is None, output


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_baseline_names_its_command(folder: str) -> None:
    (_, text), *more = blocks(section(readme(folder), "Baselines"))
    lines = text.strip().splitlines()
    assert not more and len(lines) >= 1 and all(BASELINE.match(line) for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("command", "what", "value"), baselines())
def test_baseline_is_measured_again(command: str, what: str, value: float) -> None:
    """Scripted and random players give the same figures anywhere; of networks another processor rounds otherwise."""
    found = json.loads(palestra(*shlex.split(command)[1:], "--json").splitlines()[-1])
    if what.startswith("success"):
        share = value / 100
        success = found[what.replace(" of ", ".")]
        allowed = 4 * (2 * share * (1 - share) / found["episodes"]) ** 0.5 + 0.01
        assert success == pytest.approx(share, abs=allowed)
    else:
        measured = found["returns"][what.removeprefix("return of ")] if what != "return" else found["return"]
        assert measured == pytest.approx(value, abs=0.01 + 0.05 * abs(value))


def test_helpers() -> None:
    assert missing("a\n[...]\nc [...]", "a\nb\nc d\n") is None
    assert missing("a\nc", "c\na\n") == "c" and missing("a b", "a b c") == "a b"
    table = "| option | one | two | |\n|---|---|---|---|\n| `a`, `b` | `1` | – | x |\n| `c` | none | `true` | |\n"
    assert documented_options(table) == {"one": {"a": "`1`", "b": "`1`", "c": "none"}, "two": {"c": "`true`"}}
    line = "palestra eval pong --episodes 200    # return of first_0 4.77"
    match = BASELINE.match(line)
    assert match and match["what"] == "return of first_0" and match["value"] == "4.77"
