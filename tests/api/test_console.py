"""The terminal shows the texts of models, envs and configs without executing their control characters."""

import os
import pty
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
import yaml
from helpers.command_line import invoke

from palestra.core.chat import escape_control_chars

HOSTILE = (
    "a:fire:b :moon: [red]x[/red] [/] [link=https://a.example]y[/link] "
    "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x1b]52;c;ZXZpbA==\x07 \x9b2J back\x08\x08 over\rwritten "
    "\u202egnp.exe \u2066i\u2069"
)
EXPECTED_TEXT = (
    "\\x1b[31mred\\x1b[0m \\x1b]0;title\\x07 \\x1b]52;c;ZXZpbA==\\x07 \\x9b2J back\\x08\\x08 over\\rwritten "
    "\\u202egnp.exe"
)
MARKS = "a:fire:b :moon: [red]x[/red] [/] [link=https://a.example]y[/link]"


def control_characters(text, own=("\x1b[0m", "\x1b[1m", "\x1b[31m")):
    """The characters in `text` that a terminal would execute, except `own`."""
    for code in own:
        text = text.replace(code, "")
    return {c for c in text if unicodedata.category(c) in ("Cc", "Cf") and c not in "\n\t"}


def unfolded(text):
    return text.replace("\n", "").replace(" ", "")


@pytest.fixture
def config(tmp_path):
    """Every policy answers with a hostile text."""
    tree = {
        "env": {"type": "helpers.toys:Whisper"},
        "policies": {"default": {"type": "scripted", "answers": [HOSTILE]}},
        "steps": 1,
        "episodes": 1,
    }
    path = tmp_path / "hostile.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def test_escape_control_chars_escapes_only_control_chars():
    assert escape_control_chars(HOSTILE).endswith(f"{EXPECTED_TEXT} \\u2066i\\u2069")
    kept = "plain\ttext\nשלום 你好 \N{FIRE} \N{WOMAN}\u200d\N{PERSONAL COMPUTER} e\u0301"
    assert (
        escape_control_chars(kept) == kept
        and escape_control_chars("\ud800") == "\\ud800"
        and escape_control_chars("a\u2028b") == "a\\u2028b"
    )


def test_eval_output_escapes_control_chars(config):
    done = invoke("eval", config, "--episodes", "1", "--show", "1")
    assert done.exit_code == 0, done.output
    assert MARKS in done.stdout and EXPECTED_TEXT in done.stdout and not control_characters(done.stdout)


def test_play_output_escapes_control_chars(tmp_path):
    (tmp_path / "echo_env.py").write_text(
        "from palestra.envs.base import Env\nfrom palestra.core.types import Step\n\n\n"
        "class Echo(Env):\n"
        "    seats = ('a', 'b')\n\n"
        "    def reset(self, seed):\n"
        "        return Step({'a': 'speak'})\n\n"
        "    def step(self, actions):\n"
        "        return Step({'b': actions['a']} if 'a' in actions else {}, info={'success': True})\n"
    )
    tree = {
        "env": {"type": "echo_env:Echo"},
        "policies": {"a": {"type": "scripted", "answers": [HOSTILE]}, "b": {"type": "random"}},
    }
    path = tmp_path / "echo.yaml"
    path.write_text(yaml.safe_dump(tree))
    sys.path.insert(0, str(tmp_path))
    try:
        done = invoke("play", path, "--seat", "b", input="yes\n")
    finally:
        sys.path.remove(str(tmp_path))
    assert done.exit_code == 0, done.output
    assert MARKS in done.stdout and EXPECTED_TEXT in done.stdout and not control_characters(done.stdout)


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "CONFIG", "--set", f"env.type={HOSTILE}"],
        ["train", "CONFIG", "--set", f"{HOSTILE}=1"],
        ["train", f"{HOSTILE}.yaml"],
        ["eval", f"runs/{HOSTILE}"],
        ["eval", "CONFIG", "--seats", f"guide={HOSTILE}"],
        ["eval", "CONFIG", "--episodes", HOSTILE],
        ["eval", f"--{HOSTILE}"],
        [HOSTILE],
        ["runs", "--root", f"no:fire:{HOSTILE}"],
    ],
    ids=lambda arguments: " ".join(a if a.isprintable() and a != HOSTILE else "HOSTILE" for a in arguments),
)
def test_error_messages_escape_control_chars(config, arguments):
    done = invoke(*(config if a == "CONFIG" else a for a in arguments))
    assert isinstance(done.exception, SystemExit | None), done.exception
    assert "\N{FIRE}" not in done.output and not control_characters(done.output), done.output


def test_emoji_codes_in_messages_are_not_replaced(config):
    done = invoke("train", config, "--set", "env.type=frog:Fog")
    assert "cannot be loaded from frog:Fog: there is no module frog in " in done.stderr


@pytest.mark.slow
def test_real_terminal_receives_no_hostile_sequences(config):
    """The installed command on a real pseudo-terminal, where rich itself uses colours and cursor movements."""
    controller, terminal = pty.openpty()
    command = [Path(sys.executable).parent / "palestra", "eval", config, "--episodes", "1", "--show", "1"]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "TERM": "xterm-256color"}
    with subprocess.Popen(command, stdout=terminal, stderr=terminal, env=env, cwd=config.parent) as process:
        os.close(terminal)
        said = b""
        while True:
            try:
                said += (part := os.read(controller, 65536))
            except OSError:  # Linux: the other side has closed
                break
            if not part:
                break
    os.close(controller)
    assert process.returncode == 0, said
    assert MARKS.encode() in said and EXPECTED_TEXT.encode() in said
    assert (
        b"\x1b]" not in said and b"\x1b[31m" not in said and b"\xc2\x9b" not in said and "\u202e".encode() not in said
    )
