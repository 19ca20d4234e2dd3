"""Configs: parsing, overrides, and error messages for wrong keys."""

import inspect
import os
import pydoc
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, field_validator

from palestra.core.config import StrictModel, dump, load, override, parse, validate
from palestra.core.config.descriptions import describe_keys


class Ppo(StrictModel):
    type: Literal["ppo"] = "ppo"
    clip: float = 0.2
    epochs: int = Field(4, ge=1)


class Grpo(StrictModel):
    type: Literal["grpo"] = "grpo"
    group: int = 8
    keep: Literal["best", "all"] = "all"

    @field_validator("group")
    @classmethod
    def _enough(cls, group: int) -> int:
        if group < 2:
            raise ValueError("a group needs two siblings to compare; set group to 2 or more")
        return group


AnyAlgorithm = Annotated[Ppo | Grpo, Field(discriminator="type")]


class Lora(StrictModel):
    rank: int = 8
    targets: list[str] = ["q", "v"]


class Member(StrictModel):
    lora: Lora = Lora()
    model_path: str | None = None
    algorithm: AnyAlgorithm | None = None


class Config(StrictModel):
    steps: int
    lr: float = 1e-4
    algorithm: AnyAlgorithm = Ppo()
    policies: dict[str, Member] = {}
    stages: list[AnyAlgorithm] = []
    seed: int | Literal["clock"] = 0


def fault(**tree: Any) -> str:
    with pytest.raises(ValueError) as caught:
        validate(Config, {"steps": 1} | tree)
    return str(caught.value)


def test_type_key_selects_the_variant() -> None:
    config = validate(Config, {"steps": 3, "algorithm": {"type": "grpo"}, "policies": {"a": {"lora": {"rank": 2}}}})
    assert isinstance(config.algorithm, Grpo)
    assert config.policies["a"].lora.rank == 2


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {"algorithm": {"type": "ppo", "clp": 0.3}},
            "unknown key algorithm.clp: did you mean clip? (keys: type, clip, epochs)",
        ),
        ({"algorithm": {"type": "grpoo"}}, "unknown algorithm.type 'grpoo': did you mean grpo? (types: ppo, grpo)"),
        ({"algorithm": {"clip": 1}}, "algorithm.type is missing: it picks the variant"),
        (
            {"policies": {"coder": {"lora": {"rnk": 2}}}},
            "unknown key policies.coder.lora.rnk: did you mean rank? (keys: rank, targets)",
        ),
        ({"stages": [{"type": "ppo"}, {"type": "grpo", "keep": "beast"}]}, "stages[1].keep: "),
        ({"policies": {"ppo": {"algorithm": {"type": "grpo", "gruop": 2}}}}, "policies.ppo.algorithm.gruop: did you"),
        ({"algorithm": {"type": "ppo", "epochs": 0}}, "algorithm.epochs: should be greater than or equal to 1, not 0"),
        ({"algorithm": {"type": "grpo", "group": 1}}, "algorithm.group: a group needs two siblings"),
        ({"policies": {"a": {"lora": {"targets": ["q", 3]}}}}, "policies.a.lora.targets[1]: should be a valid string"),
        ({"zzz": 1}, "unknown key zzz (keys: steps, lr, algorithm, policies, stages, seed)"),
        ({"steps": None}, "steps: should be a valid integer, not None"),
        ({"policies": {"a": {"lora": {"targets": "q"}}}}, "lora.targets: should be a list, such as ['q'], not 'q'"),
    ],
)
def test_errors_name_the_path_of_the_key(tree: dict[str, Any], message: str) -> None:
    assert message in fault(**tree)


def test_union_without_type_names_the_path_only() -> None:
    message = fault(seed="tomorrow")
    assert message.count("seed: ") == 2, message
    assert "int" in message and "clock" in message


def test_all_errors_are_reported_at_once() -> None:
    message = fault(lrr=1, algorithm={"type": "ppo", "clp": 1})
    assert message.startswith("2 faults in the config:\n  ")
    assert "unknown key lrr: did you mean lr?" in message and "algorithm.clp" in message


def test_missing_key_is_named() -> None:
    with pytest.raises(ValueError, match=r"^steps is missing$"):
        validate(Config, {})


def test_load_errors_name_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("steps: 1\nalgorithm: {type: ppo\nlr: 2\n")
    with pytest.raises(ValueError, match=r"bad\.yaml, line 3"):
        load(path)
    path.write_text("steps: 1\nlr: 1\nsteps: 2\n")
    with pytest.raises(ValueError, match=r"bad\.yaml, line 3, column 1: key 'steps' is given twice"):
        load(path)
    path.write_text("- steps\n")
    with pytest.raises(ValueError, match="this is a list"):
        load(path)
    path.write_text("steps: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(ValueError, match="line 1"):
        load(path)
    with pytest.raises(ValueError, match="cannot read config"):
        load(tmp_path / "none.yaml")


def test_a_control_character_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"^x\.yaml: unacceptable character #x000b.* position 3") as refusal:
        parse("a: \x0b", "x.yaml")
    assert "\n" not in str(refusal.value)


def test_config_is_read_from_a_pipe_of_the_shell_and_from_no_other(tmp_path: Path) -> None:
    script = f"{sys.executable} -m palestra train --dry-run <(cat palestra/data/configs/games/two_step_dqn.yaml)"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and "type: two_step" in done.stdout, done.stderr
    os.mkfifo(tmp_path / "pipe")  # nobody writes to it: a read would block
    with pytest.raises(ValueError, match="is not a config, but a folder, a pipe or a device"):
        load(tmp_path / "pipe")


def test_yaml_is_parsed_as_version_1_2() -> None:
    tree = parse("{a: 1e-4, b: off, c: 2026-01-31, d: .5, e: 12, f: true, g: -.inf, h: null, i: 1:30, j: -7}")
    assert tree["a"] == 1e-4 and tree["b"] == "off" and tree["d"] == 0.5 and tree["e"] == 12 and tree["f"] is True
    assert tree["g"] == float("-inf") and tree["h"] is None
    assert tree["c"] == "2026-01-31" and tree["i"] == "1:30" and tree["j"] == -7
    assert parse("") == {}
    assert parse("base: &b {x: 1}\nmore: {<<: *b, y: 2}")["more"] == {"x": 1, "y": 2}
    with pytest.raises(ValueError, match="key '<<' is given twice"):
        parse("more: {<<: {x: 1}, <<: {x: 2}}")


def test_override_sets_leaves_without_changing_its_input() -> None:
    tree = {"algorithm": {"type": "ppo"}, "lora": None}
    result = override(tree, ["algorithm.clip=3e-1", "algorithm.names=[a, b]", "lora.rank=4", "note=a=b", "empty=''"])
    assert result == {
        "algorithm": {"type": "ppo", "clip": 0.3, "names": ["a", "b"]},
        "lora": {"rank": 4},
        "note": "a=b",
        "empty": "",
    }
    assert tree == {"algorithm": {"type": "ppo"}, "lora": None}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("steps", "write key=value"),
        ("a..b=1", "write key=value"),
        ("stages.0.clip=1", "stages is a list, not a mapping; set stages as a whole"),
        ("steps.more=1", "steps is a number"),
        ("lr=[1", "is not YAML"),
        ("name=", "has no value: write null, or '' for an empty text"),
    ],
)
def test_misplaced_setting_is_refused_with_the_reason(setting: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        override({"steps": 1, "stages": [{"type": "ppo"}]}, [setting])
    assert message in str(caught.value)


def test_dump_includes_defaults() -> None:
    assert dump(validate(Config, {"steps": 2})).splitlines()[:5] == [
        "steps: 2",
        "lr: 0.0001",
        "algorithm:",
        "  type: ppo",
        "  clip: 0.2",
    ]


@given(
    steps=st.integers(-9, 10**12),
    lr=st.floats(allow_nan=False, allow_infinity=False),
    names=st.lists(
        st.text(st.characters(exclude_categories=["Cs", "Cc"]))
        | st.sampled_from(["1e3", "on", "1:30", "7", "null", "2026-01-31"])
    ),
)
def test_dump_and_parse_are_inverse(steps: int, lr: float, names: list[str]) -> None:
    policies = {name: {"lora": {"targets": names}, "model_path": name} for name in names}
    config = validate(Config, {"steps": steps, "lr": lr, "policies": policies, "algorithm": {"type": "grpo"}})
    assert validate(Config, parse(dump(config))) == config


# ---- descriptions


class Optimizer(StrictModel):
    """An optimizer."""

    lr: float = Field(1e-4, gt=0)
    """Learning rate: the length
    of a step."""
    betas: list[float] = [0.9]
    """Decay rates."""
    device: str = Field("cpu", description="Torch device.")


class Scheduled(Optimizer):
    betas: list[float] = [0.5]
    schedule: Literal["constant", "linear"] | None = None
    """Schedule of `lr`."""


def test_help_of_a_config_class_has_its_docstring_and_its_keys() -> None:
    assert Optimizer.__doc__ == inspect.getdoc(Optimizer)
    assert Optimizer.__doc__ == (
        "An optimizer.\n\nKeys:\n\n"
        "lr: number, > 0; default `0.0001`\n    Learning rate: the length of a step.\n"
        "betas: list of number; default `[0.9]`\n    Decay rates.\n"
        "device: text; default `cpu`\n    Torch device."
    )
    assert "Learning rate: the length of a step." in pydoc.render_doc(Optimizer)


def test_redeclared_key_keeps_its_description() -> None:
    assert describe_keys(Scheduled) == [
        ("lr", "number, > 0", "`0.0001`", "Learning rate: the length of a step."),
        ("betas", "list of number", "`[0.5]`", "Decay rates."),
        ("device", "text", "`cpu`", "Torch device."),
        ("schedule", "`constant`, `linear` or null", "`null`", "Schedule of `lr`."),
    ]
    assert describe_keys(Config)[0] == ("steps", "whole number", "required", "")


def test_a_class_without_source_has_keys_without_descriptions() -> None:
    space: dict[str, Any] = {"StrictModel": StrictModel, "__name__": "nowhere"}
    exec("class Made(StrictModel):\n    lr: float = 1.0\n    '''Learning rate.'''", space)
    assert space["Made"].__doc__ == "Keys:\n\nlr: number; default `1.0`"


def test_a_json_schema_has_the_descriptions() -> None:
    schema = Scheduled.model_json_schema()
    assert {name: field["description"] for name, field in schema["properties"].items()} == {
        "lr": "Learning rate: the length of a step.",
        "betas": "Decay rates.",
        "device": "Torch device.",
        "schedule": "Schedule of `lr`.",
    }
    assert Optimizer.model_json_schema()["description"] == "An optimizer."


@pytest.mark.slow  # what it prevents is a slower start
def test_importing_config_models_reads_no_source() -> None:
    """`linecache` contains every file whose source was read."""
    code = (
        "import linecache, palestra.api.config_reference\n"
        "from palestra.text.algorithms.grpo import GRPO\n"
        "assert not [name for name in linecache.cache if name.endswith(('algorithms/grpo.py', 'sinks/base.py'))]\n"
        "assert 'Siblings per group' in GRPO.__doc__\n"
        "assert [name for name in linecache.cache if name.endswith('algorithms/grpo.py')]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
