"""Training starts from a saved adapter (`path` of a LoRA policy), here one that peft made."""

import json
import shutil
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from helpers.tolerances import LOGPROB_ATOL
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import palestra
from palestra.core.config import validate
from palestra.core.config.tree import to_yaml
from palestra.engine.bases.names import resolve_base
from palestra.evaluation.target import find_target
from palestra.evaluation.text import open_text_eval
from palestra.runs import list_checkpoints, load_episodes
from palestra.text.build.build import build
from palestra.text.config import TextConfig

TARGETS = ["q_proj", "v_proj"]
OPTIONS = {"rank": 3, "alpha": 6.0, "target_modules": TARGETS, "use_rslora": True}


@pytest.fixture(scope="module")
def model():
    """The tiny base with a random adapter of peft's."""
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(resolve_base("tiny"))
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=TARGETS, use_rslora=True, init_lora_weights=False)
    return peft.get_peft_model(base, config).eval()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(folder)
    return folder


def config(folder, **changes):
    """Two seats of one env: `guide` starts from the saved adapter, `walker` from a new one."""
    speech = {"type": "lora", "base": "tiny", "sampling": {"max_tokens": 4}, "lr": 1e-2}
    return {
        "env": {"type": "helpers.toys:Whisper", "turns": 2},
        "policies": {"guide": speech | OPTIONS | {"path": str(folder)} | changes, "walker": speech},
        "algorithm": {"type": "grpo", "group_size": 2, "kl_coef": 0.1},
        "episodes": 2,
        "checkpoint_every": 1,
    }


def newest_weights(run, name):
    checkpoint = list_checkpoints(run.path)[-1]
    return load_file(checkpoint.path / checkpoint.names[name] / "adapter_model.safetensors")


def test_play_kl_and_resume_start_from_the_saved_adapter(model, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = palestra.train(config(folder), name="whole", steps=2)
    sampled = {seat: [] for seat in ("guide", "walker")}
    for episode in load_episodes(whole.path / "episodes/step-000000.parquet"):
        for node in episode.nodes:
            for seat, answer in node.answers.items():
                sampled[seat].append(np.abs(answer.logprobs - peft_logprobs(model, answer)).max())
    assert max(sampled["guide"]) < LOGPROB_ATOL  # the first step plays by the adapter
    assert max(sampled["walker"]) > 0.1
    first = next(line for line in whole.metrics.to_dict("records") if line["policy"] == "guide")
    assert first["reference_kl"] < 1e-6  # the reference is the adapter as well
    part = palestra.train(config(folder), name="part", steps=1)
    part = palestra.train(resume=part, steps=2)
    found, expected = newest_weights(part, "guide"), newest_weights(whole, "guide")
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    start = load_file(folder / "adapter_model.safetensors")
    moved = {key: (expected[key] - start[key]).abs().max().item() for key in start}
    assert 0 < max(moved.values()) < 0.05  # two updates of 0.01 for each weight


def test_evaluation_of_an_untrained_config_plays_the_saved_adapter(model, folder, tmp_path):
    (tmp_path / "start.yaml").write_text(to_yaml(config(folder)))
    setup = open_text_eval(find_target(tmp_path / "start.yaml"), {}, {})
    (played,) = setup.play([setup.policy_names], 2, 0, lambda done, of: None)
    answers = [
        node.answers["guide"] for episode in played.episodes for node in episode.nodes if "guide" in node.answers
    ]
    assert answers and all(np.abs(a.logprobs - peft_logprobs(model, a)).max() < LOGPROB_ATOL for a in answers)


def peft_logprobs(model, answer):
    """The log-probabilities of an answer's tokens by peft's model."""
    ids = torch.tensor(np.concatenate([answer.prompt_ids, answer.token_ids]))[None].long()
    with torch.no_grad():
        logprobs = model(ids).logits[0].float().log_softmax(-1)
    count = len(answer.token_ids)
    return logprobs[-count - 1 : -1].gather(-1, ids[0, -count:, None])[:, 0].numpy()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rank": 4}, r"other layers, ranks or scales .* rank: 3, alpha: 6.*q_proj.*v_proj.*use_rslora: true"),
        ({"alpha": 3.0}, "other layers, ranks or scales"),
        ({"target_modules": "all-linear"}, "other layers, ranks or scales"),
        ({"path": "nowhere"}, "no adapter at nowhere"),
    ],
)
def test_other_adapters_are_refused_with_the_options_to_set(folder, changes, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        palestra.train(config(folder, **changes), name="refused", steps=1)


def without_first_layer(tensors):
    return {name: tensor for name, tensor in tensors.items() if ".layers.0." not in name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: {name: t.to(torch.int8) for name, t in tensors.items()}, "is quantised .*torch.int8.*save it"),
        (
            lambda tensors: {name: t.to(torch.float8_e4m3fn) for name, t in tensors.items()},
            "is quantised .*float8_e4m3",
        ),
        (lambda tensors: {name: t * float("nan") for name, t in tensors.items()}, "has NaN or infinite weights: see"),
        (without_first_layer, r"no weights of model.layers.0.self_attn.q_proj, which its config adapts"),
    ],
    ids=["int8", "fp8", "nan", "layer missing"],
)
@pytest.mark.parametrize("kind", ["lora", "frozen"])
def test_damaged_weights_are_refused(folder, change, message, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, "damaged")
    save_file(change(load_file("damaged/adapter_model.safetensors")), "damaged/adapter_model.safetensors")
    tree = config("damaged")
    if kind == "frozen":
        tree["policies"]["guide"] = {"type": "frozen", "base": "tiny", "path": "damaged", "sampling": {"max_tokens": 4}}
    with pytest.raises(ValueError, match=message):
        palestra.train(tree, name="refused", steps=1)


def test_files_that_cannot_be_read_are_refused_in_one_line(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, "cut")
    weights = Path("cut/adapter_model.safetensors")
    weights.write_bytes(weights.read_bytes()[:500])
    with pytest.raises(ValueError, match=r"cannot read cut/adapter_model.safetensors \(.*\): copy it again"):
        palestra.train(config("cut"), name="refused", steps=1)
    weights.rename("cut/adapter_model.bin")
    with pytest.raises(ValueError, match=r"adapter_model.bin is a pickle, which can run code; save it again with peft"):
        palestra.train(config("cut"), name="refused", steps=1)


def test_an_adapter_of_another_base_is_named_at_the_start(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, "other")
    about = json.loads(Path("other/adapter_config.json").read_text())
    for base, is_named in (("meta-llama/Llama-3-8B", True), ("/models/tiny", False)):
        Path("other/adapter_config.json").write_text(json.dumps(about | {"base_model_name_or_path": base}))
        note = f"policies.guide: the adapter at other says that it was trained on {base}; it is used on tiny"
        assert (note in build(validate(TextConfig, config("other"))).notes) == is_named


@pytest.mark.slow
def test_trained_adapter_is_continued_by_another_run(folder, tmp_path, monkeypatch):
    """A policy of one run is the start of another's, with `all-linear` as the target that its folder lists by name."""
    monkeypatch.chdir(tmp_path)
    first = palestra.train(config(folder), name="first", steps=1)
    checkpoint = list_checkpoints(first.path)[-1]
    saved = checkpoint.path / checkpoint.names["walker"]
    tree = config(folder)
    tree["policies"]["walker"] |= {"path": str(saved), "lr": 0}
    second = palestra.train(tree, name="second", steps=1)
    found, expected = newest_weights(second, "walker"), load_file(saved / "adapter_model.safetensors")
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert json.loads((saved / "adapter_config.json").read_text())["r"] == 8
