"""Saves and loads full models and training state.

The optimizer's state is in `optimizer.safetensors`, beside an adapter in PEFT's format (peft_format.py) or a model.

The format does not depend on the number of ranks: sharded tensors are gathered one at a time and written by rank 0;
each rank reads its own rows of the files. Training can resume with any other number of ranks.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from palestra.engine.bases.fsdp import full_tensor, is_sharded, local_rows, local_shard, own_class
from palestra.engine.bases.model import Engine
from palestra.engine.bases.pretrained import load_model
from palestra.engine.lora.adapters import Adapter
from palestra.engine.training.peft_format import load_adapter, save_adapter
from palestra.parallel.process_group import ProcessGroup

REFERENCE_DIR = "reference"  # subfolder of the reference adapter
FULL_REFERENCE_FILE = "reference.safetensors"  # the reference of a full model
CRITIC_FILE = "critic.safetensors"


class TrainingState(Protocol):
    """Weights in training, with the attributes of `AdapterWeights` that a checkpoint has."""

    engine: Engine
    adapter: Adapter | None
    reference: Adapter | None
    full_reference: Any  # ReferenceWeights or None
    critic: nn.Linear | None
    parameters: Any  # list of tensors
    optimizer: Any  # torch's
    optimizer_name: str
    loss_scale: Any  # LossScale or None
    steps: int
    group: ProcessGroup


def save_training_state(folder: Path, trainer: TrainingState) -> None:
    """Writes the trained weights (adapter or full model, critic), the reference if it is not the base, and the
    optimizer state. `load_training_state` restores exactly this state. All ranks must call it; rank 0 writes."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {} if trainer.adapter else _gather_state(trainer.engine.model.state_dict(keep_vars=True), trainer)
    slots = _optimizer_state(trainer)
    if not trainer.group.is_rank_zero:
        return
    if trainer.reference:
        save_adapter(folder / REFERENCE_DIR, trainer.reference, trainer.engine.name, trainer.engine.model)
    if trainer.full_reference and not trainer.full_reference.is_base:
        trainer.full_reference.save(folder / FULL_REFERENCE_FILE)
    if trainer.critic:
        save_file(trainer.critic.state_dict(), folder / CRITIC_FILE)
    _write_weights(folder, trainer, weights)
    about: dict[str, Any] = {"steps": trainer.steps, "optimizer": trainer.optimizer_name}
    if trainer.loss_scale:
        about |= {"loss_scale": trainer.loss_scale.value, "good_steps": trainer.loss_scale.good_steps}
    # one entry: safetensors writes several in random order, and equal states are to be equal files
    save_file(slots, folder / "optimizer.safetensors", metadata={"trainer": json.dumps(about)})


def save_weights(folder: Path, trainer: TrainingState) -> None:
    """Writes the adapter or the full model without training state, for samplers in other processes."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_weights(folder, trainer, {} if trainer.adapter else trainer.engine.model.state_dict())


def _write_weights(folder: Path, trainer: TrainingState, weights: dict[str, Tensor]) -> None:
    """Writes the adapter, or for a full model the weights `weights`, in the format of its architecture that others read
    (the names in the files need not be those in the model)."""
    if trainer.adapter:
        save_adapter(folder, trainer.adapter, trainer.engine.name, trainer.engine.model)
    else:
        trainer.engine.model.save_pretrained(folder, state_dict=weights)
        trainer.engine.tokenizer.save_pretrained(folder)


def _gather_state(state: dict[str, Tensor], trainer: TrainingState) -> dict[str, Tensor]:
    """Returns `state` with full tensors in the CPU memory of rank 0, and empty tensors on other ranks. Tied tensors
    stay one tensor."""
    if not trainer.engine.sharded_params:
        return {name: tensor.detach() for name, tensor in state.items()}
    found: dict[str, Tensor] = {}
    known: dict[int, Tensor] = {}
    for name, tensor in state.items():
        if id(tensor) not in known:
            whole = full_tensor(local_shard(tensor), tensor)
            known[id(tensor)] = whole.cpu() if trainer.group.is_rank_zero else whole.new_empty(0)
        found[name] = known[id(tensor)]
    return found


def _optimizer_state(trainer: TrainingState) -> dict[str, Tensor]:
    """Returns the full optimizer tensors by parameter number and name; an empty dict on all ranks but rank 0."""
    found = {}
    for i, slots in trainer.optimizer.state_dict()["state"].items():
        for slot, value in _flat(slots):
            whole = full_tensor(value, trainer.parameters[i])
            if trainer.group.is_rank_zero:
                found[f"{i}.{slot}"] = whole.cpu().contiguous()
    return found


def _flat(slots: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a parameter's state. bitsandbytes nests 8-bit tensors (it also loads them flat) and stores
    step counts as int."""
    for slot, value in slots.items():
        if isinstance(value, dict):
            yield from _flat(value)
        else:
            tensor = torch.as_tensor(value)
            if slot.startswith("qmap"):  # one table, shared by all parameters
                tensor = tensor.clone()
            yield slot, tensor


def load_training_state(folder: Path, trainer: TrainingState) -> None:
    """Restores weights and optimizer state from `folder` into a trainer of the same shape. Raises ValueError if they do
    not fit."""
    load_weights(folder, trainer)
    trainer.reference = None
    if (folder / REFERENCE_DIR).exists():
        trainer.reference = load_adapter(folder / REFERENCE_DIR, trainer.engine)
    if trainer.full_reference and (folder / FULL_REFERENCE_FILE).exists():
        trainer.full_reference.load(folder / FULL_REFERENCE_FILE)
    if trainer.critic:
        if not (folder / CRITIC_FILE).exists():
            raise ValueError(f"the checkpoint at {folder} holds no critic ({CRITIC_FILE}): it was trained without one")
        trainer.critic.load_state_dict(load_file(folder / CRITIC_FILE))
    _load_optimizer(folder / "optimizer.safetensors", trainer)


def load_weights(folder: Path, trainer: TrainingState) -> None:
    """Restores the adapter or the full model only. Raises ValueError if the shapes differ."""
    if trainer.adapter:
        saved = load_adapter(folder, trainer.engine)
        if saved.shapes() != trainer.adapter.shapes():
            raise ValueError(
                f"the adapter at {folder} has another rank, scale or other targets than the config asks for."
            )
        trainer.adapter.copy_from(saved)
    else:
        load_full_model(folder, trainer.engine)


def load_full_model(folder: Path, engine: Engine) -> None:
    """Loads full weights from `folder`, as `save_pretrained` writes them, into the engine's model. Raises ValueError if
    the folder holds no model, or if a weight is missing, unexpected or of another shape."""
    files = sorted(folder.glob("model*.safetensors"))  # one file, or the shards of a large model
    if not files:
        what = "holds neither an adapter nor model.safetensors" if folder.is_dir() else "does not exist"
        raise ValueError(f"no model at {folder}: it {what}. Name a folder that save_pretrained wrote.")
    if engine.sharded_params:
        engine.sharded_params.reshard()
    model = engine.model
    mine = model.state_dict()
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else set()
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
        stored: dict[str, Any] = {}
        for file in opened:
            stored |= dict.fromkeys(file.keys(), file)
        if set(mine) - set(stored) - tied or set(stored) - set(mine):
            _copy_converted(folder, model, mine)
            return
        misfits = [name for name, file in stored.items() if _shape_in(file, name) != list(mine[name].shape)]
        if misfits:
            raise _other_weights(folder, misfits[0])
        with torch.no_grad():
            for name, file in stored.items():
                local_shard(mine[name]).copy_(_part(file, name, mine[name]))


def _copy_converted(folder: Path, model: PreTrainedModel, mine: dict[str, Tensor]) -> None:
    """Copies weights that have other names in files than in the model, by transformers' own conversion: experts are
    stacked in the model only, and parts of models of images and text have other names there. Needs CPU memory for a
    second copy of the model. Raises ValueError if the weights are not of this model."""
    loaded, found = load_model(
        own_class(model),
        str(folder),
        config=copy.deepcopy(model.config),
        dtype=model.dtype,
        attn_implementation="eager",
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    for names in (found["missing_keys"], found["unexpected_keys"], found["mismatched_keys"]):
        if names:
            first = min(names)
            raise _other_weights(folder, first if isinstance(first, str) else first[0])
    with torch.no_grad():
        for name, whole in loaded.state_dict().items():
            if is_sharded(mine[name]):
                whole = whole[local_rows(mine[name])]
            local_shard(mine[name]).copy_(whole)


def _other_weights(folder: Path, name: str) -> ValueError:
    return ValueError(f"the weights at {folder} are not of this model: see {name}")


def _shape_in(file: Any, name: str) -> list[int]:
    shape: list[int] = file.get_slice(name).get_shape()
    return shape


def _part(file: Any, name: str, like: Tensor) -> Tensor:
    """Returns the rows of a stored tensor that this rank holds of `like`; the whole tensor if `like` is not sharded or
    has another shape."""
    part: Tensor
    if not is_sharded(like) or _shape_in(file, name) != list(like.shape):
        part = file.get_tensor(name)
    else:
        part = file.get_slice(name)[local_rows(like)]
    return part


def _load_optimizer(path: Path, trainer: TrainingState) -> None:
    if not path.exists():
        raise ValueError(f"the checkpoint at {path.parent} is not whole: it holds no {path.name}")
    state: dict[int, dict[str, Tensor | int]] = {}
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["trainer"])
        for key in file.keys():  # noqa: SIM118 (not a dict)
            index, slot = key.split(".", 1)
            part = _part(file, key, trainer.parameters[int(index)])
            state.setdefault(int(index), {})[slot] = int(part) if part.dtype == torch.int64 else part
    if (kind := about["optimizer"]) != trainer.optimizer_name:
        raise ValueError(
            f"the checkpoint at {path.parent} holds the state of optimizer: {kind}, and the config has "
            f"{trainer.optimizer_name}: set optimizer: {{type: {kind}}}"
        )
    trainer.steps = about["steps"]
    if trainer.loss_scale and "loss_scale" in about:
        trainer.loss_scale.value, trainer.loss_scale.good_steps = about["loss_scale"], about["good_steps"]
    groups = trainer.optimizer.state_dict()["param_groups"]
    trainer.optimizer.load_state_dict({"state": state, "param_groups": groups})
