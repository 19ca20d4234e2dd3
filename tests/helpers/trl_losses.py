"""Losses and gradients of TRL's trainers in TRL's own venv: JSON cases in, JSON results out.

    bench/.venv-trl/bin/python trl_losses.py < cases.json

A case has its `trainer` (a key of `TRAINERS`), the trainer's `config`, and arrays of B sequences padded to T tokens;
`mask` [B, T] is 0 for padding. For pairs the first half of the sequences is chosen and the second half rejected. The
trainers' own loss methods run on objects with only the attributes that they read; no trainer or model is built.
"""

import json
import sys
import tempfile
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOTrainer, RewardTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

ALONE = SimpleNamespace(
    device=torch.device("cpu"),
    num_processes=1,
    gather=lambda tensor: tensor,
    gather_for_metrics=lambda tensor: tensor,
    reduce=lambda tensor, reduction: tensor,
)
ROOM = {"output_dir": tempfile.gettempdir(), "use_cpu": True, "bf16": False, "report_to": []}


def grpo(case: dict[str, Any], logp: torch.Tensor) -> torch.Tensor:
    args = GRPOConfig(**ROOM, **case["config"])
    trainer = SimpleNamespace(
        args=args,
        model=SimpleNamespace(training=False),
        accelerator=ALONE,
        aux_loss_enabled=False,
        top_entropy_quantile=args.top_entropy_quantile,
        off_policy_mask_threshold=args.off_policy_mask_threshold,
        importance_sampling_level=args.importance_sampling_level,
        beta=args.beta,
        loss_type=args.loss_type,
        epsilon_low=args.epsilon,
        epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
        use_vllm=False,
        max_completion_length=args.max_completion_length,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, torch.zeros_like(logp), None),
    )
    mask = torch.tensor(case["mask"])
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(mask), 1, dtype=torch.long),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": torch.tensor(case["advantages"]),
        "old_per_token_logps": torch.tensor(case["old"]),
        "ref_per_token_logps": torch.tensor(case["ref"]),
        "num_items_in_batch": mask.sum(),
    }
    return GRPOTrainer._compute_loss(trainer, None, inputs)


def dpo(case: dict[str, Any], logp: torch.Tensor) -> torch.Tensor:
    args = DPOConfig(**ROOM, **case["config"])
    trainer = SimpleNamespace(
        args=args,
        model=SimpleNamespace(training=False),
        accelerator=ALONE,
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        loss_types=args.loss_type,
        loss_weights=[1.0],
        ld_alpha=args.ld_alpha,
        f_divergence_type=args.f_divergence_type,
        use_weighting=args.use_weighting,
        beta=args.beta,
        label_smoothing=args.label_smoothing,
        _total_train_tokens=0,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    mask = torch.tensor(case["mask"])
    zeros = torch.zeros_like(logp)
    outputs = SimpleNamespace(log_probs=logp * mask, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    chosen, rejected = (torch.tensor(case["ref"]) * mask).sum(1).chunk(2)
    inputs = {
        "input_ids": torch.zeros(len(mask), 1 + mask.shape[1], dtype=torch.long),
        "completion_mask": torch.cat([torch.zeros(len(mask), 1, dtype=torch.long), mask], 1),
        "attention_mask": torch.ones(len(mask), 1 + mask.shape[1]),
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }
    return DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)


def kto(case: dict[str, Any], logp: torch.Tensor) -> torch.Tensor:
    trainer = SimpleNamespace(
        **case["config"],
        model=SimpleNamespace(training=False),
        accelerator=ALONE,
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        calculate_KL=True,
        _total_train_tokens=0,
        loss_type="kto",
        _metrics=defaultdict(lambda: defaultdict(list)),
        _compute_kl_logps=lambda model, batch: torch.tensor(case["kl"]),
    )
    mask = torch.tensor(case["mask"])
    zeros = torch.zeros_like(logp)
    outputs = SimpleNamespace(log_probs=logp * mask, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    inputs = {
        "input_ids": torch.zeros(len(mask), 1 + mask.shape[1], dtype=torch.long),
        "completion_mask": torch.cat([torch.zeros(len(mask), 1, dtype=torch.long), mask], 1),
        "attention_mask": torch.ones(len(mask), 1 + mask.shape[1]),
        "label": torch.tensor(case["label"]),
        "ref_logps": (torch.tensor(case["ref"]) * mask).sum(1),
        "ref_KL_logps": torch.zeros(len(case["kl"])),
    }
    return KTOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)


def mean_logps(case: dict[str, Any], logp: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The mean log-probability of each chosen side, and of each rejected one."""
    mask = torch.tensor(case["mask"])
    return ((logp * mask).sum(1) / mask.sum(1)).chunk(2)


def simpo(case: dict[str, Any], logp: torch.Tensor) -> torch.Tensor:
    settings = {"simpo_gamma": case["gamma"], "beta": case["beta"], "label_smoothing": case["smoothing"]}
    trainer = SimpleNamespace(alpha=0.0, loss_type="simpo", accelerator=ALONE, **settings)
    return CPOTrainer.cpo_loss(trainer, *mean_logps(case, logp))[0].mean()


def orpo(case: dict[str, Any], logp: torch.Tensor) -> torch.Tensor:
    """The trainer adds the negative log-likelihood of the chosen side, whose prompt here is empty."""
    chosen, rejected = mean_logps(case, logp)
    trainer = SimpleNamespace(beta=case["beta"], accelerator=ALONE)
    return -chosen.mean() - ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)[0].mean()


def reward(case: dict[str, Any], rewards: torch.Tensor) -> torch.Tensor:
    """A reward of each side, in place of its only token's log-probability."""
    trainer = SimpleNamespace(
        args=SimpleNamespace(center_rewards_coefficient=case["center"]),
        model=SimpleNamespace(training=False),
        accelerator=ALONE,
        _total_train_tokens=0,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    return RewardTrainer.compute_loss(trainer, lambda **_: SimpleNamespace(logits=rewards), {})


TRAINERS = {"grpo": grpo, "dpo": dpo, "kto": kto, "simpo": simpo, "orpo": orpo, "reward": reward}


def answer(case: dict[str, Any]) -> dict[str, Any]:
    logp = torch.tensor(case["logp"], requires_grad=True)
    loss = TRAINERS[case["trainer"]](case, logp)
    loss.backward()
    return {"loss": loss.item(), "slopes": (logp.grad * torch.tensor(case["mask"])).tolist()}


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    print(json.dumps([answer(case) for case in json.load(sys.stdin)]))
