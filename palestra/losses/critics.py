"""Losses of critics, of moments and of actions, and of policies that climb them: pure functions over rows.

Shapes: `K` critics, `P` members of a stack, `R` rows, `A` discrete actions. `share` [P, R] says how much a row counts;
a loss is [P], one for each member, and they simply add up. No gradient flows through a target.
"""

from __future__ import annotations

from torch import Tensor


def td_target(reward: Tensor, discount: Tensor, value: Tensor) -> Tensor:
    """What an action turned out to be worth [P, R]: the reward until the next own decision, and the discounted value
    of that one. `discount` is 0 where the game terminated."""
    return reward + discount * value


def value_loss(value: Tensor, target: Tensor, share: Tensor) -> Tensor:
    """Half the mean squared error of the values of moments, all of one shape."""
    return 0.5 * (share * (value - target).square()).sum()


def critic_loss(q_KPR: Tensor, target_PR: Tensor, share_PR: Tensor) -> Tensor:
    """Half the mean squared error of values, summed over the critics [P]."""
    return 0.5 * (share_PR * (q_KPR - target_PR.detach()).square()).sum((0, 2))


def soft_value(q_PR: Tensor, logp_PR: Tensor, alpha_P1: Tensor) -> Tensor:
    """Value of a drawn action plus `alpha` times its surprise [P, R] (Haarnoja et al., 2018, eq. 3)."""
    return q_PR - alpha_P1 * logp_PR


def soft_value_of_all(q_PRA: Tensor, logp_PRA: Tensor, alpha_P1: Tensor) -> Tensor:
    """The expectation of `soft_value` over discrete actions [P, R] (Christodoulou, 2019, eq. 10). An illegal action has
    probability 0 and a finite log-probability."""
    return (logp_PRA.exp() * (q_PRA - alpha_P1[..., None] * logp_PRA)).sum(-1)


def ascent_loss(value_PR: Tensor, share_PR: Tensor) -> Tensor:
    """The mean value of what a policy does, negated [P].

    Of values of deterministic actions this is the deterministic policy gradient (Silver et al., 2014); of soft values
    it is SAC's loss of the policy (Haarnoja et al., 2018, eq. 7; Christodoulou, 2019, eq. 12).
    """
    return -(share_PR * value_PR).sum(-1)


def temperature_loss(log_alpha_P1: Tensor, entropy_PR: Tensor, wanted_PR: Tensor, share_PR: Tensor) -> Tensor:
    """Raises the temperature where the entropy is below the one wanted, and lowers it where above [P] (Haarnoja et
    al., 2018b, eq. 18). In the logarithm, so that steps do not shrink with the temperature."""
    return (log_alpha_P1 * share_PR * (entropy_PR - wanted_PR).detach()).sum(-1)
