"""`palestra plan`: tables and JSON of a plan for this CPU and for data-sheet GPUs, and refusals with a fix."""

import json

import pytest
import yaml
from command_line import palestra, refused
from terminal_text import plain


@pytest.fixture
def config(tmp_path):
    """A run of two adapters on the shipped base, in an env of one joint step for each seat."""
    speech = {"type": "lora", "base": "tiny", "sampling": {"max_tokens": 8}}
    tree = {
        "episodes": 8,
        "env": {"type": "toys:Whisper"},
        "policies": {"guide": speech, "walker": speech},
        "algorithm": {"type": "grpo", "group_size": 4},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def test_a_plan_of_gpus_names_phases_memory_and_the_best_split(config):
    figures = json.loads(
        palestra("plan", config, "--nodes", 2, "--gpus", 4, "--machine", "l4", "--env-wait", 60, "--json")
    )
    assert figures["bottleneck"] == "env steps"
    assert figures["phases"]["env steps"]["wait_s"] >= 60
    assert figures["step_s"] > figures["phases"]["env steps"]["wait_s"]
    assert figures["free"] == 24 * 2**30 > figures["memory"]["peak"]
    assert figures["layouts"][0]["step_s"] == min(each["step_s"] for each in figures["layouts"]) < figures["step_s"]
    text = plain(palestra("plan", config, "--gpus", 1, "--machine", "h100", "--prompt-tokens", 100))
    assert "prompts of 100 tokens" in text and "forward and backward" in text and "data sheet" in text


def test_longer_answers_take_longer(config):
    def step_s(*more):
        envs = ("--env-cpu", 0, "--env-wait", 0)  # not by measured costs, which vary
        return json.loads(palestra("plan", config, "--gpus", 1, "--machine", "h100", *envs, "--json", *more))["step_s"]

    assert step_s("--set", "policies.guide.sampling.max_tokens=500") > step_s() > step_s("--answer-tokens", 2)


@pytest.mark.slow
def test_a_plan_of_this_machine_is_measured(config):
    text = plain(palestra("plan", config, "--processes", 2))
    assert "measured here by a probe" in text and "2 of them" in text
    assert "palestra train --backend local --workers" in text or "torchrun" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gpus", 1, "--machine", "abacus"], "no data sheet"),
        (["--machine", "h100"], "--gpus 1"),
        (["--gpus", 1, "--flops", 100], "give both"),
        (["--gpus", 1, "--flops", 100, "--bandwidth", 900], "--gpu-gib"),
        (["--gpus", 1, "--machine", "h100", "--set", "engine=http://localhost:1"], "trains on the server"),
    ],
)
def test_options_that_do_not_fit_are_refused_with_the_fix(config, options, words):
    assert words in refused("plan", config, *options)
