"""Success by seat of text envs: policies that play against each other have no success in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.command_line import palestra, refused
from helpers.toy_teams import Quarrel

import palestra as pl
from palestra.core.files import read_lines
from palestra.core.types import Answer, Episode, Node
from palestra.envs import check_env
from palestra.evaluation.collect import EpisodeFilter
from palestra.text.algorithms.sft import SFT
from palestra.text.rollouts.metrics import episode_metrics, instance_outcomes
from palestra.text.rollouts.sample_metrics import sample_metrics

ENV = {"type": "helpers.toy_teams:Quarrel"}
FAST = {"type": "lora", "base": "tiny", "sampling": {"max_tokens": 2}}


def episode(success: Any, policies: tuple[str, str] = ("red@3", "blue@1"), seed: int = 0) -> Episode:
    """An episode in which pro and con answered at once."""
    seats = dict(zip(("pro", "con"), policies, strict=True))
    ids = np.ones(2, np.int32)
    answers = {seat: Answer("so", name, ids, ids, np.zeros(2, np.float32)) for seat, name in seats.items()}
    node = Node(0, None, 0, dict.fromkeys(seats, "speak"), answers, done=True, info={"success": success})
    return Episode("quarrel", seed, seats, [node])


def rates(metrics: Any) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith("success")}


WON, DRAWN, LOST = ({"pro": pro, "con": con} for pro, con in ((True, False), (False, False), (False, True)))


def test_policies_have_their_own_success() -> None:
    played = [episode(WON), episode(WON), episode(DRAWN), episode(LOST)]
    assert rates(episode_metrics(played)) == {"success.red": 0.5, "success.blue": 0.25}
    swapped = [episode(WON), episode(WON, ("blue", "red"))]
    assert rates(episode_metrics(swapped)) == {"success.red": 0.5, "success.blue": 0.5}


def test_one_policy_at_all_seats_has_the_success_of_each_seat() -> None:
    played = [episode(success, ("red", "red")) for success in (WON, WON, DRAWN, LOST)]
    assert rates(episode_metrics(played)) == {"success.pro": 0.5, "success.con": 0.25}


def test_success_that_no_seat_reports_is_absent_and_one_of_all_stays() -> None:
    assert rates(episode_metrics([episode({"pro": 0.25, "con": None})])) == {"success.red": 0.25}
    assert rates(episode_metrics([episode(None)])) == {}
    assert rates(episode_metrics([episode(True), episode(False)])) == {"success": 0.5}


def test_samples_of_opponents_have_no_pass_at_k() -> None:
    played = [episode(WON), episode(DRAWN), episode(LOST, seed=1), episode(LOST, seed=1)]
    assert sample_metrics(played, 2) == {"episodes": 2.0, "samples": 2.0}
    assert instance_outcomes(played) == {}


def test_the_answers_of_the_seat_that_succeeded_are_imitated() -> None:
    played = [episode(WON), episode(DRAWN), episode(LOST)]
    found = {name: len(SFT(imitate="success").build_samples(played, name, {})[0]) for name in ("red", "blue")}
    assert found == {"red": 1, "blue": 1}
    assert [EpisodeFilter(successes=True).passes(each) for each in played] == [True, False, True]


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ("unknown seat", "reports the success of seat 'judge', and its seats are pro, con"),
        ("text", r"reports the success 'yes' \(str\) in its info: give True, False or a number from 0 to 1, or such"),
    ],
)
def test_success_of_unknown_seats_and_of_other_kinds_is_refused(odd: str, message: str) -> None:
    with pytest.raises(Exception, match=message):
        check_env(lambda: Quarrel(odd), seeds=[0])


def test_a_run_and_its_files_show_success_by_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of six instances each side wins two."""
    run = pl.train(
        env=ENV,
        policies={"red": FAST, "blue": FAST},
        seats={"pro": "red", "con": "blue"},
        algorithm={"type": "sft", "imitate": "success"},
        steps=1,
        episodes=6,
        evals={"test": {"episodes": 6}},
        root=tmp_path,
        name="quarrel",
    )
    third = pytest.approx(1 / 3)
    assert "success (red) 33.3%, success (blue) 33.3%" in capsys.readouterr().out
    for line in read_lines(run.path / "evals.jsonl"):
        assert rates(line) == {"success.red": third, "success.blue": third}
    team = [line for line in read_lines(run.path / "metrics.jsonl") if line["policy"] == "team"]
    assert [rates(line).keys() for line in team] == [{"success.red", "success.blue"}]
    printed = palestra("eval", run.path, "--episodes", "6", "--seats", "con=base", "--record", "against")
    assert "success (red)" in printed and "success (base)" in printed and "33.3% [" in printed
    assert rates(read_lines(run.path / "evals.jsonl")[-1]) == {"success.red": third, "success.base": third}
    palestra("report", run.path, "--out", tmp_path / "report.html")
    assert "success of 6 (red)" in (tmp_path / "report.html").read_text()
    crossed = palestra("eval", run.path, "--episodes", "3", "--cross", "--member", "red", "--member", "base")
    assert "red 33.3% base" in crossed and "pro 33.3% con" in crossed


def test_one_success_of_all_is_evaluated_as_before(tmp_path: Path) -> None:
    path = tmp_path / "quarrel.yaml"
    path.write_text(f"env: {{type: '{ENV['type']}', odd: one}}\npolicies: {{red: {{type: random}}}}\n")
    printed = palestra("eval", path, "--episodes", "6", "--json")
    assert '"success": 0.333' in printed and "success." not in printed


def test_samples_that_are_drawn_by_success_need_one_of_all(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(
        f"env: {{type: '{ENV['type']}'}}\nsteps: 1\nepisodes: 2\nname: pool\n"
        "policies: {red: {type: lora, base: tiny, sampling: {max_tokens: 2}}}\n"
        "algorithm: {type: grpo, group_size: 2, branch_at: root}\n"
        "instance_pool: {size: 4, sampling: learnability}\n"
    )
    message = refused("train", path, "--root", tmp_path)
    assert 'needs the success of episodes, and env "train" reports none of all seats' in message
