"""Configs: YAML trees, the models that validate them, and the descriptions of their keys."""

from palestra.config.model import (
    RunName,
    StrictModel,
    check_folder_name,
    check_policy_names,
    dump,
    load_object,
    type_choices,
    validate,
)
from palestra.config.tree import Tree, load, merge, override, parse

__all__ = [
    "RunName",
    "StrictModel",
    "Tree",
    "check_folder_name",
    "check_policy_names",
    "dump",
    "load",
    "load_object",
    "merge",
    "override",
    "parse",
    "type_choices",
    "validate",
]
