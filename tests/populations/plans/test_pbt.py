"""Population-based training: each rule by hand, then a search with a known optimum."""

import math

import numpy as np
import pytest

from palestra.core.config import validate
from palestra.populations.plans.pbt import PBT, PBTConfig, SearchSpace
from palestra.populations.population import Member, Population
from palestra.populations.tasks import OpponentResult, TrainResult

WIDE = {"lr": SearchSpace(low=1e-4, high=1e-2)}


def plan(seed=0, **config):
    population = Population(("p",))
    population.add(Member("uniform", ""))
    settled = {"num_learners": 5, "slices": 6, "rating": "return", "search": WIDE, **config}
    return PBT(PBTConfig(**settled), population, seed=seed)


def answer(task, value=0.0, against=()):
    opponents = {name: OpponentResult(100, 0.0, 1.0, 100 * rate, 0) for name, rate in dict(against).items()}
    return TrainResult(env_steps=task.env_steps, mean_return=value, opponents=opponents)


def first_slices(made, values):
    """Completes every learner's first slice in order, with these returns; returns the next slices."""
    return [
        made.on_result(task, answer(task, value))[0] for task, value in zip(made.initial_tasks(), values, strict=True)
    ]


def test_settings_are_sampled_log_uniformly():
    rng = np.random.default_rng(0)
    drawn = [SearchSpace(low=1e-4, high=1e-2).sample(rng) for _ in range(2000)]
    assert min(drawn) >= 1e-4 and max(drawn) <= 1e-2
    assert np.mean(np.array(drawn) < 1e-3) == pytest.approx(0.5, abs=0.04)  # the middle of two decades
    even = [SearchSpace(low=0.0, high=0.1, log_scale=False).sample(rng) for _ in range(2000)]
    assert np.mean(even) == pytest.approx(0.05, abs=0.003)


def test_initial_tasks_are_self_play_with_different_settings():
    tasks = plan().initial_tasks()
    assert [task.output_member for task in tasks] == [f"learner_{n}-1" for n in range(5)]
    assert all(
        task.self_play == 1 and task.opponents.mixes == {"p": {"uniform": 1}} and not task.members for task in tasks
    )
    assert len({task.settings["lr"] for task in tasks}) == 5
    assert [t.settings for t in plan(seed=1).initial_tasks()] != [t.settings for t in tasks]


def test_later_slices_play_the_latest_other_members():
    made = plan(select_every=6)
    later = first_slices(made, [0.0] * 5)
    assert later[0].self_play == 1  # no other learner had trained yet
    assert later[2].opponents.mixes == {"p": {"learner_0-1": 0.5, "learner_1-1": 0.5}}
    assert later[2].self_play == 0.2 and later[2].start == "learner_2-1"
    assert later[2].members == ("learner_0-1", "learner_1-1", "learner_2-1")


def test_worst_copies_the_best_and_perturbs():
    made = plan(select_every=1)
    before = {name: dict(learner.settings) for name, learner in made.learners.items()}
    later = first_slices(made, [0.5, 0.9, 0.4, 0.3, 0.1])
    assert [task.copied_from for task in later] == ["", "", "", "", "learner_1"]  # it ended after all had trained
    worst = later[4]
    assert worst.start == "learner_1-1" and worst.output_member == "learner_4-2"
    ratio = worst.settings["lr"] / before["learner_1"]["lr"]
    assert min(abs(ratio - 0.8), abs(ratio - 1.2)) < 1e-9 or worst.settings["lr"] in (1e-4, 1e-2)
    (after,) = made.on_result(worst, answer(worst, 5.0))
    assert after.copied_from == "" and after.start == "learner_4-2"
    (second,) = made.on_result(later[3], answer(later[3], 0.2))
    assert second.copied_from == "learner_4"  # the best learner now


def test_untested_settings_are_not_copied():
    made = plan(select_every=1)
    later = first_slices(made, [0.5, 0.9, 0.4, 0.3, 0.1])
    made.learners["learner_1"].score = 0.0  # learner_4's new setting is now the best, but it has not trained with it
    (second,) = made.on_result(later[3], answer(later[3], -1.0))
    assert second.copied_from == ""


def test_selection_respects_interval_and_rating_gap():
    assert {task.copied_from for task in first_slices(plan(select_every=2), [5, 4, 3, 2, 1])} == {""}
    for gap, copied in ((3.9, "learner_0"), (4.1, "")):
        assert first_slices(plan(select_every=1, min_rating_gap=gap), [5, 4, 3, 2, 1])[-1].copied_from == copied


def test_win_rating_is_the_mean_win_rate_over_others():
    made = plan(rating="wins", num_learners=3, select_every=1, self_play=0.0)
    tasks = first_slices(made, [0, 0, 0])
    made.on_result(tasks[2], answer(tasks[2], against={"learner_0-1": 0.9, "learner_1-1": 0.6}))
    ratings = [made.rating(learner) for learner in made.learners.values()]
    assert ratings == pytest.approx([(0.5 + 0.1) / 2, (0.5 + 0.4) / 2, 0.75])


def test_slice_without_finished_games_keeps_the_rating():
    made = plan(select_every=6)
    later = first_slices(made, [0.5, 0.9, 0.4, 0.3, 0.1])
    made.on_result(later[1], answer(later[1], None))
    assert made.rating(made.learners["learner_1"]) == 0.9


def test_perturbations_stay_in_range_with_some_resampled():
    made = plan(resample_probability=0.0)
    rng = np.random.default_rng(0)
    assert {round(made._explore_setting("lr", 1e-3, rng), 7) for _ in range(50)} == {8e-4, 1.2e-3}
    assert max(made._explore_setting("lr", 1e-2, rng) for _ in range(50)) == 1e-2
    anew = plan(resample_probability=0.25)
    share = np.mean([round(anew._explore_setting("lr", 1e-3, rng), 7) not in (8e-4, 1.2e-3) for _ in range(4000)])
    assert share == pytest.approx(0.25, abs=0.03)


def test_slice_metrics_are_logged_and_final_members_kept():
    made = plan(slices=1)
    task = made.initial_tasks()[3]
    result = answer(task, 0.7)
    assert made.on_result(task, result) == []
    assert made.task_metrics(task, result) == {
        "learner_3": {
            "iteration": 1,
            "env_steps": 20_000,
            "return": 0.7,
            "rating": 0.7,
            "lr": task.settings["lr"],
        }
    }
    _, member = made.population
    assert member.name == "learner_3-1" and member.info["settings"] == task.settings


@pytest.mark.parametrize("rating", ["return", "wins"])
def test_logged_rating_is_that_of_the_slice_not_of_the_copied_learner(rating):
    made = plan(rating=rating, num_learners=2, select_every=1, truncation=0.5, slices=3)
    first, second = made.initial_tasks()
    made.on_result(first, answer(first, 0.9))
    (third,) = made.on_result(second, answer(second, 0.4))
    assert made.task_metrics(second, answer(second, 0.4))["learner_1"]["rating"] == (0.4 if rating == "return" else 0.5)
    result = answer(third, 0.2, against={"learner_0-1": 0.1})
    (copied,) = made.on_result(third, result)
    assert copied.copied_from == "learner_0"
    assert made.task_metrics(third, result)["learner_1"]["rating"] == (0.2 if rating == "return" else 0.1)


def run_search(seed):
    """Learners gain 1 per slice minus the distance of their learning rate from 3e-3 in decades; returns the tasks, the
    best return and the final distances."""
    made, gained = (
        plan(seed=seed, num_learners=10, slices=40, select_every=2, search={"lr": SearchSpace(low=1e-5, high=1e-1)}),
        {"": 0.0},
    )
    waiting, done = list(made.initial_tasks()), []
    while waiting:
        task = waiting.pop(0)
        off = abs(math.log10(task.settings["lr"] / 3e-3))
        gained[task.output_member] = gained[task.start or ""] + 1 - off
        waiting += made.on_result(task, answer(task, gained[task.output_member]))
        done.append(task)
    rates = [task.settings["lr"] for task in done[-10:]]
    return done, max(gained.values()), [abs(math.log10(rate / 3e-3)) for rate in rates]


def test_pbt_finds_the_best_setting_and_beats_fixed_ones():
    for seed in range(3):
        done, reached, off = run_search(seed)
        first = [abs(math.log10(task.settings["lr"] / 3e-3)) for task in done[:10]]
        assert np.median(off) < 0.15 < np.median(first)
        assert reached > 40 * (1 - min(first))  # the best of the first draws, kept for all slices
    assert run_search(0)[0] == run_search(0)[0]  # a resume relies on this


def test_invalid_searches_are_refused():
    with pytest.raises(ValueError, match="no logarithm"):
        validate(PBTConfig, {"search": {"entropy": {"low": 0, "high": 0.1}}})
    with pytest.raises(ValueError, match="above high"):
        validate(PBTConfig, {"search": {"lr": {"low": 1, "high": 0.1}}})
    with pytest.raises(ValueError, match="needs an initial member"):
        PBT(PBTConfig(), Population(("a",)))
