"""Publishes a trained agent as a folder: weights that `peft`, `transformers` and vLLM read, and a model card."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from huggingface_hub import HfApi

from palestra.api.agents.model_card import model_card
from palestra.api.agents.trained_agent import AGENT_FILE, TrainedAgent
from palestra.core.config import Tree
from palestra.core.failures import one_line
from palestra.core.files import atomic_folder, read_json
from palestra.engine.bases.model import Engine
from palestra.engine.bases.names import model_without_weights, resolve_base
from palestra.engine.bases.pretrained import load_config
from palestra.engine.forward.quantized import round_to_quantized
from palestra.engine.lora.adapters import add_to_weight
from palestra.engine.training.peft_format import MISREAD, load_adapter, remapped_targets, target_by_weight

# Training state: not published.
TRAINING_FILES = ("optimizer.safetensors", "critic.safetensors", "training.safetensors", "member.json")


def publish(
    agent: TrainedAgent, out: Path, *, merge: bool = False, base_name: str | None = None, licence: str | None = None
) -> None:
    """Writes `agent` with a model card to the new folder `out`.

    `merge` adds an adapter to its base and writes the whole model. `base_name` replaces the base's name in the
    published files, for bases that were a local folder in training; the run's config on the card is quoted as it was.
    Raises ValueError if `out` exists, if `merge` is set and the agent is not an adapter, or if PEFT would not read the
    adapter as it was trained.
    """
    if out.exists():
        raise ValueError(f"{out} already exists: name a new folder, or remove that one")
    if merge and agent.kind != "adapter":
        raise ValueError(f"{agent.name} is a {agent.kind}: only an adapter is merged into its base; leave out --merge")

    def write(folder: Path) -> None:
        if merge:
            save_merged(agent, folder)
        else:
            copy_weights(agent, folder, base_name)
        settings = dict(agent.lm_settings)
        if base_name and agent.kind != "network":
            settings["base"] = base_name
        published = replace(agent, lm_settings=settings)
        if merge:  # a merged model has the weights as they were dequantised
            published = replace(published, kind="model", folder=out, lm_settings=settings | {"quantize": None})
        if agent.kind != "network":
            (folder / AGENT_FILE).write_text(json.dumps(published.metadata(), indent=2, ensure_ascii=False) + "\n")
        card = model_card(published, base=settings.get("base", ""), licence=licence, folder=out.name)
        (folder / "README.md").write_text(card, encoding="utf-8")

    atomic_folder(out, write)


def create_hub_repo(repo: str, private: bool | None = None) -> str:
    """Creates a model repository on the Hugging Face Hub, unless it exists; returns its address. The token is that of
    `hf auth login` or HF_TOKEN. Raises ValueError if the hub refuses or cannot be reached."""
    try:
        return str(HfApi(library_name="palestra").create_repo(repo, private=private, exist_ok=True))
    except Exception as error:  # the hub, its client and the network fail in many ways
        raise ValueError(
            f"--push-to-hub {repo}: {one_line(error)}; the name is USER/NAME, the token that of `hf auth login` or "
            "HF_TOKEN, with the right to write"
        ) from error


def push_to_hub(folder: Path, repo: str) -> None:
    """Uploads a published folder to a repository, as one commit. Raises ValueError if that fails."""
    try:
        HfApi(library_name="palestra").upload_folder(
            repo_id=repo, folder_path=folder, commit_message=f"Publish {folder.name} with palestra"
        )
    except Exception as error:  # as above
        raise ValueError(
            f"{folder} is written and not uploaded: {one_line(error)}; `hf upload {repo} {folder}` tries again"
        ) from error


def copy_weights(agent: TrainedAgent, folder: Path, base_name: str | None) -> None:
    """Copies the weight files, without training state; sets an adapter's base to `base_name` if given. Raises
    ValueError if PEFT would not read the adapter as it was trained."""
    left_out = {*TRAINING_FILES, "reference"}
    if agent.kind == "network":
        left_out.remove(TRAINING_FILES[-1])
    for path in agent.folder.iterdir():
        if path.is_file() and path.name not in left_out:
            shutil.copyfile(path, folder / path.name)
    if agent.kind == "adapter":
        config = read_json(folder / "adapter_config.json", dict)
        changed = dict(make_readable(agent, config))
        if base_name:
            changed["base_model_name_or_path"] = base_name
        if changed != config:
            (folder / "adapter_config.json").write_text(json.dumps(changed, indent=2))


def make_readable(agent: TrainedAgent, config: Tree) -> Tree:
    """Returns an adapter's PEFT config with targets that PEFT reads as they were trained. Checkpoints have them since
    `target_by_weight`; a base that cannot be found is not asked for. Raises ValueError if PEFT cannot."""
    try:
        model = model_without_weights(agent.lm_settings.get("base", ""))
    except (OSError, ValueError):
        return config
    wrong = MISREAD.get(model.config.model_type)
    targets = config.get("target_modules") or [], config.get("target_parameters") or []
    if wrong and any(wrong in str(target) for names in targets for target in names):
        raise ValueError(f"peft does not find the adapter's tensors of {wrong[1:-1]} in this model: use --merge")
    remapped = remapped_targets(config, model)
    if remapped and config.get("use_dora"):
        raise ValueError(
            f"peft would give DoRA of {remapped[0]} to the experts of {agent.lm_settings['base']}: train without "
            "use_dora or with target_modules of attention alone, or use it with `palestra serve-agent`"
        )
    changed = dict(config)
    target_by_weight(changed, remapped)
    return changed


def save_merged(agent: TrainedAgent, folder: Path) -> None:
    """Writes the base model with the adapter added. The sum is computed in float32 and stored in the base's dtype. An
    adapter that was trained on a quantised base is added to the weights that it was trained on, dequantised.

    Raises ValueError for an adapter on an output layer that is tied to the embeddings: merging would change both.
    """
    base = agent.lm_settings["base"]
    engine = Engine.load(base, device="cpu", dtype="float32")
    adapter = load_adapter(agent.folder, engine)
    head = engine.model.get_output_embeddings()
    if engine.model.config.tie_word_embeddings and any(engine.linear_layers[name] is head for name in adapter.weights):
        raise ValueError(f"{agent.name} adapts the output layer of {base}, which shares its weights: publish unmerged")
    if not adapter.mergeable:
        raise ValueError(
            f"{agent.name} has weights other than pairs of matrices on linear layers (DoRA, adapted experts or modules "
            "trained in full): publish it unmerged, or merge it with peft"
        )
    if kind := agent.lm_settings.get("quantize"):
        round_to_quantized(engine.model, kind)
    with torch.no_grad():
        for name, (a, b) in adapter.weights.items():
            add_to_weight(engine.linear_layers[name], adapter.scale_of(name) * (b @ a))
    dtype = getattr(load_config(resolve_base(base)), "dtype", None) or torch.float32
    engine.model.to(dtype).save_pretrained(folder)
    engine.tokenizer.save_pretrained(folder)
