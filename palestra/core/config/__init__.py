"""Configs: YAML trees, the models that validate them, and the descriptions of their keys."""

from palestra.core.config.credentials import check_no_credentials, hide_credentials
from palestra.core.config.model import (
    RunName,
    StrictModel,
    check_folder_name,
    check_policy_names,
    dump,
    is_changed,
    type_choices,
    validate,
)
from palestra.core.config.tree import Tree, load, merge, override, parse
from palestra.core.config.user_modules import allow_modules_in, import_object, load_object

__all__ = [
    "RunName",
    "StrictModel",
    "Tree",
    "allow_modules_in",
    "check_folder_name",
    "check_no_credentials",
    "check_policy_names",
    "dump",
    "hide_credentials",
    "import_object",
    "is_changed",
    "load",
    "load_object",
    "merge",
    "override",
    "parse",
    "type_choices",
    "validate",
]
