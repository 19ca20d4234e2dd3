"""The bundled base models load with `transformers` alone, and need few tokens for the texts of their tasks."""

import asyncio
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from palestra.core.chat import parse_assistant_message, to_template_message
from palestra.core.config import validate
from palestra.core.config.shipped import SHIPPED_BASES_DIR
from palestra.envs import make_env
from palestra.envs.text.grid.grid import DIRECTIONS
from palestra.text.build.build import make_episode_runner
from palestra.text.build.engines import Engines
from palestra.text.build.policy_resolver import make_policy
from palestra.text.config import TextConfig
from palestra.text.rollouts.metrics import episode_metrics
from palestra.text.training.trainer import play_instances

TINY = SHIPPED_BASES_DIR / "tiny"
WORDS = [*DIRECTIONS, "size", "you", "box", "goal", "walls", "plan", "none", "sokoban", "path", "planner", "executor"]
COORDINATES = [f"{letter}{number}" for letter in "rc" for number in range(16)]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.mark.parametrize("word", [*WORDS, *COORDINATES, *"0123456789"])
def test_game_words_are_single_tokens(tokenizer, word):
    assert len(tokenizer.encode(word)) == len(tokenizer.encode(f" {word}")) == 1


@pytest.mark.parametrize("text", ["left left up", "héllo,  wörld\n\n 12+7=19 🧩", "Rows and c1ols, r12 c3", ""])
def test_any_text_survives_encode_and_decode(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_template_renders_turns(tokenizer):
    chat = [{"role": "system", "content": "sokoban planner"}, {"role": "user", "content": "you r1 c2"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert prompt == "<|system|>sokoban planner<|end|><|user|>you r1 c2<|end|><|assistant|>"
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    answered = [*chat, {"role": "assistant", "content": "left up"}]
    assert tokenizer.apply_chat_template(answered)["input_ids"] == [*ids, *tokenizer.encode("left up<|end|>")]


@pytest.mark.parametrize("game", ["sokoban", "plan_path"])
def test_prompts_at_4x4_are_short(tokenizer, game):
    env = make_env(game, size=4)
    lengths = [len(tokenizer.encode(env.reset(seed).observations["planner"])) for seed in range(50)]
    assert max(lengths) <= 45


def test_shipped_model_answers_in_game_words(tokenizer):
    model = AutoModelForCausalLM.from_pretrained(TINY).eval()
    assert 1_000_000 <= model.num_parameters() <= 3_000_000
    assert sum(file.stat().st_size for file in TINY.iterdir()) <= 8_000_000
    env = make_env("sokoban", size=4, split="dev")
    chat = [
        {"role": "system", "content": env.roles["planner"]},
        {"role": "user", "content": env.reset(0).observations["planner"]},
    ]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    with torch.inference_mode():
        out = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    answer = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert set(answer.split()) <= set(DIRECTIONS)


# ---- the base for tasks

TASKS = TINY.parent / "tasks"
COMPACT = {"rendering": "compact", "split": "dev"}
SPOKEN = {  # the largest number of tokens of an expert's answer, and of a prompt
    "math": ({"kinds": ["arithmetic"], "difficulty": 2}, 12, 40),
    "code": ({"source": "drills"}, 40, 40),
    "debate": ({"source": "drills", "rounds": 1}, 24, 60),
    "tools": ({"task_source": "drills"}, 60, 40),
    "sudoku": ({"size": 4}, 30, 60),
    "guess_number": ({}, 6, 20),
}


@pytest.fixture(scope="module")
def words():
    return AutoTokenizer.from_pretrained(TASKS)


@pytest.mark.parametrize("name", SPOKEN)
def test_task_prompts_are_short(words, name):
    options, most, longest = SPOKEN[name]
    env, rng = make_env(name, **options, **COMPACT), random.Random(0)
    for seed in range(50):
        for seat, seen in env.reset(seed).observations.items():
            assert len(words.encode(f"{env.roles.get(seat, '')}{seen}")) <= longest
            assert len(words.encode(env.expert(seat, rng))) < most


def test_tool_calls_render_and_parse_alike(words):
    """The template writes a conversation with calls in the form that the model was trained on."""
    said_by_hand = '<tool_call>{"name": "search", "arguments": {"query": "arle"}}</tool_call>'
    chat = [
        {"role": "user", "content": "arle people"},
        parse_assistant_message(said_by_hand),
        {"role": "tool", "tool_call_id": "call_0", "content": "arle 512"},
    ]
    prompt = words.apply_chat_template(list(map(to_template_message, chat)), add_generation_prompt=True, tokenize=False)
    assert prompt == f"<|user|>arle people<|end|><|assistant|>{said_by_hand}<|end|><|tool|>arle 512<|end|><|assistant|>"
    assert words.decode(words.encode(said_by_hand), skip_special_tokens=True) == said_by_hand


def test_task_base_is_small_and_plays_valid_turns():
    assert sum(file.stat().st_size for file in TASKS.iterdir()) <= 8_000_000
    config = {"env": {"type": "math", "kinds": ["arithmetic"], "difficulty": 1, "team": "single", **COMPACT}}
    config["policies"] = {"reasoner": {"type": "frozen", "base": "tasks", "sampling": {"max_tokens": 8}}}
    setup = validate(TextConfig, config)
    arena, seats = (
        make_episode_runner(setup.env, "dev"),
        {"reasoner": make_policy("r", setup.policies["reasoner"], Engines("cpu", 64))},
    )
    played = asyncio.run(play_instances(arena, seats, range(60), 0))
    assert episode_metrics(played)["failed"] == 0
    assert sum(bool(node.is_invalid("reasoner")) for episode in played for node in episode.nodes) < 20
