"""Each cell of the table of features that exclude each other."""

import itertools
from typing import Any

import pytest

from palestra.core.config import merge, validate
from palestra.text.config import TextConfig
from palestra.text.conflicts import CONFLICTS, Conflict

BASE: dict[str, Any] = {
    "env": {"type": "plan_path"},
    "policies": {"default": {"type": "lora", "base": "tiny"}},
    "algorithm": {"type": "grpo"},
}
FULL = {"type": "full", "base": "tiny", "reference": "none"}
SETTINGS: dict[str, dict[str, Any]] = {
    "parallel": {"parallel": "ddp"},
    "fsdp": {"parallel": "fsdp"},
    "quantize": {"policies": {"default": {"quantize": "nf4"}}},
    "whole weights": {"policies": {"default": {"use_dora": True}}},
    "engine": {"engine": "http://localhost:1"},
    "sampler": {"sampler": {"type": "vllm", "urls": ["http://localhost:2"]}},
    "backend": {"backend": {"type": "local"}},
    "staleness": {"staleness": 2},
    "in_flight_updates": {"staleness": 1, "in_flight_updates": "keep_kv"},
    "refill": {"algorithm": {"flat_groups": "refill"}},
    "full model": {"policies": {"whole": FULL}},
    "stored reference": {"policies": {"whole": FULL | {"reference": "copy"}}},
    "person": {"policies": {"human": {"type": "human"}}},
}


@pytest.mark.parametrize("conflict", CONFLICTS, ids=lambda conflict: f"{conflict.first} and {conflict.second}")
def test_features_that_exclude_each_other_are_refused_with_reason_and_remedy(conflict: Conflict) -> None:
    tree = merge(merge(BASE, SETTINGS[conflict.first]), SETTINGS[conflict.second])
    with pytest.raises(ValueError, match="exclude each other") as error:
        validate(TextConfig, tree)
    assert conflict.reason in str(error.value) and conflict.remedy in str(error.value)


@pytest.mark.parametrize("feature", SETTINGS)
def test_one_feature_alone_is_accepted_and_recognised(feature: str) -> None:
    config = validate(TextConfig, merge(BASE, SETTINGS[feature]))
    written = config.features_in_use()[feature]
    assert written.split(":")[0].split(".")[0] in {"algorithm", "flat_groups", *SETTINGS[feature]}


def test_every_feature_of_the_table_has_a_setting_here() -> None:
    named = {*itertools.chain.from_iterable((conflict.first, conflict.second) for conflict in CONFLICTS)}
    assert named == set(SETTINGS)


def test_conflict_of_a_second_policy_is_found() -> None:
    second = {"type": "lora", "base": "tiny", "use_dora": True}
    tree = merge(BASE, {"parallel": "fsdp", "policies": {"second": second}})
    with pytest.raises(ValueError, match=r"policies\.second\.use_dora exclude each other: these need whole weights"):
        validate(TextConfig, tree)


def test_settings_without_effect_are_named() -> None:
    tree = merge(BASE, {"max_num_seqs": 8, "policies": {"default": {"dtype": "bfloat16", "micro_batch_tokens": 10}}})
    there = validate(TextConfig, merge(tree, SETTINGS["engine"]))
    keys = "max_num_seqs, policies.default.dtype, policies.default.micro_batch_tokens"
    assert there.notes_on_settings(1) == [f"{keys}: without effect with engine, the server's own options count"]
    assert validate(TextConfig, merge(BASE, SETTINGS["engine"])).notes_on_settings(1) == []
    assert validate(TextConfig, tree).notes_on_settings(1) == []
    sharded = validate(TextConfig, merge(BASE, SETTINGS["fsdp"]))
    assert sharded.notes_on_settings(1) == ["parallel: fsdp has no effect in one process: start the run with torchrun"]
    assert sharded.notes_on_settings(2) == []
