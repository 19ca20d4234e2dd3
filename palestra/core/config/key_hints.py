"""What a key that a config does not have was meant to be: another library's name for a key, a key of another place, or
a misspelling."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence

from palestra.core.mappings import key_by_value

MAX_PLACES = 2  # places of a key that a message names

# The names of a key in TRL, transformers, PEFT, vLLM, verl, RLlib or Stable-Baselines3.
NAMES_ELSEWHERE = key_by_value(
    {
        "lr": ("learning_rate", "actor_lr"),
        "lr_schedule": ("lr_scheduler_type",),
        "rank": ("r", "lora_r", "lora_rank"),
        "alpha": ("lora_alpha",),
        "lora_dropout": ("dropout",),
        "base": ("model", "model_name", "model_name_or_path", "base_model"),
        "system": ("system_prompt",),
        "optimizer": ("optim",),
        "betas": ("adam_betas",),
        "eps": ("adam_eps", "adam_epsilon"),
        "max_grad_norm": ("grad_clip", "max_norm", "grad_norm_clip"),
        "dtype": ("torch_dtype",),
        "group_size": ("num_generations", "rollout_n", "num_return_sequences"),
        "max_tokens": ("max_new_tokens", "max_completion_tokens", "response_length"),
        "steps": ("max_steps", "num_steps", "num_iterations", "num_train_steps", "num_train_epochs"),
        "env_steps": ("total_timesteps", "timesteps"),
        "micro_batch_tokens": ("gradient_accumulation_steps",),
        "rollout_length": ("n_steps", "rollout_fragment_length"),
        "episodes": ("train_batch_size", "per_device_train_batch_size"),
        "epochs": ("n_epochs", "ppo_epochs", "num_sgd_iter", "num_epochs"),
        "minibatches": ("num_minibatches", "num_mini_batch"),
        "batch_size": ("ppo_mini_batch_size", "minibatch_size", "mini_batch_size", "sgd_minibatch_size"),
        "kl_coef": ("beta", "kl_loss_coef"),
        "entropy_coef": ("ent_coef", "entropy_coeff"),
        "value_coef": ("vf_coef", "vf_loss_coeff"),
        "clip": ("clip_range", "clip_param", "cliprange", "clip_ratio"),
        "clip_high": ("epsilon_high",),
        "gae_lambda": ("lam", "lambda_"),
        "gamma": ("discount",),
        "env": ("environment",),
        "policies": ("agents",),
        "seats": ("policy_mapping_fn",),
        "checkpoint_every": ("save_steps", "save_freq"),
        "seed": ("random_seed",),
        "name": ("run_name",),
        "sinks": ("report_to",),
    }
)

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
