"""Checks the files of a model that somebody else may have made, before transformers loads them."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from palestra.core.files import DamagedFile, check_is_file, read_bytes, read_json
from palestra.engine.check.reduced_model import LAYER_COUNTS

MAX_TEMPLATE_BYTES = 2**20
TEMPLATE_CPU_S = 5  # processor time for rendering the templates of a model, imports included
TEMPLATE_MEMORY_BYTES = 2**31
RENDER = """
import json, sys
from transformers.utils.chat_template_utils import _compile_jinja_template as compile_template
messages = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
for template in json.load(sys.stdin):
    try:
        compile_template(template).render(messages=messages, tools=None, documents=None, add_generation_prompt=True,
            bos_token="", eos_token="", pad_token="", unk_token="")
    except MemoryError:
        raise
    except Exception:
        pass  # a server answers with an error when it happens
"""


def check_model_files(folder: Path) -> None:
    """Checks the weights, the number of layers and the chat templates in `folder`.

    Raises DamagedFile if a file is not what its name says, if the config has more layers than there are weights, or if
    a chat template takes more than `TEMPLATE_CPU_S` seconds or `TEMPLATE_MEMORY_BYTES` bytes.
    """
    num_tensors = sum(_num_tensors(check_is_file(file)) for file in sorted(folder.glob("*.safetensors")))
    config = read_json(folder / "config.json", dict, {})
    for counts in (config, config.get("text_config")):
        if not isinstance(counts, dict) or not num_tensors:
            continue
        if any(isinstance(count, int) and count > num_tensors for count in map(counts.get, LAYER_COUNTS)):
            raise DamagedFile(f"{folder / 'config.json'} has more layers than there are weights beside it")
    if templates := list(_chat_templates(folder)):
        _render(folder, templates)


def _num_tensors(file: Path) -> int:
    try:
        with safe_open(file, framework="np") as opened:
            return len(opened.keys())
    except (SafetensorError, OSError) as error:
        raise DamagedFile(f"{file} is not a file of weights: {error}") from error


def _chat_templates(folder: Path) -> Iterator[str]:
    """Yields the chat templates of a tokenizer, in each of the places where transformers looks for them."""
    for file in [folder / "chat_template.jinja", *folder.glob("additional_chat_templates/*.jinja")]:
        if file.exists():
            yield read_bytes(file, MAX_TEMPLATE_BYTES).decode(errors="replace")
    for name in ("tokenizer_config.json", "chat_template.json"):
        template = read_json(folder / name, dict, {}).get("chat_template")
        if not isinstance(template, list):
            template = [{"template": template}]
        for named in template:
            if isinstance(named, dict) and isinstance(named.get("template"), str):
                yield named["template"]


def _render(folder: Path, templates: list[str]) -> None:
    """Renders a short conversation in a process with limits: a template is a program, with loops."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", RENDER],
        input=json.dumps(templates),
        text=True,
        capture_output=True,
        preexec_fn=partial(_limit, TEMPLATE_CPU_S, TEMPLATE_MEMORY_BYTES),
    )
    if done.returncode:
        raise DamagedFile(
            f"the chat template in {folder} takes more than {TEMPLATE_CPU_S} s or {TEMPLATE_MEMORY_BYTES:,} bytes for "
            "four words: it is not served"
        )


def _limit(cpu_s: int, memory_bytes: int) -> Any:
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
