"""Published agents: peft and transformers load them and compute the same log-probabilities as palestra's engine."""

import asyncio
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from helpers.command_line import palestra, refused
from helpers.model_hub import TOKEN, model_hub
from helpers.tolerances import LOGPROB_ATOL
from helpers.trained import two_agents
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from palestra.api.agents.trained_agent import find_agents, load_policy
from palestra.engine.bases.model import Engine
from palestra.engine.lora.adapters import Adapter
from palestra.engine.lora.config import LoraConfig
from palestra.engine.sampling.request import Request
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.engine.training.peft_format import save_adapter
from palestra.text.build.engines import Engines

IDS = torch.from_numpy(np.random.default_rng(0).integers(5, 250, (1, 24)))


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    return two_agents(base, tmp_path_factory.mktemp("publish"))


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def card_of(folder):
    """The YAML at the head of a model card, and its text."""
    _, head, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(head), text


def test_published_adapter_equals_the_engine_in_peft(run, base, tmp_path):
    palestra("publish", run, "--member", "guide", "--out", tmp_path / "guide", "--license", "apache-2.0")
    peft_model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "guide")
    (agent,) = find_agents(tmp_path / "guide")
    policy = load_policy(agent, Engines("cpu", 8))
    request = Request(IDS[0].numpy().astype(np.int32), 1, SamplingConfig(max_tokens=1, temperature=0), policy.adapter)
    ((ours,),) = policy.sampler.sample_all([request])
    expected = torch.log_softmax(logits(peft_model)[0, -1], -1)
    assert ours.token_ids[0] == expected.argmax()
    assert ours.logprobs[0] == pytest.approx(float(expected.max()), abs=LOGPROB_ATOL)
    untrained = torch.log_softmax(logits(AutoModelForCausalLM.from_pretrained(base))[0, -1], -1)
    assert (untrained - expected).abs().max() > 1e-3  # the adapter whose log-probabilities were compared
    assert not (tmp_path / "guide" / "optimizer.safetensors").exists()


def test_merged_model_equals_the_adapter_on_its_base(run, base, tmp_path):
    palestra("publish", run, "--member", "guide", "--out", tmp_path / "a")
    palestra("publish", run, "--member", "guide", "--out", tmp_path / "m", "--merge")
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "a")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    # Merged weights multiply in other shapes, which round differently on each processor: the rest is small beside the
    # adapter's effect.
    effect = (logits(adapted) - logits(AutoModelForCausalLM.from_pretrained(base))).abs().max()
    assert (logits(merged) - logits(adapted)).abs().max() < 1e-3 * effect
    assert AutoTokenizer.from_pretrained(tmp_path / "m").encode("up 1") == AutoTokenizer.from_pretrained(base).encode(
        "up 1"
    )
    head, text = card_of(tmp_path / "m")
    assert head["library_name"] == "transformers" and "vllm serve m" in text
    (agent,) = find_agents(tmp_path / "m")
    assert load_policy(agent, Engines("cpu", 8)).adapter is None
    for more, reason in (
        (("--member", "walker"), "m is a published agent, guide, of one version: leave out --member and --checkpoint"),
        (("--checkpoint", "7"), "m is a published agent, guide, of one version"),
        (("--greedy",), "--greedy is for a table of a game"),
    ):
        assert reason in refused("publish", tmp_path / "m", *more, "--out", tmp_path / "again")


def test_model_card_has_description_and_results(run, tmp_path):
    palestra(
        "publish", run, "--member", "walker", "--out", tmp_path / "w", "--base-name", "some/base", "--license", "mit"
    )
    head, text = card_of(tmp_path / "w")
    assert head["base_model"] == "some/base" and head["library_name"] == "peft" and head["license"] == "mit"
    assert {"lora", "grpo", "helpers.toys:Whisper", "base_model:adapter:some/base"} <= set(head["tags"])
    assert head["model-index"][0]["results"][0]["dataset"] == {"name": "dev", "type": "helpers.toys:Whisper"}
    assert json.loads((tmp_path / "w" / "adapter_config.json").read_text())["base_model_name_or_path"] == "some/base"
    assert find_agents(tmp_path / "w")[0].lm_settings["base"] == "some/base"
    for expected in ("| dev | 5 | return |", "seed 0", "after 3 of 3 steps", "palestra 0.1.0", "rank: 8"):
        assert expected in text
    for command in ("PeftModel.from_pretrained", "vllm serve some/base --enable-lora", "palestra serve-agent w"):
        assert command in text


def test_local_base_path_is_not_published(run, tmp_path):
    palestra("publish", run, "--member", "walker", "--out", tmp_path / "w")
    assert "base_model" not in card_of(tmp_path / "w")[0]


def test_card_names_the_algorithms_of_the_stages(run, tmp_path):
    staged = tmp_path / "staged"
    shutil.copytree(run, staged)
    tree = yaml.safe_load((run / "config.yaml").read_text())
    later = {"steps": 9, "algorithm": {"type": "ppo"}}
    tree["stages"] = [{"steps": 2, "algorithm": {"type": "sft"}}, {"steps": 4}, later]
    (staged / "config.yaml").write_text(yaml.safe_dump(tree))
    palestra("publish", staged, "--member", "guide", "--out", tmp_path / "g")
    head, text = card_of(tmp_path / "g")
    assert "trained in helpers.toys:Whisper by sft, then grpo with palestra" in text and "after 3 of 15 steps" in text
    assert {"sft", "grpo"} <= set(head["tags"]) and "ppo" not in head["tags"]


def test_config_text_cannot_escape_the_model_card(run, tmp_path):
    copied = tmp_path / "copied"
    shutil.copytree(run, copied)
    (copied / "config.yaml").write_text((run / "config.yaml").read_text() + "# ````\n# # Forged\n")
    palestra("publish", copied, "--member", "guide", "--out", tmp_path / "g")
    assert "`````yaml" in card_of(tmp_path / "g")[1]


def test_unpublishable_agents_are_refused_with_the_reason(run, tmp_path):
    assert "has 2 agents: pass --member guide|walker" in refused("publish", run, "--out", tmp_path / "x")
    assert 'no trained agent "nobody"; it has: guide, walker' in refused(
        "publish", run, "--member", "nobody", "--out", tmp_path / "x"
    )
    assert "already exists" in refused("publish", run, "--member", "guide", "--out", tmp_path)
    assert "it has: 3" in refused("publish", run, "--checkpoint", 2, "--out", tmp_path / "x")
    (tmp_path / "empty").mkdir()
    assert "holds neither an adapter" in refused("publish", tmp_path / "empty", "--out", tmp_path / "x")
    assert "there is no run" in refused("publish", tmp_path / "nowhere", "--out", tmp_path / "x")


def test_adapter_on_a_tied_output_layer_is_not_merged(base, run, tmp_path):
    engine = Engine.load(str(base), device="cpu")
    tied = engine.model.config.tie_word_embeddings
    save_adapter(
        tmp_path / "h", Adapter(engine.linear_layers, LoraConfig(target_modules=["lm_head"]), seed=0), str(base)
    )
    if tied:
        assert "shares its weights" in refused("publish", tmp_path / "h", "--out", tmp_path / "x", "--merge")
        assert not (tmp_path / "x").exists()
    else:
        palestra("publish", tmp_path / "h", "--out", tmp_path / "x", "--merge")


@pytest.mark.slow
def test_full_models_and_population_members_are_published(base, tmp_path):
    speech = {"type": "full", "base": str(base), "lr": 1e-2, "sampling": {"max_tokens": 2}}
    path = two_agents(base, tmp_path, policies={"guide": speech, "walker": {"type": "scripted", "answers": ["0"]}})
    palestra("publish", path, "--out", tmp_path / "full")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "full")
    moved = logits(merged) - logits(AutoModelForCausalLM.from_pretrained(base))
    assert moved.abs().max() > 1e-3
    assert "only an adapter is merged" in refused("publish", path, "--out", tmp_path / "x", "--merge")
    (published,) = find_agents(tmp_path / "full")
    query = Request(IDS[0].numpy().astype(np.int32), 1, SamplingConfig(max_tokens=1, temperature=0))
    sampler = load_policy(published, Engines("cpu", 8)).sampler
    (sampled,) = asyncio.run(sampler.sample(query))
    assert sampled.token_ids[0] == logits(merged)[0, -1].argmax()


@pytest.mark.slow
def test_networks_of_runs_and_populations_are_published(tmp_path):
    palestra("train", "configs/populations/kuhn_psro.yaml", "--root", tmp_path, "--name", "pop", "--backend", "inline",
             "--set", "population.iterations=1", "--set", "population.env_steps=2000")  # fmt: skip
    palestra("publish", tmp_path / "pop", "--member", "player_0-1", "--out", tmp_path / "net")
    assert sorted(path.name for path in (tmp_path / "net").iterdir()) == [
        "README.md",
        "member.json",
        "policy.safetensors",
    ]
    head, text = card_of(tmp_path / "net")
    assert {"kuhn_poker", "psro"} <= set(head["tags"]) and "path: net" in text
    policies = {"player_0": {"type": "frozen", "path": str(tmp_path / "net")}, "player_1": {"type": "net"}}
    config = {"env": {"type": "kuhn_poker", "num_envs": 4}, "env_steps": 64, "name": "against", "policies": policies}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    palestra("train", tmp_path / "c.yaml", "--root", tmp_path)


def test_an_agent_keeps_its_quantised_base_and_its_context(base, tmp_path):
    """An adapter trained on a base in NF4 is served on it, and merged into the weights that NF4 leaves."""
    guide = {"type": "lora", "base": str(base), "lr": 1e-2, "sampling": {"max_tokens": 2}, "quantize": "nf4"}
    guide |= {"context": {"max_tokens": 90}, "rank_pattern": {"q_proj": 24}}
    path = two_agents(base, tmp_path, policies={"guide": guide, "walker": {"type": "scripted", "answers": ["0"]}})
    palestra("publish", path, "--out", tmp_path / "a")
    palestra("publish", path, "--out", tmp_path / "m", "--merge")
    agents = [*find_agents(path), *find_agents(tmp_path / "a"), *find_agents(tmp_path / "m")]
    policies = [load_policy(agent, Engines("cpu", 8)) for agent in agents]
    assert [policy.context.max_tokens for policy in policies] == [90] * 3
    request = Request(IDS[0].numpy().astype(np.int32), 1, SamplingConfig(max_tokens=1, temperature=0))
    found = [p.sampler.sample_all([replace(request, adapter=p.adapter)])[0][0].logprobs[0] for p in policies]
    assert found[0] == found[1] == pytest.approx(found[2], abs=LOGPROB_ATOL)
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    whole = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "a")
    assert (logits(kept) - logits(whole)).abs().max() > 1e-2  # what quantising the base changes
    assert "--max-lora-rank 32" in card_of(tmp_path / "a")[1]


def test_published_agent_is_pushed_to_the_hub(run, tmp_path, monkeypatch):
    with model_hub() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.address)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        out = tmp_path / "guide"
        options = ("--push-to-hub", "me/guide", "--private")
        said = palestra("publish", run, "--member", "guide", "--out", out, *options)
        assert f"uploaded to {hub.address}/me/guide" in said
        assert hub.files["me/guide"] == {file.name: file.read_bytes() for file in out.iterdir()}
        assert hub.private == {"me/guide"}
        monkeypatch.setenv("HF_TOKEN", TOKEN.upper())
        again = refused("publish", run, "--member", "guide", "--out", tmp_path / "no", "--push-to-hub", "me/guide")
        assert "401" in again and "HF_TOKEN" in again and TOKEN.upper() not in again
        assert not (tmp_path / "no").exists()  # refused before the work


def test_pushes_without_a_hub_or_a_model_are_refused(run, tmp_path):
    assert "--push-to-hub USER/NAME" in refused("publish", run, "--out", tmp_path / "a", "--private")
    table = refused("publish", run, "--out", tmp_path / "a.json", "--push-to-hub", "me/a")
    assert "are for weights, not for a table" in table
