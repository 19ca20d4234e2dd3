"""`palestra league` on a run of `palestra train`: a small league of rock, paper, scissors."""

import os
import re
import shutil
from pathlib import Path

import pytest
from helpers.command_line import invoke
from helpers.terminal_text import plain

from palestra.evaluation.report.population_data import read_record
from palestra.runs import read_lines

CONFIG = Path("configs/populations/rps_league.yaml")
SMALL = ["slices=2", "min_slices=1", "max_slices=1", "env_steps=1024", "league_exploiters=0", "games_per_cell=0"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two learners of two slices each, all frozen; their members have not played each other."""
    root = tmp_path_factory.mktemp("league")
    settings = [part for setting in SMALL for part in ("--set", f"population.{setting}")]
    done = invoke("train", CONFIG, "--root", root, "--backend", "inline", *settings)
    assert done.exit_code == 0, done.output
    return root / "rps_league"


def test_missing_games_are_played_once_and_stored(run, tmp_path):
    before = invoke("league", "standings", run)
    assert before.exit_code == 2 and "league crossplay" in plain(before.output)
    assert invoke("league", "crossplay", run).output.count("-") > 10  # no pair has played
    played = invoke("league", "crossplay", run, "--games", 60, "--backend", "inline", "--csv", tmp_path / "all.csv")
    assert played.exit_code == 0 and "15 pairs lacked games, and have 60 now" in plain(played.output), played.output
    assert len(read_lines(run / "crossplay.jsonl")) == 15
    assert (read_record(run).payoffs.games() == 60).all()
    assert len((tmp_path / "all.csv").read_text().splitlines()) == 16
    again = invoke("league", "crossplay", run, "--games", 60, "--backend", "inline")
    assert "every pair has 60 games" in plain(again.output) and len(read_lines(run / "crossplay.jsonl")) == 15
    more = invoke("league", "crossplay", run, "--games", 100, "--backend", "inline")
    assert "15 pairs" in plain(more.output) and (read_record(run).payoffs.games() == 100).all()
    table = invoke("league", "standings", run, "--csv", tmp_path / "standings.csv")
    assert table.exit_code == 0 and "uniform" in table.output and "main_0-2" in table.output
    assert len((tmp_path / "standings.csv").read_text().splitlines()) == 6


def test_population_of_three_seats_without_games_plays_cells_of_three(tmp_path):
    """Training played no games, so that only the config has the number of seats: three members make ten cells."""
    file = tmp_path / "three.yaml"
    file.write_text(
        "name: three\nenv: {type: kuhn_poker, players: 3}\nsymmetric: true\noracle: {type: exact}\n"
        "population: {type: self_play, slices: 2, matchmaker: {type: history}}\nbackend: {type: inline}\n"
    )
    assert invoke("train", file, "--root", tmp_path).exit_code == 0
    done = invoke("league", "crossplay", tmp_path / "three", "--games", 1)
    assert done.exit_code == 2 and "use --csv" in plain(done.output)
    assert invoke("league", "crossplay", tmp_path / "three", "--csv", tmp_path / "cells.csv").exit_code == 0
    assert len((tmp_path / "cells.csv").read_text().splitlines()) == 11
    table = read_record(tmp_path / "three").payoffs
    assert table.seats == ("agent",) * 3 and len(table.stored) == 10
    assert all(cell.exact and sum(cell.mean) == pytest.approx(0) for cell in table.stored.values())


def test_a_member_that_is_not_as_it_was_trained_plays_nowhere(run, tmp_path):
    """A member's folder that is gone, cut, or holds another member's weights."""
    newest = "main_0-2"
    other = "main_0-1"
    for change in ("gone", "cut", "another"):
        copied = tmp_path / change
        shutil.copytree(run, copied)
        weights = copied / "members" / newest / "policy.safetensors"
        if change == "gone":
            shutil.rmtree(weights.parent)
        elif change == "cut":
            os.truncate(weights, 100)
        else:
            shutil.copyfile(copied / "members" / other / "policy.safetensors", weights)
        commands = [
            ["league", "crossplay", copied, "--games", 1000, "--backend", "inline"],
            ["league", "exploit", copied, "--steps", 256, "--games", 5, "--backend", "inline"],
            ["publish", copied, "--member", newest, "--out", tmp_path / f"{change}-out"],
        ]
        for command in commands:
            done = invoke(*command)
            printed = plain(done.output)
            assert done.exit_code in (1, 2) and newest in printed, (command, printed)
            assert "bring" in printed and len(printed.strip().splitlines()) == 1, (command, printed)


def test_population_plot_is_written(run):
    done = invoke("league", "plot", run)
    assert done.exit_code == 0 and (run / "population.png").read_bytes().startswith(b"\x89PNG")


def test_run_without_population_is_refused(tmp_path):
    for command in (["standings"], ["crossplay"], ["plot"], ["crossplay", "--games", 5]):
        done = invoke("league", *command, tmp_path)
        assert done.exit_code == 2 and "no finished task of a population" in plain(done.output)


@pytest.mark.slow
def test_exploit_gives_a_lower_bound_on_nash_conv(tmp_path):
    """Against uniform play (one iteration of PSRO): the bound is at most NashConv, and close to it."""
    settings = ["population.iterations=1", "population.env_steps=512", "oracle.payoffs=exact"]
    asked = [part for setting in settings for part in ("--set", setting)]
    done = invoke("train", CONFIG.with_name("kuhn_psro.yaml"), "--root", tmp_path, "--backend", "inline", *asked)
    run = tmp_path / "kuhn_psro"
    assert done.exit_code == 0 and "population.png" in done.output, done.output
    exact = [line["nash_conv"] for line in read_lines(run / "metrics.jsonl") if "nash_conv" in line][-1]
    done = invoke("league", "exploit", run, "--steps", 60_000, "--backend", "inline")
    assert done.exit_code == 0, done.output
    (least,) = re.findall(r"NashConv is at least ([\d.]+)", plain(done.output))
    assert 0.7 * exact < float(least) <= exact + 1e-3
    lines = read_lines(run / "exploits.jsonl")
    assert [line["player"] for line in lines] == ["player_0", "player_1"] and lines[0]["env_steps"] == 60_000
    assert (run / "exploits/exploit-player_0-0/policy.safetensors").exists()


def test_exploit_of_a_league_plays_games(run):
    """A best response to the newest member: the mixture's return is that member's against itself, 0."""
    done = invoke("league", "exploit", run, "--steps", 2048, "--games", 50, "--backend", "inline")
    assert done.exit_code == 0, done.output
    (line,) = read_lines(run / "exploits.jsonl")
    assert line["mixture_return"] == 0 and line["stderr"] > 0 and line["gain"] == line["response_return"]
    least = float(re.findall(r"NashConv is at least ([\d.]+)", plain(done.output))[0])
    assert least == pytest.approx(2 * max(0, line["gain"] - 1.6449 * line["stderr"]), abs=1e-3)
