"""verl's estimators and losses in verl's own venv: JSON cases in, JSON results out.

    bench/.venv-verl/bin/python verl_losses.py < cases.json

A case has its `kind` (a key of `KINDS`) and arrays of B sequences padded to T tokens; `mask` [B, T] is 1 for the tokens
of the policy, 0 for those of the env and for padding. The package's own functions run on them.
"""

import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.reward_manager.dapo import DAPORewardManager

Case = dict[str, Any]
Result = dict[str, Any]


def tensor(case: Case, name: str) -> torch.Tensor:
    return torch.tensor(case[name])


def correct(case: Case) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The importance weights [B, T] (None: none) of the sampler's tokens, and the mask without the rejected ones."""
    weights, mask, _ = compute_rollout_correction_and_rejection_mask(
        tensor(case, "old"), tensor(case, "sampler"), tensor(case, "mask"), **case["correction"]
    )
    return None if weights is None else weights.batch["rollout_is_weights"], mask


def policy(case: Case, logp: torch.Tensor) -> torch.Tensor:
    """The loss of the policy, with advantages of the `estimator` if the case names one, and with `kl_type` the KL loss
    with the coefficient 0.3."""
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        policy_loss=PolicyLossConfig(dro_beta=case.get("dro_beta")),
        global_batch_info={"loss_scale_factor": case.get("loss_scale_factor")},
        **case.get("config", {}),
    )
    weights, mask = correct(case) if "correction" in case else (None, tensor(case, "mask"))
    loss_of = core_algos.get_policy_loss_fn(case["loss"])
    credit = torch.tensor(advantages(case)["advantages"]) if "estimator" in case else tensor(case, "advantages")
    loss, _ = loss_of(tensor(case, "old"), logp, credit, mask, case["mode"], config, weights)
    if "kl_type" in case:
        penalty = core_algos.kl_penalty(logp, tensor(case, "ref"), case["kl_type"])
        loss = loss + 0.3 * core_algos.agg_loss(penalty, mask, case["mode"], **config.global_batch_info)
    return loss


def value(case: Case, values: torch.Tensor) -> torch.Tensor:
    """The critic's loss; values are in place of log-probabilities."""
    old, returns, mask = (tensor(case, name) for name in ("old", "returns", "mask"))
    scale = case.get("loss_scale_factor")
    return core_algos.compute_value_loss(
        values, returns, old, mask, case["clip"], case["mode"], loss_scale_factor=scale
    )[0]


def entropy(case: Case, logits: torch.Tensor) -> torch.Tensor:
    """The mean entropy; logits [B, T, V] are in place of log-probabilities."""
    return core_algos.compute_entropy_loss(logits, tensor(case, "mask"), case["mode"])


def loss(case: Case) -> Result:
    logp = torch.tensor(case["logp"], requires_grad=True)
    found = {"policy": policy, "value": value, "entropy": entropy}[case["kind"]](case, logp)
    found.backward()
    return {"loss": found.item(), "slopes": logp.grad.tolist()}


def kl(case: Case) -> Result:
    """The estimate of each token, and the gradient of their sum."""
    logp = torch.tensor(case["logp"], requires_grad=True)
    found = core_algos.kl_penalty(logp, tensor(case, "ref"), case["kl_type"])
    found.sum().backward()
    return {"values": found.tolist(), "slopes": logp.grad.tolist()}


def advantages(case: Case) -> Result:
    """Advantages and returns [B, T], of rewards with a KL penalty if the case has a `kl_coef`."""
    rewards = tensor(case, "rewards")
    if "kl_coef" in case:
        rewards = core_algos.compute_rewards(rewards, tensor(case, "old"), tensor(case, "ref"), case["kl_coef"])
    if case["estimator"] == "gae":
        more = {"values": tensor(case, "values"), "gamma": case["gamma"], "lam": case["lam"]}
    else:
        more = {"index": np.array(case["index"]), "config": AlgoConfig()} | case.get("options", {})
    estimate = core_algos.get_adv_estimator_fn(case["estimator"])
    more["token_level_rewards"], more["response_mask"] = rewards, tensor(case, "mask")
    if case["estimator"] == "reinforce_plus_plus":
        del more["index"]
    found, returns = estimate(**more)
    return {"advantages": found.tolist(), "returns": returns.tolist()}


def correction(case: Case) -> Result:
    weights, mask = correct(case)
    return {"weights": None if weights is None else weights.tolist(), "mask": mask.tolist()}


def overlong(case: Case) -> Result:
    """The penalty of DAPO's reward manager for a score of 0 and answers of `lengths` tokens."""
    lengths, limit = case["lengths"], case["limit"]
    settings = SimpleNamespace(enable=True, len=case["buffer"], penalty_factor=1.0, log=False)
    manager = DAPORewardManager(
        SimpleNamespace(decode=lambda ids, **_: "", eos_token="</s>"),
        num_examine=0,
        compute_score=lambda **_: 0.0,
        max_resp_len=limit,
        overlong_buffer_cfg=settings,
    )
    attention = (torch.arange(1 + limit) < 1 + torch.tensor(lengths)[:, None]).long()
    one = np.array([{"ground_truth": ""} for _ in lengths], dtype=object)
    data = DataProto.from_dict(
        tensors={
            "prompts": torch.zeros(len(lengths), 1, dtype=torch.long),
            "responses": torch.zeros(len(lengths), limit, dtype=torch.long),
            "attention_mask": attention,
        },
        non_tensors={"reward_model": one, "data_source": np.array([""] * len(lengths), dtype=object)},
    )
    return {"rewards": manager(data).sum(1).tolist()}


def kl_controller(case: Case) -> Result:
    """The coefficient after each step of `steps` sequences."""
    controller = core_algos.AdaptiveKLController(case["coef"], case["target"], case["horizon"])
    found = []
    for current in case["kls"]:
        controller.update(current, case["steps"])
        found.append(float(controller.value))
    return {"coefs": found}


KINDS = {
    "policy": loss,
    "value": loss,
    "entropy": loss,
    "kl": kl,
    "advantages": advantages,
    "correction": correction,
    "overlong": overlong,
    "kl_controller": kl_controller,
}

if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    print(json.dumps([KINDS[case["kind"]](case) for case in json.load(sys.stdin)]))
