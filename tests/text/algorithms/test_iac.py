"""IAC and MAAC: answers as actions by hand, inputs of a critic, and a critic with its own adapter."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.actor_critic_runs import (
    FixedValuesLearner,
    credit_samples,
    lists,
    play,
    play_first_step,
    resumed_checkpoint,
    run_of,
    whisper,
)

from palestra.core.config import validate
from palestra.core.config.presets import expand_preset
from palestra.core.losses import (
    LossInputs,
    actor_critic_loss,
    clipped_policy_loss,
    policy_gradient_loss,
    value_function_loss,
)
from palestra.core.types import Answer, Node, Sample
from palestra.runs import read_lines
from palestra.text.algorithms.ppo import PPO, critic_input
from palestra.text.algorithms.presets import TEXT_PRESETS
from palestra.text.build.build import build
from palestra.text.config import TextConfig
from palestra.text.training.update import update_learner

# a answers with two tokens, b with one, a with one; a's first answer earns 2.5 until its second, which earns 1
TURNS = (
    ({"a": 2}, {"a": 2.0}, 0.0),
    ({"b": 1}, {"a": 0.5, "b": 3.0}, 0.0),
    ({"a": 1}, {"a": 1.0}, 0.0),
)


def preset(name: str, **options: Any) -> PPO:
    return PPO.model_validate(expand_preset({"type": name, **options}, TEXT_PRESETS))


# ---- answers as actions


def test_advantages_of_answers_by_hand():
    """Values 1 and 4 of the states before the answers: 2.5 + 0.5 * 4 - 1 = 3.5 and 1 - 4 = -3, at each token of an
    answer; with lambda 1 the first is 3.5 + 0.5 * -3 = 2. Values after an answer's first token do not count."""
    options = {"gamma": 0.5, "normalize_advantages": False}
    samples, _ = credit_samples(preset("iac", **options), [play(TURNS)], FixedValuesLearner([[1, 99], [4]]))
    assert lists(samples, "advantages") == [[3.5, 3.5], [-3.0]]
    assert lists(samples, "returns") == [[4.5, 4.5], [1.0]] and lists(samples, "values") == [[1.0, 1.0], [4.0]]
    assert [sample.denominator for sample in samples] == [1.0, 1.0]  # means over answers do not depend on their lengths
    further = PPO(action_level="turn", gae_lambda=1.0, **options)
    samples, _ = credit_samples(further, [play(TURNS)], FixedValuesLearner([[1, 99], [4]]))
    assert lists(samples, "advantages") == [[2.0, 2.0], [-3.0]]


def test_advantages_of_answers_are_standardised_over_answers():
    """3.5 and -3 become 1 and -1: the three tokens do not count."""
    samples, _ = credit_samples(preset("iac", gamma=0.5), [play(TURNS)], FixedValuesLearner([[1, 99], [4]]))
    assert lists(samples, "advantages") == [[1.0, 1.0], [-1.0]]


def test_penalty_of_an_answer_is_the_sum_over_its_tokens():
    """Log-ratios to the reference of 1 and 2 take 0.5 * 3 from the first answer's reward, and 0.5 * 1 from the
    second's."""
    reference = [[-2.0, -3.0], [-2.0]]
    learner = FixedValuesLearner([[0, 0], [0]], reference=reference)
    algorithm = preset("iac", normalize_advantages=False, kl_coef=0.5)
    samples, metrics = credit_samples(algorithm, [play(TURNS)], learner)
    assert lists(samples, "advantages") == [[1.0, 1.0], [0.5]]
    assert metrics["kl_sequence"] == pytest.approx(4.0)


def test_advantages_of_an_action_critic_by_hand():
    """Values 2 and 4 of the answers: their targets are 2.5 + 0.5 * 4 = 4.5 and 1, their advantages the values."""
    algorithm = preset("iac", critic="separate", critic_type="q", gamma=0.5, normalize_advantages=False)
    samples, _ = credit_samples(algorithm, [play(TURNS)], FixedValuesLearner([[2], [4]]))
    assert lists(samples, "returns") == [[4.5, 4.5], [1.0]] and lists(samples, "values") == [[2.0, 2.0], [4.0]]
    assert lists(samples, "advantages") == [[2.0, 2.0], [4.0]]


def test_exact_action_critic_still_gives_advantages():
    """Two answers to one prompt earn 3 and 1, which the critic predicts exactly: the residuals are 0, and the
    advantages 1 and -1."""
    episode = play(*((({"a": 1}, {"a": reward}, 0.0),) for reward in (3.0, 1.0)))
    algorithm = preset("maac", critic_type="q", group_size=2)
    samples, metrics = credit_samples(algorithm, [episode], FixedValuesLearner([[3], [1]]))
    assert lists(samples, "advantages") == [[1.0], [-1.0]] and metrics["explained_variance"] == 1.0


def tokens_of(values: list[float], returns: list[float], old: list[float] | None = None) -> LossInputs:
    """Three tokens of two answers, the first of two tokens; a weight of 1/2 each: two answers, two terms of a mean."""
    logp = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    tensors = [torch.tensor(part) if part is not None else None for part in (values, old, returns)]
    value = tensors[0].requires_grad_()
    weight, advantage = torch.full((3,), 0.5), torch.tensor([2.0, 2.0, -1.0])
    sequence = torch.tensor([0, 0, 1])
    plain = (logp, torch.zeros(3), torch.zeros(3), None, advantage, weight, sequence, sequence)
    return LossInputs(*plain, value, tensors[1], tensors[2])


def test_loss_of_answers_by_hand():
    """-(2 * (-1 - 2) - (-3)) / 2 = 1.5 for the policy, and for the critic the errors (1 - 2)^2 and (5 - 1)^2 at the
    first tokens: 1.2 / 2 * 17 / 2 = 5.1."""
    inputs = tokens_of([1.0, 77.0, 5.0], [2.0, 2.0, 1.0])
    loss, metrics = actor_critic_loss(inputs, surrogate="policy_gradient", value_coef=1.2, value_per_answer=True)
    assert loss.item() == pytest.approx(1.5 + 5.1)
    loss.backward()
    assert inputs.value_M.grad.tolist() == pytest.approx([-0.6, 0.0, 2.4])
    assert inputs.logp_M.grad.tolist() == pytest.approx([-1.0, -1.0, 0.5])
    assert metrics["value_loss"].item() == pytest.approx((1 + 1 + 16) / 4)  # each token has the error of its answer


def answers(logp: list[float], old: list[float], advantage: float) -> LossInputs:
    """Two tokens of one answer of weight 1, and one token of another answer of advantage 0."""
    column = torch.tensor(logp, requires_grad=True)
    weight, advantages = torch.ones(3), torch.tensor([advantage, advantage, 0.0])
    sequence = torch.tensor([0, 0, 1])
    return LossInputs(column, torch.zeros(3), torch.tensor(old), None, advantages, weight, sequence, sequence)


CLIPPED = PPO(action_level="turn", critic="separate", importance_cap=None)
BOUNDS = {"clip": 0.2}


@pytest.mark.parametrize(
    ("gaps", "advantage", "slope"),
    [
        ((0.15, 0.15), 1.0, 0.0),  # each token is within 1.2, but the answer's ratio of 1.35 is not
        ((0.5, -0.5), 1.0, -1.0),  # the first token is out of bounds, but the answer's ratio is 1
        ((0.05, 0.05), 2.0, -2.0 * math.exp(0.1)),
        ((-0.15, -0.15), -1.0, 0.0),  # 0.74 is below 0.8
        ((0.3, 0.3), -1.0, math.exp(0.6)),
    ],
)
def test_ratio_of_an_answer_is_clipped_by_hand(gaps, advantage, slope):
    """The gradient of -min(r A, clip(r) A) is -r A at each token's log-probability, r the product of both ratios."""
    inputs = answers([*gaps, 0.0], [0.0, 0.0, 0.0], advantage)
    loss, metrics = CLIPPED.loss(inputs, **BOUNDS)
    loss.backward()
    assert inputs.logp_M.grad.tolist() == pytest.approx([slope, slope, 0.0])
    assert float(metrics["clip_fraction"]) == (2.0 if slope == 0 else 0.0)


def test_answers_of_one_token_are_clipped_as_tokens():
    inputs = answers([0.1, 0.3, 0.0], [0.0, 0.0, 0.0], 1.0)
    inputs = inputs._replace(sequence_M=torch.arange(3))
    assert CLIPPED.loss(inputs, **BOUNDS)[0].item() == pytest.approx(clipped_policy_loss(inputs, **BOUNDS)[0].item())
    with pytest.raises(ValueError, match="needs the number of each token's sequence"):
        CLIPPED.loss(inputs._replace(sequence_M=None), **BOUNDS)


def test_importance_ratios_stay_those_of_tokens():
    """The second token was sampled twice as often as before the update: its factor is 1/2, and the first's 1."""
    inputs = answers([0.05, 0.05, 0.0], [0.0, 0.0, 0.0], 1.0)
    inputs = inputs._replace(sampler_logp_M=torch.tensor([0.0, math.log(2), 0.0]))
    CLIPPED.loss(inputs, importance_cap=2.0)[0].backward()
    assert inputs.logp_M.grad.tolist() == pytest.approx([-math.exp(0.1), -math.exp(0.1) / 2, 0.0])


def test_a_shared_critic_has_ratios_of_answers_too():
    """The policy gradient equals that with a separate critic; the value gradient comes from the first tokens only."""
    inputs = answers([0.05, 0.05, 0.0], [0.0, 0.0, 0.0], 1.0)
    value = torch.tensor([1.0, 7.0, 5.0], requires_grad=True)
    inputs = inputs._replace(value_M=value, return_M=torch.tensor([2.0, 2.0, 1.0]))
    algorithm = PPO(action_level="turn", value_coef=1.0, importance_cap=None)
    algorithm.loss(inputs, **algorithm.loss_options)[0].backward()
    assert inputs.logp_M.grad.tolist() == pytest.approx([-math.exp(0.1), -math.exp(0.1), 0.0])
    assert value.grad.tolist() == pytest.approx([-1.0, 0.0, 4.0])


def test_values_of_answers_are_clipped():
    """From 0, a value of 1 on its way to 2 has moved by more than 0.2 and has no gradient; 5 has passed its return."""
    inputs = tokens_of([1.0, 77.0, 5.0], [2.0, 2.0, 1.0], old=[0.0, 0.0, 0.0])
    loss, metrics = value_function_loss(inputs, value_coef=1.0, value_clip=0.2, value_per_answer=True)
    assert loss.item() == pytest.approx(((0.2 - 2) ** 2 + 16) / 4)
    loss.backward()
    assert inputs.value_M.grad.tolist() == pytest.approx([0.0, 0.0, 2.0])
    assert metrics["value_clip_fraction"].item() == pytest.approx(1.0)  # two tokens of a half each, of the first answer


def test_policy_gradient_of_stale_samples_is_corrected():
    """Ratios of 1/2 and 4 to the sampler, the second of which is cut to 2."""
    logp = torch.tensor([-1.0, -1.0], requires_grad=True)
    sampler = logp.detach() + torch.tensor([2.0, 0.25]).log()
    inputs = LossInputs(logp, torch.ones(2), logp.detach(), None, torch.ones(2), torch.full((2,), 0.5))
    loss, metrics = policy_gradient_loss(inputs._replace(sampler_logp_M=sampler), importance_cap=2.0, entropy=0.1)
    assert loss.item() == pytest.approx((0.5 + 2) / 2 - 0.1)
    assert metrics["importance_cap_fraction"].item() == pytest.approx(0.5)


# ---- inputs of a central critic


def answer_to(prompt: list[int], ids: list[int]) -> Answer:
    return Answer("x", "p@0", np.array(prompt, np.int32), np.array(ids, np.int32), np.zeros(len(ids), np.float32))


def nodes_of(*steps: dict[str, Answer]) -> list[Node]:
    return [Node(i, i - 1 if i else None, i, {}, answers) for i, answers in enumerate(steps)]


def test_seats_that_act_at_once_are_read_by_their_prompts():
    """Prompts of the others in their order, then the seat's own; no answer, since the value must not depend on them."""
    answers = {"a": answer_to([1, 2], [9]), "b": answer_to([3], [8]), "c": answer_to([4], [7])}
    nodes = nodes_of(answers)
    assert critic_input(nodes, ["a", "b", "c"], "b", joint=True).tolist() == [1, 2, 4, 3]
    assert critic_input(nodes, ["a", "b", "c"], "c", joint=True).tolist() == [1, 2, 3, 4]


def test_earlier_answers_of_others_are_read():
    """b acts after a, and a again: the newest prompts with the answers to them. c has not acted yet, and d's policy has
    no tokens."""
    nodes = nodes_of(
        {"a": answer_to([1], [9]), "d": Answer("x", "d")}, {"b": answer_to([2], [8, 8])}, {"a": answer_to([3], [7])}
    )
    seats = ["a", "b", "c", "d"]
    assert critic_input(nodes[:2], seats, "b", joint=True).tolist() == [1, 9, 2]
    assert critic_input(nodes, seats, "a", joint=True).tolist() == [2, 8, 8, 3]


def test_action_critics_read_the_answers_too():
    """Answers of this step: of others that act at the same time, and the seat's own, which is last."""
    answers = {"a": answer_to([1, 2], [9]), "b": answer_to([3], [8, 8])}
    nodes = nodes_of(answers, {"a": answer_to([4], [7])})
    assert critic_input(nodes[:1], ["a", "b"], "a", joint=True, with_answers=True).tolist() == [3, 8, 8, 1, 2, 9]
    assert critic_input(nodes, ["a", "b"], "a", joint=True, with_answers=True).tolist() == [3, 8, 8, 4, 7]
    assert critic_input(nodes, ["a", "b"], "a", joint=False, with_answers=True).tolist() == [4, 7]


def test_samples_have_what_the_critic_reads():
    episode = play((({"a": 2, "b": 1}, {}, 1.0),))
    (own,), _ = preset("maac", critic_type="q").build_samples([episode], "p")
    assert own.critic_ids.tolist() == [1, 2, 0, 1, 2, 0, 1]
    (own,), _ = preset("iac", critic="separate", critic_type="q").build_samples([episode], "p")
    assert own.critic_ids.tolist() == [1, 2, 0, 1]
    (own,), _ = preset("maac").build_samples([episode], "p")
    assert own.critic_ids.tolist() == [1, 2, 1, 2]
    (own,), _ = preset("iac", critic="separate").build_samples([episode], "p")
    assert own.critic_ids.tolist() == [1, 2]
    for shared in (preset("iac"), PPO(), PPO(critic="separate")):
        assert shared.build_samples([episode], "p")[0][0].critic_ids is None


# ---- a separate critic


def test_a_separate_critic_does_not_move_the_policy(base):
    """The policy's gradient equals that without a value loss, however large that loss is. The critic's adapter and head
    have gradients, and its step has its own learning rate and clip."""
    found = {}
    for coef in (0.0, 1e3):
        algorithm = {"type": "maac", "value_coef": coef, "normalize_advantages": False}
        setup = build(whisper(base, steps=1, episodes=6, algorithm=algorithm, policy={"critic_lr": 0.02}))
        learner = setup.learners["guide"]
        samples, _ = setup.stages[0].algorithm.build_samples(play_first_step(setup), "guide")
        samples, _ = asyncio.run(setup.stages[0].algorithm.finalize_samples(samples, learner, {}))
        algorithm = setup.stages[0].algorithm
        asyncio.run(learner.forward_backward(samples, algorithm.loss, **algorithm.loss_options))
        found[coef] = [p.grad.clone() for p in learner.weights.parameters]
        assert learner.weights.critic is None
        before = [p.detach().clone() for p in learner.weights.critic_weights.parameters]
        metrics = asyncio.run(learner.optim_step())
        moved = [
            float((a - b).detach().abs().max())
            for a, b in zip(before, learner.weights.critic_weights.parameters, strict=True)
        ]
    assert all(torch.equal(a, b) for a, b in zip(*found.values(), strict=True))
    assert any(gradient.abs().max() > 0 for gradient in found[0.0])
    trainer = learner.weights.critic_weights
    averages = [trainer.optimizer.state[p]["exp_avg"] for p in trainer.critic_parameters]
    # the gradient before it is clipped to 1; Adam's average takes a tenth of it
    assert metrics["critic_grad_norm"] > 100
    assert float(torch.nn.utils.get_total_norm(averages)) == pytest.approx(0.1, rel=1e-3)
    assert moved[-1] == pytest.approx(0.02, rel=1e-3)  # the first step of Adam is the learning rate


@pytest.mark.parametrize(
    ("critic", "level"), [("shared", "token"), ("separate", "token"), ("separate", "turn"), ("central", "turn")]
)
@pytest.mark.few(1)
def test_critic_converges_to_the_return(base, critic, level, check_score):
    """Every trajectory returns 2: a critic trained alone converges to 2 at both turns."""
    env = {"type": "helpers.toys:Chant", "turns": 2}
    algorithm = {"normalize_advantages": False, "gae_lambda": 1.0, "critic": critic, "action_level": level}
    config = whisper(base, steps=1, episodes=4, evals={}, algorithm=algorithm)
    tree = config.model_dump() | {"env": env, "seats": {"caller": "guide", "herald": "walker", "walker": "walker"}}
    setup = build(validate(TextConfig, tree))
    learner, algorithm = setup.learners["guide"], setup.stages[0].algorithm
    episodes = play_first_step(setup)
    for episode in episodes:
        for node in episode.nodes:
            node.rewards, node.team_reward = {}, 2.0 * node.done
    for _ in range(60):
        asyncio.run(update_learner(algorithm, learner, episodes, 0.0))
    samples, _ = algorithm.build_samples(episodes, "guide")
    values = np.concatenate(asyncio.run(learner.values(samples)))
    assert len(samples) == 8
    check_score(np.abs(values - 2).max())


def secret_games(setup, step):
    """The games of a step. They pay for a secret of 1, whatever the answers: the guide's prompt ends with the secret,
    the walker's has noise and the guide's word."""
    moment = setup.position_of(step)
    branching = moment.stage.algorithm.branching
    episodes = asyncio.run(moment.stage.source.play(moment.episode_numbers, branching, setup.algorithm_state))
    for episode in episodes:
        secret = str(episode.nodes[0].observations["guide"])[-1]
        for node in episode.nodes:
            node.rewards, node.team_reward = {}, float(secret == "1") * node.done
    return episodes


@pytest.mark.slow
def test_central_critic_sees_what_the_policy_does_not(base):
    """The walker's critic reads the guide's prompt, and so predicts the return of games that it was not trained on."""
    shares = {}
    for critic in ("separate", "central"):
        algorithm = {"action_level": "turn", "critic": critic, "gae_lambda": 0.0, "value_coef": 1.0}
        policy = {"lr": 0.0, "critic_lr": 1e-2}
        setup = build(whisper(base, steps=25, episodes=32, env={"turns": 1}, algorithm=algorithm, policy=policy))
        learner, config = setup.learners["walker"], setup.stages[0].algorithm
        updates = (update_learner(config, learner, secret_games(setup, step), 0.0) for step in range(25))
        metrics = [asyncio.run(update) for update in updates]
        shares[critic] = np.mean([line["explained_variance"] for line in metrics[-8:]])
    assert shares["separate"] < 0.3 and shares["central"] > 0.7


@pytest.mark.slow  # the same of PPO, whose critic is saved alike, is a fast test
def test_resume_after_stop_is_bit_identical(base, tmp_path):
    config = whisper(
        base,
        steps=4,
        episodes=8,
        algorithm={"type": "maac", "group_size": 2, "kl_coef": 0.05, "value_clip": 0.2},
        policy={"epochs": 2, "batch_size": 20, "history": "conversation"},
        evals={"test": {"episodes": 4, "every": 2}},
    )
    assert (resumed_checkpoint(config, tmp_path, 2) / "guide/critic/critic.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "critic_type", "bar"), [("iac", "v", 0.75), ("maac", "v", 0.75), ("maac", "q", 0.45)])
def test_two_agents_learn_to_cooperate(base, tmp_path, name, critic_type, bar):
    """Two secrets a game, on held-out instances; chance is 1/4. With q, which has no baseline, they learn one of
    them."""
    algorithm = {"type": name, "critic_type": critic_type}
    path = run_of(whisper(base, steps=30, episodes=96, algorithm=algorithm), tmp_path)
    before, after = (line["success"] for line in read_lines(path / "evals.jsonl"))
    assert before < 0.4 and after > bar


# ---- refused settings


def test_central_critic_of_tokens_is_refused():
    with pytest.raises(ValueError, match="no value for each of its tokens: set action_level: turn"):
        PPO(critic="central")
    with pytest.raises(ValueError, match="surrogate: policy_gradient has none"):
        preset("iac", dual_clip=3.0)
    with pytest.raises(ValueError, match="type: maac is type: ppo with critic: central"):
        preset("maac", critic="separate")
    with pytest.raises(ValueError, match="critic_type: q reads a whole answer"):
        preset("iac", critic_type="q")


def test_full_model_with_a_separate_critic_is_refused(base):
    full = {"type": "full", "base": str(base), "sampling": {"max_tokens": 1}}
    policies = {"guide": full, "walker": {"type": "scripted", "answers": ["0"]}}
    with pytest.raises(ValueError, match=r"which type: full trains too: set type: lora, or critic: shared"):
        build(whisper(base, steps=1, policies=policies, algorithm={"critic": "separate"}))


def test_central_critic_of_two_bases_is_refused(base, other_base):
    config = whisper(base, steps=1, algorithm={"type": "maac"})
    tree = config.model_dump(mode="json")
    tree["policies"]["walker"]["base"] = str(other_base)
    with pytest.raises(ValueError, match="guide and walker are on different bases"):
        build(validate(TextConfig, tree))


def test_stages_with_different_critics_are_refused(base):
    stages = [{"name": "one"}, {"name": "two", "algorithm": {"type": "iac", "critic": "separate"}}]
    with pytest.raises(ValueError, match="a policy has one critic for the whole run"):
        build(whisper(base, steps=1, stages=[{**stage, "steps": 1} for stage in stages]))


def test_joint_prompt_longer_than_the_base_is_refused(base):
    setup = build(whisper(base, steps=1, algorithm={"type": "maac"}))
    limit = setup.learners["guide"].weights.engine.model.config.max_position_embeddings
    ids, zeros = np.array([1], np.int32), np.zeros(1, np.float32)
    long = Sample(ids, ids, zeros, zeros, critic_ids=np.ones(limit + 1, np.int32))
    with pytest.raises(ValueError, match=f"here {limit + 1} tokens, and the base has {limit}"):
        setup.learners["guide"].weights.values([long])


def test_checkpoint_without_a_separate_critic_is_refused(base, tmp_path):
    build(whisper(base, steps=1)).learners["guide"].save(tmp_path)
    setup = build(whisper(base, steps=1, algorithm={"type": "maac"}))
    with pytest.raises(ValueError, match="holds no separate critic"):
        setup.learners["guide"].load(tmp_path)
