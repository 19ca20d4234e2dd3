"""The bundled tiny base model loads with `transformers` alone, and says in one token each what the games say."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import palestra
from palestra.envs import make_env
from palestra.envs.text.grids import DIRECTIONS

TINY = Path(palestra.__file__).parent / "bases" / "tiny"
WORDS = [*DIRECTIONS, "size", "you", "box", "goal", "walls", "plan", "none", "sokoban", "path", "planner", "executor"]
COORDINATES = [f"{letter}{number}" for letter in "rc" for number in range(16)]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.mark.parametrize("word", [*WORDS, *COORDINATES, *"0123456789"])
def test_a_word_of_the_games_is_one_token(tokenizer, word):
    assert len(tokenizer.encode(word)) == len(tokenizer.encode(f" {word}")) == 1


@pytest.mark.parametrize("text", ["left left up", "héllo,  wörld\n\n 12+7=19 🧩", "Rows and c1ols, r12 c3", ""])
def test_any_text_survives(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_chat_template(tokenizer):
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


def test_the_model_loads_and_answers_in_the_games_words(tokenizer):
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
