"""What a key that a config does not have was meant to be: another library's name for a key, a key of another place, or
a misspelling."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence

MAX_PLACES = 2  # places of a key that a message names

# A key's name here by its name in TRL, transformers, PEFT, vLLM, verl, RLlib or Stable-Baselines3.
NAMES_ELSEWHERE = {
    "learning_rate": "lr",
    "actor_lr": "lr",
    "lr_scheduler_type": "lr_schedule",
    "r": "rank",
    "lora_r": "rank",
    "lora_rank": "rank",
    "lora_alpha": "alpha",
    "dropout": "lora_dropout",
    "model": "base",
    "model_name": "base",
    "model_name_or_path": "base",
    "base_model": "base",
    "system_prompt": "system",
    "optim": "optimizer",
    "adam_betas": "betas",
    "adam_eps": "eps",
    "adam_epsilon": "eps",
    "grad_clip": "max_grad_norm",
    "max_norm": "max_grad_norm",
    "grad_norm_clip": "max_grad_norm",
    "torch_dtype": "dtype",
    "num_generations": "group_size",
    "rollout_n": "group_size",
    "num_return_sequences": "group_size",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "response_length": "max_tokens",
    "max_steps": "steps",
    "num_steps": "steps",
    "num_iterations": "steps",
    "num_train_steps": "steps",
    "total_timesteps": "env_steps",
    "timesteps": "env_steps",
    "num_train_epochs": "steps",
    "gradient_accumulation_steps": "micro_batch_tokens",
    "n_steps": "rollout_length",
    "rollout_fragment_length": "rollout_length",
    "train_batch_size": "episodes",
    "per_device_train_batch_size": "episodes",
    "n_epochs": "epochs",
    "ppo_epochs": "epochs",
    "num_sgd_iter": "epochs",
    "num_epochs": "epochs",
    "num_minibatches": "minibatches",
    "num_mini_batch": "minibatches",
    "ppo_mini_batch_size": "batch_size",
    "minibatch_size": "batch_size",
    "mini_batch_size": "batch_size",
    "sgd_minibatch_size": "batch_size",
    "beta": "kl_coef",
    "kl_loss_coef": "kl_coef",
    "ent_coef": "entropy_coef",
    "entropy_coeff": "entropy_coef",
    "vf_coef": "value_coef",
    "vf_loss_coeff": "value_coef",
    "clip_range": "clip",
    "clip_param": "clip",
    "cliprange": "clip",
    "clip_ratio": "clip",
    "epsilon_high": "clip_high",
    "lam": "gae_lambda",
    "lambda_": "gae_lambda",
    "discount": "gamma",
    "environment": "env",
    "agents": "policies",
    "policy_mapping_fn": "seats",
    "save_steps": "checkpoint_every",
    "save_freq": "checkpoint_every",
    "random_seed": "seed",
    "run_name": "name",
    "report_to": "sinks",
}

# Keys of a policy, which other libraries have in the config of the algorithm.
POLICY_KEYS = ("lr", "rank", "alpha", "base", "optimizer", "max_grad_norm", "sampling", "max_tokens")

# The key of an env's name, in Gymnasium, PettingZoo and OpenSpiel.
ENV_NAME_KEYS = ("id", "env", "game")


def hint(path: str, key: str, known: Sequence[str], places: Callable[[str], Iterable[str]]) -> str:
    """Returns ": did you mean ...?" for an unknown key, or "".

    `path` is the place of the key and `known` are that place's keys; `places` returns the paths at which the whole
    config may have a key. Another library's name comes first, then a key of a place below or another place, then the
    nearest spelling.
    """
    meant = [NAMES_ELSEWHERE.get(key, key)]
    if key in ENV_NAME_KEYS:
        meant += ENV_NAME_KEYS
    if there := [name for name in meant if name in known]:
        return f": did you mean {there[0]}?"
    elsewhere = list(dict.fromkeys(places(meant[0])))
    below = [place for place in elsewhere if place.startswith(f"{path}.")]
    shown = (below or elsewhere)[:MAX_PLACES]
    if not shown and meant[0] in POLICY_KEYS:
        return f": {meant[0]} is a key of a policy, Lora(...) or Net(...)"
    if shown:
        return f": did you mean {' or '.join(shown)}?"
    return nearest(key, known)


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns ": did you mean ...?" with the nearest of the known words, or ""."""
    for near in difflib.get_close_matches(word, list(known), n=1, cutoff=0.5):
        return f": did you mean {near}?"
    return ""
