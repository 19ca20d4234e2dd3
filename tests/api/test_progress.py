"""The progress bar shows the held-out evaluation first, and labels the metrics of training."""

import io
import time
from typing import ClassVar

import palestra as pl
from palestra.api import console
from palestra.api.console import PlainConsole
from palestra.api.progress import CountingBar, ProgressBar


def progress_text(config, team, evaluation, width=160):
    """The text of the bar after an evaluation and a step, and the lines above it."""
    text = io.StringIO()
    with ProgressBar(20, 0, config, PlainConsole(file=text, width=width, force_terminal=False)) as bar:
        bar.on_eval(-1, "test", evaluation)
        bar.on_step(9, {"team": team})
        bar.on_eval(9, "test", evaluation)
    return text.getvalue().splitlines()


def test_bar_of_a_notebook_fits_the_cell_and_keeps_its_numbers():
    assert PlainConsole(force_jupyter=True).width == 80
    config = {"algorithm": {"branch_at": "turn", "continue_from": "best", "group_size": 8}}
    evaluation = {"success": 0.53, "episodes": 300.0}
    lines = progress_text(config, {"success": 0.9}, evaluation, width=80)
    assert max(map(len, lines)) <= 80 and "10/20" in lines[-2] and "0:00:00" in lines[-2] and "test 53.0%" in lines[-2]
    assert "90%" in lines[-1]


def test_held_out_success_precedes_search_success():
    config = {"algorithm": {"branch_at": "turn", "continue_from": "best", "group_size": 8}}
    evaluation = {"success": 0.53, "episodes": 300.0, "steps_per_episode": 5.0}
    *above, bar = progress_text(config, {"success": 0.95}, evaluation)
    assert above[0] == "test before training: success 53.0% of 300 episodes, mean length 5.0"
    assert "test after 10 training steps:" in above[1]
    assert bar.index("test 53.0%") < bar.index("search success (best of 8) 95%")


def test_bar_shows_what_a_step_is_at(base, tmp_path):
    """Playing, training and evaluating, counted by episode; none of it is in a log file."""
    run = {
        "env": "helpers.toys:Whisper",
        "policies": {"default": pl.Lora(str(base), sampling={"max_tokens": 2})},
        "algorithm": pl.GRPO(group_size=2),
        "evals": {"dev": {"episodes": 2, "samples": 2}},
        "episodes": 3,
        "steps": 1,
        "root": tmp_path,
    }
    text = io.StringIO()

    class Follow(pl.Callback):
        seen: ClassVar[list[str]] = []

        def on_progress(self, what, done, total):
            bar.on_progress(what, done, total)
            self.seen.append(bar.bar.tasks[0].fields["now"])

    with ProgressBar(1, 0, {}, PlainConsole(file=text, width=160, force_terminal=False)) as bar:
        pl.train(**run, callbacks=[Follow()])
        bar.on_step(0, {"team": {}})
    dev = ["evaluating dev", *(f"evaluating dev {done}/4" for done in range(5))]
    assert Follow.seen == [*dev, *(f"playing {done}/3" for done in range(4)), "training", *dev]
    assert not any(word in text.getvalue() for word in ("playing", "evaluating"))


def test_returns_of_a_stage_that_is_over_are_not_shown():
    """The first stage counts returns by seat, the second one for the policy at both seats."""
    text = io.StringIO()
    with ProgressBar(3, 0, {}, PlainConsole(file=text, width=160, force_terminal=False)) as bar:
        bar.on_step(0, {"team": {"returns": {"player_0": 0.5, "player_1": -0.5}}})
        bar.on_step(1, {"team": {"return": 0.25}})
        bar.on_step(2, {"team": {}})  # no episode ended
    assert "return 0.25" in text.getvalue() and "player_0" not in text.getvalue()


def test_returns_are_labelled_greedy_or_sampled():
    config = {"env_steps": 1000, "evals": {"test": {"greedy": True}}}
    evaluation = {"return": -12.4, "returns": {"a": -12.4}, "episodes": 50.0, "steps_per_episode": 25.0}
    *above, bar = progress_text(config, {"return": -26.6}, evaluation)
    assert above[0].startswith("test (greedy) before training: return -12.40")
    assert "test (greedy) -12.40" in bar and "training return (sampled actions) -26.60" in bar


def test_a_line_breaks_the_silence_where_no_bar_moves(monkeypatch):
    monkeypatch.setattr(console, "SILENCE_S", 0.2)
    file = io.StringIO()
    log = PlainConsole(file=file, force_terminal=False)
    with log.busy(lambda: "starting"), ProgressBar(20, 3, {}, log) as bar:
        bar.on_progress("playing", 2, 8)
        time.sleep(1.3)
        bar.on_progress("evaluating dev", 0, 0)
        time.sleep(1.3)
    lines = file.getvalue().splitlines()
    assert "training 3/20, playing 2/8, 0:00:01" in lines and not any("starting" in line for line in lines)
    assert any(line.startswith("training 3/20, evaluating dev, 0:00:0") for line in lines)
    screen = io.StringIO()
    with CountingBar("evaluating demo", PlainConsole(file=screen, force_terminal=True, width=99)) as counting:
        counting.count(3, 8)
        time.sleep(1.3)
    assert "3/8" in screen.getvalue() and "evaluating demo 3/8," not in screen.getvalue()  # the bar has it
