"""Advantages and targets, by hand and against their definitions term by term."""

from dataclasses import replace

import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from palestra.vector.nets.advantages import AdvantageInputs, gae, vtrace


def course(
    rewards: list[float],
    values: list[float],
    *,
    over: tuple[int, ...] = (),
    bootstrap: dict[int, float] | None = None,
    agent_mask: list[bool] | None = None,
) -> AdvantageInputs:
    """One seat of one game: `over` are the steps that ended it, `bootstrap` the values after them."""
    T = len(rewards)
    last = torch.zeros(T, 1, 1, dtype=torch.float64)
    for t, value in (bootstrap or {}).items():
        last[t] = value
    ended = torch.zeros(T, 1, 1, dtype=torch.bool)
    ended[list(over)] = True
    return AdvantageInputs(
        torch.tensor(rewards, dtype=torch.float64).view(T, 1, 1),
        torch.tensor(values, dtype=torch.float64).view(T + 1, 1, 1),
        last,
        ended,
        torch.tensor(agent_mask or [True] * (T + 1)).view(T + 1, 1, 1),
    )


def numbers(x: torch.Tensor) -> list[float]:
    return x.flatten().tolist()


# ---- worked by hand, where every seat acts at every step


def test_gae_by_hand() -> None:
    # errors: 1 + .5*1 - .5 = 1; 2 + .5*1.5 - 1 = 1.75; 3 + .5*2 - 1.5 = 2.5; each adds .25 of the next estimate
    advantages, known = gae(course([1, 2, 3], [0.5, 1, 1.5, 2]), gamma=0.5, gae_lambda=0.5)
    assert numbers(advantages) == pytest.approx([1 + 0.25 * 2.375, 1.75 + 0.25 * 2.5, 2.5])
    assert known.all()


def test_terminated_step_does_not_bootstrap() -> None:
    # 2 - 1 = 1 at step 1; what comes after it belongs to another game
    advantages, _ = gae(course([1, 2, 3], [0.5, 1, 1.5, 2], over=(1,)), gamma=0.5, gae_lambda=0.5)
    assert numbers(advantages) == pytest.approx([1 + 0.25 * 1, 1, 2.5])


def test_truncated_step_bootstraps_from_its_final_observation() -> None:
    # 2 + .5*4 - 1 = 3 at step 1: 4 is the value of the last observation, 1.5 that of the next game's first
    advantages, _ = gae(course([1, 2, 3], [0.5, 1, 1.5, 2], over=(1,), bootstrap={1: 4.0}), gamma=0.5, gae_lambda=0.5)
    assert numbers(advantages) == pytest.approx([1 + 0.25 * 3, 3, 2.5])


def test_episode_may_end_at_the_last_step() -> None:
    advantages, known = gae(course([1, 2], [0.5, 1, 100], over=(1,)), gamma=0.5, gae_lambda=0.5)
    assert numbers(advantages) == pytest.approx([1 + 0.5 - 0.5 + 0.25, 1])
    assert known.all()


def test_lambda_0_gives_td_errors_and_lambda_1_returns() -> None:
    game = course([1, 2, 3], [0.5, 1, 1.5, 2], over=(2,))
    assert numbers(gae(game, gamma=0.5, gae_lambda=0)[0]) == pytest.approx([1 + 0.5 - 0.5, 2 + 0.75 - 1, 3 - 1.5])
    assert numbers(gae(game, gamma=0.5, gae_lambda=1)[0]) == pytest.approx([1 + 1 + 0.75 - 0.5, 2 + 1.5 - 1, 3 - 1.5])


# ---- worked by hand, where seats take turns


def two_turns() -> AdvantageInputs:
    """Seats 0 and 1 move in turn, twice each; the game ends with step 3 and pays +1 and -1; seat 0 is paid .1 with seat
    1's first move. Values of steps at which a seat does not act are 99."""
    rewards = torch.tensor([[[0.0, 0.0]], [[0.1, 0.0]], [[0.0, 0.0]], [[1.0, -1.0]]])
    values = torch.tensor([[[0.2, 99.0]], [[99.0, -0.1]], [[0.4, 99.0]], [[99.0, 0.3]], [[0.2, 99.0]]])
    agent_mask = values < 50
    over = torch.tensor([False, False, False, True]).view(4, 1, 1).expand(4, 1, 2)
    return AdvantageInputs(rewards, values, torch.zeros(4, 1, 2), over, agent_mask)


def test_turn_based_time_counts_own_decisions() -> None:
    advantages, known = gae(two_turns(), gamma=0.9, gae_lambda=0.5)
    second = 1 - 0.4  # paid with the other's last move
    assert advantages[2, 0, 0].item() == pytest.approx(second)
    assert advantages[0, 0, 0].item() == pytest.approx(0.1 + 0.9 * 0.4 - 0.2 + 0.45 * second)
    assert advantages[3, 0, 1].item() == pytest.approx(-1 - 0.3)
    assert advantages[1, 0, 1].item() == pytest.approx(0.9 * 0.3 + 0.1 + 0.45 * -1.3)
    assert known[:, 0].tolist() == [[True, False], [False, True], [True, False], [False, True]]


def test_rewards_before_the_first_own_action_are_ignored() -> None:
    """A game ends with step 0; in the next one the seat is paid 5 before its first move."""
    game = course([1, 5, 2, 0], [0, 0, 0, 0, 0], over=(0, 3), agent_mask=[True, False, True, False, True])
    advantages, known = gae(game, gamma=1.0, gae_lambda=1.0)
    assert numbers(advantages[known]) == [1, 2]
    assert numbers(known) == [True, False, True, False]


def test_eliminated_seat_is_credited_with_rewards_to_the_end() -> None:
    game = course([0, 0, 3], [0.5, 9, 9, 0.5], over=(2,), agent_mask=[True, False, False, True])
    advantages, known = gae(game, gamma=0.9, gae_lambda=0.95)
    assert advantages[0].item() == pytest.approx(3 - 0.5)
    assert numbers(known) == [True, False, False]


def test_action_without_next_decision_in_the_rollout_is_unknown() -> None:
    game = course([1, 1, 1], [0, 0, 0, 0], agent_mask=[True, False, True, False])
    assert numbers(gae(game, gamma=0.9, gae_lambda=0.95)[1]) == [True, False, False]
    _, _, known = vtrace(game, torch.ones(3, 1, 1), gamma=0.9)
    assert numbers(known) == [True, False, False]


def test_values_of_inactive_steps_are_not_used() -> None:
    # the action at step 1 has no known advantage: its next decision lies after the last step
    agent_mask = [True, True, False, False]
    plain = course([1, 1, 1], [0.5, 0.5, 0.5, 0.5], agent_mask=agent_mask)
    other = course([1, 1, 1], [0.5, 0.5, 77, 77], agent_mask=agent_mask)
    (first, known), (second, _) = (gae(game, gamma=0.9, gae_lambda=0.95) for game in (plain, other))
    assert known.any()
    assert torch.equal(first[known], second[known])


# ---- against the definitions, in random games


def decisions(game: AdvantageInputs, b: int, n: int) -> list[list[tuple[int, float, float, float]]]:
    """The known decisions of seat n in game b, in chains that end with a game or the last step: (step, reward until the
    next decision, own value, value of the next decision or the bootstrap value)."""
    T = len(game.rewards)
    chains: list[list[tuple[int, float, float, float]]] = [[]]
    t = 0
    while t < T:
        if not game.agent_mask[t, b, n]:
            t += 1
            continue
        reward, start, follows = 0.0, t, None
        while t < T:
            reward += float(game.rewards[t, b, n])
            t += 1
            if game.done[t - 1, b, n]:
                follows = float(game.bootstrap[t - 1, b, n])
                break
            if game.agent_mask[t, b, n]:
                follows = float(game.values[t, b, n])
                break
        if follows is not None:
            chains[-1].append((start, reward, float(game.values[start, b, n]), follows))
        if follows is None or game.done[t - 1, b, n]:
            chains.append([])
    return chains


def gae_by_definition(game: AdvantageInputs, gamma: float, lam: float) -> dict[tuple[int, int, int], float]:
    """The sum of (gamma * lam)^l * error of the l-th decision from here."""
    found = {}
    for b in range(game.rewards.shape[1]):
        for n in range(game.rewards.shape[2]):
            for chain in decisions(game, b, n):
                errors = [reward + gamma * follows - value for _, reward, value, follows in chain]
                for i, (t, *_) in enumerate(chain):
                    found[t, b, n] = sum((gamma * lam) ** k * e for k, e in enumerate(errors[i:]))
    return found


def vtrace_by_definition(
    game: AdvantageInputs, ratio: torch.Tensor, gamma: float, lam: float, rho: float, c: float
) -> dict[tuple[int, int, int], tuple[float, float]]:
    """Espeholt et al. (2018), eq. 1: v_s = V_s + sum over t >= s of gamma^(t-s) * c_s ... c_(t-1) * error_t, where an
    error is rho_t * (r_t + gamma V_(t+1) - V_t), and the advantage rho_s * (r_s + gamma v_(s+1) - V_s)."""
    found = {}
    for b in range(game.rewards.shape[1]):
        for n in range(game.rewards.shape[2]):
            for chain in decisions(game, b, n):
                ratios = [float(ratio[t, b, n]) for t, *_ in chain]
                errors = [
                    min(rho, x) * (reward + gamma * follows - value)
                    for x, (_, reward, value, follows) in zip(ratios, chain, strict=True)
                ]
                targets = []
                for i, (_, _, value, _) in enumerate(chain):
                    target = value
                    for k in range(i, len(chain)):
                        trace = np.prod([lam * min(c, x) for x in ratios[i:k]])
                        target += gamma ** (k - i) * trace * errors[k]
                    targets.append(target)
                for i, (t, reward, value, follows) in enumerate(chain):
                    after = targets[i + 1] if i + 1 < len(chain) else follows
                    found[t, b, n] = (min(rho, ratios[i]) * (reward + gamma * after - value), targets[i])
    return found


@st.composite
def courses(draw: st.DrawFn, *, turns: bool = True, settled: bool = True) -> AdvantageInputs:
    """Random games of random seats, which end for all seats or for some; with `settled` all seats act at the last step,
    so that every decision is known."""
    T, B, N = draw(st.integers(1, 7)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    eighths = st.integers(-24, 24).map(lambda x: x / 8)

    def real(*shape: int) -> torch.Tensor:
        return torch.from_numpy(draw(arrays.arrays(np.float64, shape, elements=eighths)))

    def flags(*shape: int) -> torch.Tensor:
        return torch.from_numpy(draw(arrays.arrays(np.bool_, shape)))

    over = flags(T, B)[..., None] | flags(T, B, N)
    terminated = flags(T, B, N)
    agent_mask = flags(T + 1, B, N) if turns else torch.ones(T + 1, B, N, dtype=torch.bool)
    if settled:
        agent_mask[-1] = True
    bootstrap = torch.where(over & ~terminated, real(T, B, N), 0.0)
    return AdvantageInputs(real(T, B, N), real(T + 1, B, N), bootstrap, over, agent_mask)


def agrees(estimates: torch.Tensor, known: torch.Tensor, found: dict[tuple[int, int, int], float]) -> None:
    assert {tuple(index) for index in known.nonzero().tolist()} == set(found)
    for index, expected in found.items():
        assert estimates[index].item() == pytest.approx(expected, rel=1e-9, abs=1e-9), index


PARTS = st.sampled_from([0.0, 0.5, 0.75, 1.0])
FEW = settings(max_examples=40)


@FEW
@given(courses() | courses(turns=False), PARTS, PARTS)
def test_gae_equals_its_definition(game: AdvantageInputs, gamma: float, lam: float) -> None:
    agrees(*gae(game, gamma=gamma, gae_lambda=lam), gae_by_definition(game, gamma, lam))


@FEW
@given(courses(settled=False), PARTS, PARTS)
def test_gae_up_to_an_unknown_action_equals_its_definition(game: AdvantageInputs, gamma: float, lam: float) -> None:
    agrees(*gae(game, gamma=gamma, gae_lambda=lam), gae_by_definition(game, gamma, lam))


@FEW
@given(courses(), PARTS, PARTS, st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([0.5, 1.0]), st.data())
def test_vtrace_equals_its_definition(
    game: AdvantageInputs, gamma: float, lam: float, rho: float, c: float, data: st.DataObject
) -> None:
    shape = tuple(game.rewards.shape)
    quarters = st.integers(0, 12).map(lambda x: x / 4)
    ratio = torch.from_numpy(data.draw(arrays.arrays(np.float64, shape, elements=quarters)))
    advantages, targets, known = vtrace(game, ratio, gamma=gamma, gae_lambda=lam, rho=rho, c=c)
    found = vtrace_by_definition(game, ratio, gamma, lam, rho, c)
    agrees(advantages, known, {index: advantage for index, (advantage, _) in found.items()})
    agrees(targets, known, {index: target for index, (_, target) in found.items()})


def test_vtrace_by_hand() -> None:
    """Ratios 2 and .5, bounds of 1: the first action has weight 1, the second 1/2."""
    game = course([1, 2], [0.5, 1, 100], over=(1,))
    ratio = torch.tensor([2.0, 0.5]).view(2, 1, 1)
    advantages, targets, _ = vtrace(game, ratio, gamma=0.5)
    assert numbers(targets) == pytest.approx([0.5 + (1 + 0.5 - 0.5) + 0.5 * 1 * 0.5 * (2 - 1), 1 + 0.5 * (2 - 1)])
    assert numbers(advantages) == pytest.approx([1 * (1 + 0.5 * 1.5 - 0.5), 0.5 * (2 - 1)])


@FEW
@given(courses(), PARTS, PARTS)
def test_on_policy_vtrace_targets_equal_gae(game: AdvantageInputs, gamma: float, lam: float) -> None:
    advantages, known = gae(game, gamma=gamma, gae_lambda=lam)
    _, targets, same = vtrace(game, torch.ones_like(game.rewards), gamma=gamma, gae_lambda=lam)
    assert torch.equal(known, same)
    assert torch.allclose((advantages + game.values[:-1])[known], targets[known])


@settings(max_examples=20)
@given(courses(turns=False), PARTS)
def test_constant_added_to_values_cancels_without_discount(game: AdvantageInputs, lam: float) -> None:
    """With gamma 1 and no terminal steps, only differences of values count."""
    cut = replace(game, bootstrap=torch.where(game.done, game.bootstrap, 0.0))
    moved = replace(cut, values=cut.values + 3, bootstrap=torch.where(cut.done, cut.bootstrap + 3, cut.bootstrap))
    assert torch.allclose(gae(cut, gamma=1.0, gae_lambda=lam)[0], gae(moved, gamma=1.0, gae_lambda=lam)[0])
