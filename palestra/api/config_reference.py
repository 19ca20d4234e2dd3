"""Looks up the keys of all kinds of config by name, for `palestra config`."""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

from pydantic import BaseModel

from palestra.core.config.descriptions import KeyDescription, class_docstring, describe_keys, nested_models, type_name
from palestra.core.config.key_hints import nearest
from palestra.envs import env_options, known_envs, load_env_class
from palestra.populations.build.language import LanguagePopulationConfig
from palestra.text.algorithms.presets import TEXT_PRESETS
from palestra.text.config import TextConfig
from palestra.vector.algorithms.presets import VECTOR_PRESETS
from palestra.vector.config import VectorConfig

RUN_CONFIGS: dict[str, type[BaseModel]] = {
    "text": TextConfig,
    "vector": VectorConfig,
    "population": LanguagePopulationConfig,
}
RUN_TITLES = {
    "text": "a run of language agents",
    "vector": "a run in a vectorised env",
    "population": "a run of a population",
}


class ConfigModel(NamedTuple):
    """A config model, the kind of run that has it, and its key ("": the config of the run)."""

    run: str
    key: str
    model: type[BaseModel]

    @property
    def names(self) -> set[str]:
        """The names by which the model is found."""
        if not self.key:
            return {self.run}
        return {self.key, type_name(self.model) or self.key}

    @property
    def title(self) -> str:
        if not self.key:
            return f"{self.run}: {RUN_TITLES[self.run]}"
        kind = self.key
        if name := type_name(self.model):
            kind += f", type: {name}"
        return f"{kind}, in {RUN_TITLES[self.run]}"


class Section(NamedTuple):
    """A title, a description and the keys of one config model or env."""

    title: str
    text: str
    keys: list[KeyDescription]


def config_models() -> list[ConfigModel]:
    """Returns the models of all configs, without duplicates."""
    models: dict[type[BaseModel], ConfigModel] = {}
    for run, root in RUN_CONFIGS.items():
        for model, key in nested_models(root).items():
            models.setdefault(model, ConfigModel(run, key, model))
    return list(models.values())


def config_names() -> dict[tuple[str, str], list[str]]:
    """Returns the values of `type:` by kind of run and key; an empty list for a key without a choice."""
    names: dict[tuple[str, str], list[str]] = {}
    for run, key, model in config_models():
        kinds = names.setdefault((run, key), [])
        if kind := type_name(model):
            kinds.append(kind)
    names["text", "algorithm"] += TEXT_PRESETS
    names["vector", "algorithm"] += VECTOR_PRESETS
    names["text, vector", "env"] = sorted(known_envs())
    return names


def find_sections(name: str, key: str | None = None) -> list[Section]:
    """Returns the sections of everything called `name`: a kind of run, a value of `type:`, a key with keys of its own,
    or an env. With `key`, each section has only this key.

    Raises ValueError for an unknown name or key, with the nearest spelling.
    """
    sections = _sections(name)
    if key is None:
        return sections
    chosen = [section._replace(keys=[one for one in section.keys if one.key == key]) for section in sections]
    if with_key := [section for section in chosen if section.keys]:
        return with_key
    known = list(dict.fromkeys(one.key for one in chain.from_iterable(section.keys for section in sections)))
    raise ValueError(f'{name} has no key "{key}"{nearest(key, known)}; its keys: {", ".join(known)}')


def _sections(name: str) -> list[Section]:
    models = config_models()
    preset = (TEXT_PRESETS | VECTOR_PRESETS).get(name)
    if preset is not None:
        run = "text" if name in TEXT_PRESETS else "vector"
        settings = ", ".join(f"{key}: {value}" for key, value in preset.items())
        matching = [one for one in models if one.run == run and preset["type"] in one.names]
        return [_section(f"type: {name} stands for {settings}", one.model) for one in matching]
    if matching := [one for one in models if name in one.names]:
        return [_section(one.title, one.model) for one in matching]
    if name in known_envs() or ":" in name:
        return [_section(f"env, type: {name}", env_options(load_env_class(name)))]
    known = sorted(set(chain.from_iterable(one.names for one in models)) | set(known_envs()))
    raise ValueError(f'no config has "{name}"{nearest(name, known)}; `palestra config` lists the names')


def _section(title: str, model: type[BaseModel]) -> Section:
    return Section(title, class_docstring(model), describe_keys(model))
