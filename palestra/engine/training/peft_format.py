"""Saves and loads adapters in PEFT's format.

An adapter folder holds `adapter_config.json` and `adapter_model.safetensors`, which `peft`, vLLM and others load
unchanged. A and B of stacked experts are matrices there: `A [r*E, in]`, expert by expert, and `B [out, r*E]`, rank by
rank. Where one module has several stacked weights with an adapter, PEFT wraps it once for each, so that all but the
last have names with `base_layer` in them.

In mixtures of experts, PEFT takes target modules with the old names of expert layers (`REMAPPED`) for the stacked
experts, also if they are dense or shared layers. Such layers are `target_parameters` in the config, by their weight's
name, which PEFT reads as they were trained; the tensors are the same.

Shapes: `E` experts, `r` rank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, conversion_mapping

from palestra.core.files import read_json
from palestra.engine.bases.model import Engine
from palestra.engine.lora.adapters import Adapter, Snapshot, Weights
from palestra.engine.lora.config import LoraConfig, matches_pattern, names_of_targets
from palestra.engine.lora.variants import Extras, stacked_parameters

PEFT_PREFIX = "base_model.model."
A_END = ".lora_A.weight"
B_END = ".lora_B.weight"
MAGNITUDE_END = ".lora_magnitude_vector"
BASE_LAYER = ".base_layer"
WEIGHT_END = ".weight"
MISREAD = {"laguna": ".shared_experts."}  # layers whose tensors PEFT looks for under wrong names, by kind of model
REMAPPED = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
VARIANTS = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "target_parameters")
USED = ("peft_type", "bias", "r", "lora_alpha", "lora_dropout", "target_modules", "init_lora_weights", *VARIANTS)
HARMLESS = {  # about the base, or about how the adapter was trained, which its tensors show
    *("base_model_name_or_path", "revision", "task_type", "auto_mapping", "peft_version", "inference_mode"),
    *("exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out", "megatron_config", "megatron_core"),
    *("eva_config", "qalora_group_size", "runtime_config"),
}
NOTHING: tuple[Any, ...] = (None, False, [], {}, "")
TENSORS_FILE = "adapter_model.safetensors"


def _check_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no pattern ({error})") from None
    return pattern


_Pattern = Annotated[str, AfterValidator(_check_pattern)]


class _PeftConfig(BaseModel):
    """Types of the options of PEFT's configs that are read; others may be of any."""

    model_config = ConfigDict(extra="allow", strict=True)

    r: int = Field(ge=1)
    lora_alpha: float = Field(allow_inf_nan=False)
    lora_dropout: float | None = Field(None, ge=0, lt=1)
    use_rslora: bool | None = None
    use_dora: bool | None = None
    target_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None
    modules_to_save: list[str] | None = None
    rank_pattern: dict[_Pattern, int] | None = None
    alpha_pattern: dict[_Pattern, float] | None = None
    bias: str = "none"
    init_lora_weights: bool | str | None = None


def save_adapter(folder: Path, adapter: Adapter, base: str, model: PreTrainedModel | None = None) -> None:
    """Writes `adapter` to `folder` in PEFT's format. `base` is the name or path of its base model, `model` the base."""
    config = adapter.config
    about: dict[str, Any] = {"r": config.rank, "lora_alpha": config.alpha, "lora_dropout": config.lora_dropout}
    about |= {key: getattr(config, key) for key in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern")}
    _save(folder, adapter.weights, adapter.extras, about, base, model)


def save_snapshot(folder: Path, snapshot: Snapshot, base: str) -> None:
    """Writes a snapshot in PEFT's format. Its scale is already folded into B, so alpha is set to the rank."""
    ranks = {name: a.shape[-2] for name, (a, _) in (snapshot.weights | snapshot.extras.experts).items()}
    pattern = {re.escape(name): rank for name, rank in ranks.items() if rank != snapshot.rank}
    about: dict[str, Any] = {"r": snapshot.rank, "lora_alpha": snapshot.rank, "lora_dropout": 0.0}
    about |= {"use_dora": bool(snapshot.extras.magnitudes), "rank_pattern": pattern, "alpha_pattern": pattern}
    _save(folder, snapshot.weights, snapshot.extras, about, base)


def _save(
    folder: Path,
    weights: Weights,
    extras: Extras,
    about: Mapping[str, Any],
    base: str,
    model: PreTrainedModel | None = None,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    named = dict(_named_tensors(weights, extras))
    tensors = {f"{PEFT_PREFIX}{name}": tensor.detach().cpu().contiguous() for name, tensor in named.items()}
    save_file(tensors, folder / TENSORS_FILE, metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted(weights),
        **about,
    }
    if extras.experts:
        config["target_parameters"] = sorted(extras.experts)
    if extras.modules:
        config["modules_to_save"] = sorted({name.rpartition(".")[0] for name in extras.modules})
    if model is not None and not config["use_dora"]:  # PEFT has no DoRA of parameters
        target_by_weight(config, remapped_targets(config, model))
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))


def remapped_targets(config: Mapping[str, Any], model: PreTrainedModel) -> list[str]:
    """Returns the target modules of a PEFT config that PEFT would take for stacked experts of the base `model`."""
    kinds: Mapping[str, str] = getattr(conversion_mapping, "_MODEL_TO_CONVERSION_PATTERN", {})
    by_kind = kinds.get(getattr(model.config, "model_type", "")) in ("mixtral", "qwen2_moe")  # also if all are dense
    if not by_kind and not any(w.dim() == 3 and "expert" in name for name, w in model.named_parameters()):
        return []
    targets = config.get("target_modules")
    return [t for t in targets if t.rpartition(".")[2] in REMAPPED] if isinstance(targets, list) else []


def target_by_weight(config: dict[str, Any], names: Sequence[str]) -> None:
    """Makes a PEFT config name some of its target modules by their weights. Ranks and alphas are kept; dropout, which
    is of training alone, is not: PEFT has none for parameters."""
    if not names:
        return
    config["target_modules"] = [name for name in config["target_modules"] if name not in names]
    stacked = config.get("target_parameters") or []
    config["target_parameters"] = sorted([*stacked, *(name + WEIGHT_END for name in names)])
    config["lora_dropout"] = 0.0
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(key) or {}
        own = {}
        for name in names:
            if matching := [value for pattern, value in patterns.items() if matches_pattern(pattern, name)]:
                own[re.escape(name + WEIGHT_END)] = matching[0]
        config[key] = patterns | own


def _named_tensors(weights: Weights, extras: Extras) -> Iterator[tuple[str, Tensor]]:
    """Yields all tensors with their names in PEFT's format, without the prefix."""
    for name, (a, b) in weights.items():
        yield name + A_END, a
        yield name + B_END, b
    for name, magnitude in extras.magnitudes.items():
        yield name + MAGNITUDE_END, magnitude
    yield from extras.modules.items()
    for name, wrapped in _wrapped_names(extras.experts).items():
        a_eri, b_eor = extras.experts[name]
        yield wrapped + A_END, a_eri.flatten(0, 1)
        yield wrapped + B_END, b_eor.permute(1, 2, 0).flatten(1)


def _wrapped_names(parameters: Iterable[str]) -> dict[str, str]:
    """Returns PEFT's name of the wrapper of each stacked weight, which it wraps in the order of `parameters` (model
    order). The first is the innermost."""
    of_module: dict[str, list[str]] = {}
    for name in parameters:
        of_module.setdefault(name.rpartition(".")[0], []).append(name)
    wrapped: dict[str, str] = {}
    for module, names in of_module.items():
        wrapped |= {name: module + BASE_LAYER * (len(names) - 1 - depth) for depth, name in enumerate(names)}
    return wrapped


def load_adapter(folder: Path, engine: Engine) -> Adapter:
    """Loads the adapter that PEFT or palestra wrote to `folder`. Raises ValueError if there is none, it is of a kind
    that is not supported, or it does not fit the base."""
    if not (folder / "adapter_config.json").exists():
        raise ValueError(f"no adapter at {folder}: it holds no adapter_config.json. Name a checkpoint's policy folder.")
    about = read_json(folder / "adapter_config.json", dict)
    try:
        _PeftConfig.model_validate(about)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        place = ".".join(map(str, wrong["loc"]))
        raise ValueError(f"the adapter at {folder} has a wrong {place} in its config: {wrong['msg']}") from None
    _refuse(_other_kinds(about), folder)
    stacked = [t for t in about.get("target_parameters") or () if not _is_of_linear(t, engine)]
    about["target_parameters"] = stacked
    tensors = _without_prefix(_read_tensors(folder))
    _drop_base_weights(tensors, engine, folder)
    config = _config(about, tensors, engine, folder)
    adapter = Adapter(engine.linear_layers, config, seed=0, model=engine.model)
    if other := sorted(set(tensors) ^ {name for name, _ in _named_tensors(adapter.weights, adapter.extras)}):
        raise ValueError(f"the adapter at {folder} and its config do not fit together or the base: see {other[0]}.")
    _fill(adapter, tensors)
    return adapter


def note_other_base(folder: Path, base: str) -> str:
    """Returns a note for the user if the adapter at `folder` was trained on a base of another name than `base`; "" if
    not. One base has several names (a folder, a name of the hub), so this alone is no reason to refuse it."""
    config_file = folder / "adapter_config.json"
    trained_on = read_json(config_file, dict).get("base_model_name_or_path") if config_file.exists() else None
    if not isinstance(trained_on, str) or Path(trained_on).name.lower() == Path(base).name.lower():
        return ""
    return f"the adapter at {folder} says that it was trained on {trained_on}; it is used on {base}"


def load_into(adapter: Adapter, folder: Path, engine: Engine) -> None:
    """Copies the weights of the adapter that PEFT or palestra wrote to `folder` into `adapter`. Raises ValueError as
    `load_adapter` does, and if the two have other layers, ranks or scales: the message names the options to set."""
    saved = load_adapter(folder, engine)
    if _layout(saved) != _layout(adapter):
        names = [*saved.weights, *saved.extras.experts]
        options: dict[str, Any] = {"rank": saved.config.rank, "alpha": saved.config.alpha}
        options["target_modules"] = sorted({name.rpartition(".")[2] for name in saved.weights})
        options |= {key: value for key, value in saved.config.variants.items() if key != "lora_dropout"}
        raise ValueError(
            f"the adapter at {folder} has other layers, ranks or scales ({len(names)} adapted weights) than the policy "
            f"that starts from it: set {', '.join(f'{key}: {json.dumps(value)}' for key, value in options.items())}"
        )
    _fill(adapter, dict(_named_tensors(saved.weights, saved.extras)))


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """Returns the tensors of an adapter folder. Raises ValueError if they cannot be read or are no finite numbers."""
    file = folder / TENSORS_FILE
    if not file.exists():
        remedy = "copy it again"
        if (folder / "adapter_model.bin").exists():
            remedy = "adapter_model.bin is a pickle, which can run code; save it again with peft"
        raise ValueError(f"the adapter at {folder} has no {TENSORS_FILE}: {remedy}.")
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"cannot read {file} ({error}): copy it again.") from error
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.element_size() == 1:
            raise ValueError(f"the adapter at {folder} is quantised ({name}: {tensor.dtype}): save it in float32.")
        if not tensor.isfinite().all():
            raise ValueError(f"the adapter at {folder} has NaN or infinite weights: see {name}.")
    return tensors


def _is_of_linear(target: str, engine: Engine) -> bool:
    """True if a target parameter is the weight of a linear layer, whose adapter is a pair of matrices like others."""
    layer = target.removesuffix(WEIGHT_END)
    return layer != target and any(name == layer or name.endswith(f".{layer}") for name in engine.linear_layers)


def _layout(adapter: Adapter) -> dict[str, Any]:
    """The shape of each tensor of an adapter, and the scale of each layer or stacked weight."""
    shapes = {name: tuple(tensor.shape) for name, tensor in _named_tensors(adapter.weights, adapter.extras)}
    return shapes | {name: adapter.scale_of(name) for name in (*adapter.weights, *adapter.extras.experts)}


def check_plain_lora(config: dict[str, Any], folder: Path) -> None:
    """Raises ValueError if the PEFT config at `folder` is not plain LoRA (for example DoRA, rsLoRA, PiSSA or trained
    biases)."""
    unusual = {key: config[key] for key in VARIANTS if config.get(key)}
    if all(str(target).endswith(WEIGHT_END) for target in unusual.get("target_parameters", ())):  # of linear layers
        unusual.pop("target_parameters", None)
    _refuse(unusual | _other_kinds(config), folder)


def _other_kinds(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of another kind than LoRA, and those that are not known."""
    known = HARMLESS.union(USED)
    unusual = {key: value for key, value in config.items() if key not in known and value not in NOTHING}
    if config.get("peft_type") != "LORA":
        unusual["peft_type"] = config.get("peft_type")
    if config.get("bias", "none") != "none":
        unusual["bias"] = config["bias"]
    if config.get("init_lora_weights", True) not in (True, False, None, "gaussian"):
        unusual["init_lora_weights"] = config["init_lora_weights"]  # for example PiSSA, which changes the base
    return unusual


def _refuse(unusual: Mapping[str, Any], folder: Path) -> None:
    if unusual:
        raise ValueError(
            f"the adapter at {folder} is not plain LoRA ({', '.join(f'{k}: {v}' for k, v in unusual.items())}). "
            "Train one without these options, or merge it into its base with peft."
        )


def _without_prefix(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    names = {key: key.removeprefix(PEFT_PREFIX) for key in tensors}
    old = MAGNITUDE_END + ".weight"  # of PEFT before 0.10
    return {name.removesuffix(".weight") if name.endswith(old) else name: tensors[key] for key, name in names.items()}


def _drop_base_weights(tensors: dict[str, Tensor], engine: Engine, folder: Path) -> None:
    """Removes the base's own weights, which PEFT writes beside an adapter of an output head. Raises ValueError if they
    are not those of this base."""
    for key in [key for key in tensors if key.endswith((f"{BASE_LAYER}.weight", f"{BASE_LAYER}.bias"))]:
        module, _, short = key.rpartition(".")
        own = getattr(engine.linear_layers.get(module.removesuffix(BASE_LAYER)), short, None)
        stored = tensors.pop(key)
        if own is None or own.shape != stored.shape or not torch.equal(own.cpu(), stored.to(own.dtype)):
            raise ValueError(
                f"the adapter at {folder} holds other weights of {module.removesuffix(BASE_LAYER)} than "
                f"{engine.name}: name the base that it was trained on, or merge it with peft."
            )


def _config(about: Mapping[str, Any], tensors: Mapping[str, Tensor], engine: Engine, folder: Path) -> LoraConfig:
    """Returns the config of an adapter with these tensors. Raises ValueError if the base does not have the adapted
    layers."""
    adapted = [key.removesuffix(A_END) for key in tensors if key.endswith(A_END)]
    targets = names_of_targets(stacked_parameters(engine.model), about.get("target_parameters") or ())
    experts = {name: wrapped for name, wrapped in _wrapped_names(targets).items() if wrapped in adapted}
    linear = [name for name in adapted if name not in experts.values()]
    plain = [key for key in tensors if not key.endswith((A_END, B_END, MAGNITUDE_END))]
    magnitudes = [key for key in tensors if key.endswith(MAGNITUDE_END)]
    saved = list(dict.fromkeys(key.rpartition(".")[0] for key in plain))
    if missing := sorted(set(linear) - set(engine.linear_layers)):
        raise ValueError(f"the adapter at {folder} has weights for {missing[0]}, which {engine.name} has not.")
    _check_targets(about, linear, engine, folder)
    if plain and not about.get("modules_to_save"):
        raise ValueError(f"the adapter at {folder} is not pairs of A and B on linear layers: see {plain[0]}.")
    for key, found in (("modules_to_save", saved), ("target_parameters", experts), ("use_dora", magnitudes)):
        if about.get(key) and not found:
            raise ValueError(f"the adapter at {folder} has {key} in its config, but no weights of that. Save it again.")
    names = [*linear, *experts]
    return LoraConfig(
        rank=about["r"],
        alpha=about["lora_alpha"],
        target_modules=linear,
        use_rslora=bool(about.get("use_rslora")),
        use_dora=bool(about.get("use_dora")),
        lora_dropout=about.get("lora_dropout") or 0.0,
        rank_pattern=_matching_patterns(about.get("rank_pattern"), names),
        alpha_pattern=_matching_patterns(about.get("alpha_pattern"), names),
        target_parameters=list(experts),
        modules_to_save=saved,
    )


def _check_targets(about: Mapping[str, Any], adapted: Sequence[str], engine: Engine, folder: Path) -> None:
    """Raises ValueError if an adapter has no tensors of a layer that its config lists by name, where nothing limits the
    names to some layers."""
    targets = about.get("target_modules")
    limits = [about.get(key) for key in ("layers_to_transform", "exclude_modules")]
    if not isinstance(targets, list) or any(limit not in NOTHING for limit in limits):
        return
    listed = {n for n in engine.linear_layers if any(n == t or n.endswith(f".{t}") for t in targets)}
    if missing := sorted(listed - set(adapted)):
        raise ValueError(f"the adapter at {folder} has no weights of {missing[0]}, which its config adapts.")


def _matching_patterns(patterns: Mapping[str, Any] | None, names: list[str]) -> dict[str, Any]:
    """Returns the patterns that match an adapted layer; PEFT ignores the others."""
    known = (patterns or {}).items()
    return {key: value for key, value in known if any(matches_pattern(key, name) for name in names)}


def _fill(adapter: Adapter, tensors: Mapping[str, Tensor]) -> None:
    """Copies tensors into the weights of an adapter. Raises ValueError if a shape differs."""
    with torch.no_grad():
        for name, own in _named_tensors(adapter.weights, adapter.extras):
            if own.shape != tensors[name].shape:
                shape = tuple(tensors[name].shape)
                raise ValueError(f"{name}: weights of shape {shape} do not fit {tuple(own.shape)}")
        for name, (a, b) in adapter.weights.items():
            a.copy_(tensors[name + A_END])
            b.copy_(tensors[name + B_END])
        for name, magnitude in adapter.extras.magnitudes.items():
            magnitude.copy_(tensors[name + MAGNITUDE_END])
        for name, weight in adapter.extras.modules.items():
            weight.copy_(tensors[name])
        for name, wrapped in _wrapped_names(adapter.extras.experts).items():
            a_eri, b_eor = adapter.extras.experts[name]
            a_eri.copy_(tensors[wrapped + A_END].view_as(a_eri))
            b_oer = tensors[wrapped + B_END].view(b_eor.shape[1], b_eor.shape[2], len(b_eor))
            b_eor.copy_(b_oer.permute(2, 0, 1))
