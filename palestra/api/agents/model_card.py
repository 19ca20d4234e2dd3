"""Writes the model card of a published agent: its base, its results, its training, and how to load it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path

import yaml

from palestra.api.agents.trained_agent import TrainedAgent, read_adapter_config
from palestra.core.config import Tree, hide_credentials, load
from palestra.core.config.shipped import SHIPPED_BASES_DIR
from palestra.core.files import read_bytes, read_lines
from palestra.engine.bases.packaged_bases import PACKAGED_BASES
from palestra.runs.headline import (
    algorithm_label,
    format_return,
    format_seat_return,
    paid_seats,
    return_keys,
    success_keys,
    total_steps,
)
from palestra.runs.series import group_lines, success_interval, valid_instances
from palestra.runs.settings import read_meta

HUB_REPO = re.compile(r"[\w.-]+/[\w.-]+")


def model_card(agent: TrainedAgent, *, base: str, licence: str | None, folder: str) -> str:
    """Returns the README.md of an agent published in `folder`, with the hub's YAML header."""
    tree: Tree = {}
    evals: dict[str, list[Tree]] = {}
    if agent.run:
        tree = load(agent.run / "config.yaml")
        evals = group_lines(read_lines(agent.run / "evals.jsonl"), "name")
    past_evals = {name: _until(lines, agent.step) for name, lines in evals.items()}
    head = _front(agent, base, licence, tree, {name: lines for name, lines in past_evals.items() if lines})
    sections = [
        f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---",
        f"# {agent.name}",
        _what(agent, base, tree),
        *_results(past_evals),
        *_training_section(agent, tree),
        "## How to load it",
        _loading(agent, base, folder),
        "## License",
        _licence(base, licence),
    ]
    return "\n\n".join(sections) + "\n"


def _until(lines: list[Tree], step: int | None) -> list[Tree]:
    """Returns the lines of an evaluation that were written before or at the step of the weights."""
    return [line for line in lines if step is None or line["step"] < step]


def _front(agent: TrainedAgent, base: str, licence: str | None, tree: Tree, evals: dict[str, list[Tree]]) -> Tree:
    """Returns the YAML header as a tree. The base is left out if it is not a repository of the hub."""
    is_on_hub = HUB_REPO.fullmatch(base)
    libraries = {"adapter": "peft", "model": "transformers"}
    head: Tree = {}
    if is_on_hub:
        head["base_model"] = base
    if agent.kind in libraries:
        head |= {"library_name": libraries[agent.kind], "pipeline_tag": "text-generation"}
    tags = ["palestra", "reinforcement-learning", "multi-agent"]
    if agent.kind == "adapter":
        tags.append("lora")
    tags += [*_envs(tree), *_learns(agent, tree).split(", then ")]
    head["tags"] = list(dict.fromkeys(filter(None, tags)))
    if is_on_hub and agent.kind == "adapter":
        head["tags"].append(f"base_model:adapter:{base}")
    if licence:
        head["license"] = licence
    if results := [result for name, lines in evals.items() for result in _index(name, lines[-1], tree)]:
        head["model-index"] = [{"name": agent.name, "results": results}]
    return head


def _envs(tree: Tree) -> list[str]:
    return [str(env["type"]) for env in [tree.get("env") or {}, *(tree.get("envs") or {}).values()] if "type" in env]


def _learns(agent: TrainedAgent, tree: Tree) -> str:
    """Returns the names of the algorithms that the agent was trained by, up to its step; "" if unknown."""
    return str((tree.get("population") or {}).get("type") or algorithm_label(tree, agent.step))


def _index(name: str, line: Tree, tree: Tree) -> list[Tree]:
    """Returns an evaluation as entries of the hub's model-index."""
    values = [(key, line[key]) for key in (*success_keys(line), *return_keys(line)) if line.get(key) is not None]
    data = {"name": name, "type": (_envs(tree) or ["env"])[0]}
    task = {"type": "reinforcement-learning"}
    return [{"task": task, "dataset": data, "metrics": [{"type": k, "value": round(v, 4)}]} for k, v in values]


def _what(agent: TrainedAgent, base: str, tree: Tree) -> str:
    base = _describe_base(base)
    kinds = {"adapter": f"A LoRA adapter for {base}", "model": f"A language model, trained from {base}"}
    what = kinds.get(agent.kind, "A small network that plays a vectorised game")
    if envs := _envs(tree):
        what += f", trained in {', '.join(envs)} by {_learns(agent, tree)}"
    return f"{what} with palestra. Its name there is `{agent.versioned_name}`: {agent.version} updates."


def _describe_base(base: str) -> str:
    if base in PACKAGED_BASES:
        return f"`{base}`, of the package {PACKAGED_BASES[base].package}"
    if _is_known(base):
        return f"`{base}`, which ships with palestra"
    if base[:1] in "./~":
        return f"`{Path(base).name}`"
    return f"`{base}`"


def _is_known(base: str) -> bool:
    """True for a name that `resolve_base` resolves without a hub."""
    return base in PACKAGED_BASES or ("/" not in base and (SHIPPED_BASES_DIR / base).is_dir())


def _results(evals: dict[str, list[Tree]]) -> list[str]:
    """Returns the section of evaluation results, before training and at the saved step; empty without any."""
    rows = [_row(name, lines) for name, lines in evals.items() if lines]
    if not rows:
        return []
    head = "| evaluation | instances | metric | before training | this agent |\n|---|---:|---|---:|---:|"
    note = (
        "Held-out episodes, with the policies at the seats that the config below gives. Success has its 95 % Wilson "
        "interval; returns have half the width of their normal 95 % interval where it was recorded."
    )
    return ["## Results", "\n".join([head, *chain.from_iterable(rows)]), note]


def _row(name: str, lines: list[Tree]) -> list[str]:
    last = lines[-1]
    columns: list[tuple[str, Callable[[Tree], str]]] = [
        (what, partial(success_interval, key=key)) for key, what in success_keys(last).items()
    ]
    if "return" in return_keys(last):
        columns.append(("return", format_return))
    columns += [(f"return of {seat}", partial(format_seat_return, seat=seat)) for seat in paid_seats(last)]
    rows = []
    for key, format_value in columns:
        first = format_value(lines[0]) if lines[0]["step"] < 0 else "-"
        cells = [_cell(name), f"{valid_instances(last):.0f}", _cell(key), first, format_value(last)]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _training_section(agent: TrainedAgent, tree: Tree) -> list[str]:
    """Returns the section with steps, seed, versions and the whole config; empty for an agent without a run."""
    if agent.run is None:
        return []
    meta = read_meta(agent.run)
    facts = [f"- seed {meta.get('seed', tree.get('seed', 0))}"]
    steps = total_steps(tree)
    if agent.step and steps:
        facts.append(f"- saved after {agent.step} of {steps} steps")
    facts += [f"- {name} {meta[name]}" for name in ("palestra", "torch", "transformers", "python") if meta.get(name)]
    if meta.get("command"):
        facts.append(f"- on {meta['created'][:10]}, by `{_command(meta['command'])}`")
    text = read_bytes(agent.run / "config.yaml").decode().rstrip()
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 3)
    config = f"<details><summary>The whole config</summary>\n\n{fence}yaml\n{text}\n{fence}\n\n</details>"
    return ["## How it was trained", "\n".join(facts), config]


def _command(words: list[str]) -> str:
    """Returns the command line, without the folder of the executable."""
    return hide_credentials(shlex.join([Path(words[0]).name, *words[1:]])).replace("`", "'")


def _loading(agent: TrainedAgent, base: str, folder: str) -> str:
    if agent.kind == "network":
        return (
            "As a policy in a config of palestra:\n\n```yaml\npolicies:\n"
            f"  rival: {{type: frozen, path: {folder}}}\n```"
        )
    serve = f"With palestra, behind an OpenAI-compatible endpoint:\n\n```bash\npalestra serve-agent {folder}\n```"
    if agent.kind == "model":
        code = f'from transformers import pipeline\n\npipe = pipeline("text-generation", "{folder}")'
        vllm = f"```bash\nvllm serve {folder}\n```"
        return f"```python\n{code}\n```\n\nWith vLLM:\n\n{vllm}\n\n{serve}"
    about = read_adapter_config(agent.folder)
    rank = max([about.r, *(about.rank_pattern or {}).values()])
    first = ""
    where = f'"{base}"'
    served = base
    if _is_known(base):
        first = "from palestra.engine.bases.model import resolve_base  # finds a base by its name\n"
        where = f'resolve_base("{base}")'
        code_of_base = f"from palestra.engine.bases.model import resolve_base as r; print(r('{base}'))"
        served = f'"$(python -c "{code_of_base}")"'
    code = (
        f"{first}from peft import PeftModel\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"base = {where}\ntokenizer = AutoTokenizer.from_pretrained(base)\n"
        f'model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), "{folder}")'
    )
    vllm = f"vllm serve {served} --enable-lora --max-lora-rank {_vllm_rank(rank)} --lora-modules {agent.name}={folder}"
    return f"With `peft`:\n\n```python\n{code}\n```\n\nWith vLLM:\n\n```bash\n{vllm}\n```\n\n{serve}"


def _vllm_rank(rank: int) -> int:
    """Returns the smallest LoRA rank that vLLM supports and that is at least `rank`."""
    return next((size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= rank), rank)


def _licence(base: str, licence: str | None) -> str:
    if licence and base:
        return f"These weights: {licence}. The base has a license of its own."
    if licence:
        return f"These weights: {licence}."
    text = "None was stated when these weights were published."
    if base:
        text += " Weights derived from a base remain under that base's license."
    return text
