"""What some of the cookbook's recipes learn, unmodified and offline: 0.6.1 on tinker 0.38, and 0.4.0 on tinker 0.15.
That all of them run is in test_recipes.py."""

import json
import random
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from helpers.official import CLIENTS, Official

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]
BASE = {"model_name": "Qwen/Qwen3.5-4B"}
PLAIN = BASE | {"renderer_name": "role_colon"}
REWARD = "env/all/reward/total"
SUMS = 280  # batches of sums that are read before any reward is given
WINDOW, RISE = 10, 0.05  # steps in each average, and three standard errors of the difference of two averages


def rewards(rows: list[dict[str, Any]], name: str = REWARD) -> list[float]:
    """A metric of each step; rows at the end of a log have only counts of tokens."""
    return [row[name] for row in rows if name in row]


def checkpoints(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (log / "checkpoints.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("clients", ["a", "c"])
def test_guess_number_recipe_trains(official: Official, clients: str, tmp_path: Path) -> None:
    flags = {"batch_size": 2, "group_size": 2, "max_tokens": 8, "max_steps": 2, "eval_every": 0, "save_every": 1}
    model = {"model_name": "Qwen/Qwen3-0.6B", "renderer_name": "role_colon"}
    rows = official.recipe(clients, "multiplayer_rl.guess_number", tmp_path, **model, **flags)
    assert all(-10 <= reward <= 1 for reward in rewards(rows)) and len(rewards(rows)) == 2
    assert rewards(rows, "env/all/turns_per_episode")[-1] > 1
    assert checkpoints(tmp_path)[-1]["state_path"].startswith("tinker://")


def worked_sum(dice: random.Random) -> list[dict[str, str]]:
    """A sum as the recipe asks for it, and an answer that adds ones and tens separately: "12 7 82" for 35 + 47."""
    x, y = dice.randint(0, 100), dice.randint(0, 100)
    answer = f"{x % 10 + y % 10} {x // 10 + y // 10} {x + y}"
    return [{"role": "user", "content": f"What is {x} + {y}?"}, {"role": "assistant", "content": answer}]


@pytest.mark.timeout(1800)
def test_arithmetic_recipe_improves_its_reward(official: Official, tmp_path: Path) -> None:
    """The tiny base cannot add: chat_sl first trains it on worked sums, until some of its answers are right. From there
    the recipe's own reward, 1 for the right sum and -0.1 for an answer that does not end, rises."""
    dice, shot = (
        random.Random(0),
        [{"role": "user", "content": "What is 4 + 5?"}, {"role": "assistant", "content": "9"}],
    )
    talks = [{"messages": shot + [m for _ in range(8) for m in worked_sum(dice)]} for _ in range(8 * SUMS)]
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(f"{json.dumps(talk)}\n" for talk in talks))
    same = BASE | {"renderer_name": "qwen3_instruct", "save_every": 0, "eval_every": 0}
    first = {"dataset": data, "batch_size": 8, "max_length": 512, "learning_rate": 4e-3, "infrequent_eval_every": 0}
    every = {"train_on_what": "all_assistant_messages"}
    official.recipe("c", "chat_sl", tmp_path / "sl", seconds=900, **same, **first, **every)
    start = checkpoints(tmp_path / "sl")[-1]["state_path"]
    flags = {"env": "arithmetic", "groups_per_batch": 48, "group_size": 8, "max_tokens": 10, "learning_rate": 1.5e-4}
    steps = {"max_steps": 50, "load_checkpoint_path": start, "loss_fn": "importance_sampling"}
    rows = official.recipe("c", "math_rl", tmp_path / "rl", seconds=900, **same, **flags, **steps)
    found, right = rewards(rows), rewards(rows, "env/all/correct")
    assert len(found) == 50
    assert fmean(found[-WINDOW:]) > fmean(found[:WINDOW]) + RISE
    assert fmean(right[-WINDOW:]) > fmean(right[:WINDOW]) + RISE  # by right sums, not by answers that end


def test_text_arena_recipe_with_another_renderer(official: Official, tmp_path: Path) -> None:
    """Its default renderer, which test_recipes.py uses, raises if an answer continues after the end token."""
    sizes = {"batch_size": 8, "num_train_datapoints": 16, "num_test_datapoints": 4, "max_tokens": 8}
    flags = {"test_opponent": "random", "max_steps": 2, "eval_every": 1, "save_every": 0}
    rows = official.recipe("c", "multiplayer_rl.text_arena", tmp_path, **PLAIN, **sizes, **flags)
    assert all(-2 <= reward <= 1 for reward in rewards(rows)) and len(rewards(rows)) == 2
    assert rewards(rows, "test/env/all/reward/total")


def test_recipe_with_the_unpublished_loss_is_told_which_to_set(official: Official, tmp_path: Path) -> None:
    flags = {"env": "arithmetic", "groups_per_batch": 2, "group_size": 2, "max_tokens": 4, "max_steps": 1}
    with pytest.raises(AssertionError, match="loss_fn=importance_sampling"):
        official.recipe("c", "math_rl", tmp_path, **PLAIN, **flags)


def test_chat_sl_learns_and_resumes(official: Official, tmp_path: Path) -> None:
    """A checkpoint is named after the batch that was just trained on: a run resumed there trains on that batch
    again. Its log is cut back to the checkpoint."""
    (data,) = (CLIENTS / "c" / "lib").glob("python3*/site-packages/tinker_cookbook/example_data/conversations.jsonl")
    flags = {"dataset": data, "batch_size": 16, "max_length": 1024, "learning_rate": 2e-3, "max_steps": 6}
    every = {"save_every": 3, "eval_every": 0, "infrequent_eval_every": 0}
    before = official.recipe("c", "chat_sl", tmp_path, **PLAIN, **flags, **every)
    saved = tmp_path / "checkpoints.jsonl"
    first = saved.read_text().splitlines()[0]
    saved.write_text(f"{first}\n")  # as a run killed after this checkpoint leaves it
    rows = official.recipe("c", "chat_sl", tmp_path, **PLAIN, **flags, **every, behavior_if_log_dir_exists="resume")
    losses, again = (rewards(part, "train_mean_nll") for part in (before, rows))
    assert len(losses) == 6 and losses[-1] < 0.8 * losses[0]
    assert json.loads(first)["batch"] == 3
    assert [row["step"] for row in rows if "train_mean_nll" in row] == [0, 1, 2, 3, 4, 5]
    assert again[:3] == losses[:3]
    assert all(later < earlier for later, earlier in zip(again[3:], losses[3:], strict=True))
