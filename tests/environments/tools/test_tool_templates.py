"""The tools env with other chat templates: calls are read, and each later prompt is the template's own."""

import asyncio
import json
import random
import re

import numpy as np
import pytest
from helpers.chat_templates import MISTRAL, real_tokenizer, template_folder, tokenizer_of
from helpers.command_line import invoke
from transformers import LlamaConfig, LlamaForCausalLM

from palestra.core.types import Answer
from palestra.engine.conversation.encoder import ChatEncoder
from palestra.environments.tools.env import Tools
from palestra.runs import load_episodes
from palestra.text.policies.lm import LanguagePolicy
from palestra.text.rollouts.tree_rollout import Branching, EpisodeRunner, EpisodeSpec

ENV = {"kinds": ["lookup_compute"], "split": "base"}
TEMPLATES = ("qwen3", "qwen3_5_nothink", "llama3_1", "mistral", "gptoss", "gemma4_v5", "glm4moe", "muse_glimmer")


def tokenizer_for(name):
    return tokenizer_of(MISTRAL) if name == "mistral" else real_tokenizer(name)


class Obedient:
    """What a model writes that knows the solution and obeys its template."""

    name = "s"

    def __init__(self, encoder):
        self.encoder, self.policy = encoder, LanguagePolicy("s", None, encoder, None)

    async def act(self, query):
        expert = query.expert(random.Random(query.seed))
        calls = expert.split("\n") if "<tool_call>" in expert else [expert]
        text = expert if self.encoder.renderer.form.has_many_calls else calls[0]
        conversation, prompt = self.policy._conversation(query), self.policy.encode_prompt(query)
        ids = self.encoder.encode_answer(conversation, text)
        read = self.encoder.read(ids, prompt, conversation.tools)
        return [Answer(read.text, "s", prompt, ids, np.zeros(len(ids), np.float32), thought=read.thought)]


def as_given(message):
    """A message of the env as users of `transformers` give it to a template."""
    calls = [
        call | {"function": call["function"] | {"arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls", [])
    ]
    return message | ({"tool_calls": calls} if calls else {})


def as_mistral_takes(messages):
    """The messages without a system role, and with ids of nine characters: the first call of an answer has
    "000000000", the second "000000001"."""
    system, user, *rest = messages
    asked = {"role": "user", "content": f"{system['content']}\n\n{user['content']}"}
    return [asked, *json.loads(re.sub(r'"call_(\d)"', r'"00000000\1"', json.dumps(rest)))]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.few(3)
def test_calls_in_the_templates_form_solve_the_tasks(name):
    tokenizer = tokenizer_for(name)
    encoder = ChatEncoder(tokenizer)
    arena = EpisodeRunner(lambda: Tools(**ENV), "tools")
    episode = asyncio.run(arena.play(EpisodeSpec(3, {"agent": Obedient(encoder)}, 3), Branching()))
    assert episode.error is None and episode.success == 1 and len(episode.nodes) >= 3
    for node in episode.nodes[1:]:
        seen, answer = node.observations["agent"], node.answers["agent"]
        prompt = tokenizer.decode(answer.prompt_ids)
        assert str(seen.messages[-1]["content"]).split("\n")[0] in prompt
        messages = [as_given(message) for message in seen.messages]
        messages = as_mistral_takes(messages) if name == "mistral" else messages
        assert prompt == tokenizer.apply_chat_template(
            messages, tools=list(seen.tools), tokenize=False, add_generation_prompt=True
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TEMPLATES[:5], "smollm2"])
def test_a_base_of_each_template_trains_with_tools(name, tmp_path):
    """An expert's calls are imitated, then the base explores, by the command line: tiny bases, and SmolLM2 with a
    template that shows tools, which its own does not."""
    base, template = name, {"chat_template": str(template_folder() / "qwen2_5.jinja")}
    if name != "smollm2":
        tokenizer, base, template = tokenizer_for(name), str(tmp_path / "base"), {}
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = LlamaConfig(vocab_size=len(tokenizer) + 8, max_position_embeddings=32768, **shape)
        LlamaForCausalLM(config).save_pretrained(base)
        tokenizer.save_pretrained(base)
    sampling = {"max_tokens": 32}
    agent = {"type": "lora", "base": base, "rank": 2, "sampling": sampling, **template}
    taught = {"name": "copy", "steps": 2, "algorithm": {"type": "sft"}, "policies": {"agent": {"teacher": "expert"}}}
    tried = {"name": "try", "steps": 1, "algorithm": {"type": "grpo", "group_size": 2}}
    config = {
        "name": "tools",
        "env": {"type": "tools", "max_calls": 1, **ENV},  # gpt-oss and Llama 3 take one call an answer
        "episodes": 2,
        "save_episodes_every": 1,
        "policies": {"agent": agent, "expert": {"type": "expert"}},
        "stages": [taught, tried],
    }
    path = tmp_path / "tools.json"
    path.write_text(json.dumps(config))
    done = invoke("train", path, "--root", tmp_path / "runs")
    assert done.exit_code == 0 or "all answers earn the same" in done.output, done.output
    files = sorted((tmp_path / "runs" / "tools" / "episodes").glob("*.parquet"))
    episodes = [episode for file in files for episode in load_episodes(file)]
    assert len(episodes) >= 4 and all(episode.error is None for episode in episodes)
    shown = [episode for episode in episodes if episode.success]
    assert len(shown) == 4 and all(len(episode.nodes) >= 3 for episode in shown)
