"""The command line as a user sees it: help with examples, errors with their fix, and the files that each command
writes."""

import inspect
import json
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import typer
import yaml
from helpers.command_line import invoke
from helpers.terminal_text import plain

from palestra.cli.main import app
from palestra.core.config import parse, validate
from palestra.runs import Run, list_checkpoints, load_episodes, read_lines

SCRIPT = Path(sys.executable).parent / "palestra"
PNG = b"\x89PNG\r\n\x1a\n"


def write_config(folder, base, **changes):
    """A config of three short steps."""
    speech = {"type": "lora", "base": str(base), "sampling": {"max_tokens": 2}}
    tree = {
        "name": "short",
        "steps": 3,
        "episodes": 4,
        "env": {"type": "helpers.toys:Whisper"},
        "policies": {"guide": speech, "walker": speech},
        "algorithm": {"type": "grpo", "group_size": 3},
        "evals": {"dev": {"episodes": 5}},
    }
    path = folder / "short.yaml"
    path.write_text(yaml.safe_dump(tree | changes))
    return path


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    """A trained run of three steps, and what training printed."""
    root = tmp_path_factory.mktemp("cli")
    done = invoke("train", write_config(root, base), "--root", root / "runs")
    assert done.exit_code == 0, done.output
    return root / "runs" / "short", done.output


# ---- help


@pytest.mark.parametrize("command", ["train", "eval"])
def test_help_shows_examples(command):
    text = plain(invoke(command, "--help").output)
    assert f"palestra {command} configs/demo.yaml" in text or f"palestra {command} runs/demo" in text
    assert "Examples" in text


def test_help_lists_the_commands():
    text = plain(invoke("--help").output)
    for command in ("train", "eval", "runs", "info"):
        assert f" {command} " in text
    assert invoke("--help").exit_code == 0 and invoke().exit_code == 2


def test_short_help_version_and_groups():
    assert invoke("-h").output == invoke("--help").output and invoke("train", "-h").exit_code == 0
    done = invoke("--version")
    assert done.exit_code == 0 and done.output.startswith("palestra 0.")
    text = plain(invoke("-h").output)
    assert text.index("Train ") < text.index(" demo ") < text.index("Results") < text.index(" runs ")
    assert "--install-completion" in text


def test_help_does_not_wait_for_torch():
    code = "import sys, palestra.cli.main; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ---- errors: exit code 2 and one message, never a traceback


def refused(*arguments):
    done = invoke(*arguments)
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output and "error:" in done.stderr and done.stdout[:8] in ("", "loading ")
    return plain(done.stderr)


def test_all_config_errors_are_reported_at_once(base, tmp_path):
    message = refused("train", write_config(tmp_path, base), "--set", "stepz=3", "--set", "episodes=0")
    assert "2 faults in the config" in message and "stepz" in message and "episodes" in message


def test_brackets_in_a_message_are_not_markup(base, tmp_path):
    config = write_config(tmp_path, base)
    message = refused("train", config, "--set", "policies.guide.base=/models/[/red][bold]x")
    assert "/models/[/red][bold]x" in message
    assert "'gate_proj'" in refused("train", config, "--set", "policies.guide.target_modules=gate")


def test_examples_of_all_commands_have_a_line_each():
    """The text after the first paragraph loses a common indentation, by which examples are known."""

    def commands(group, name=""):
        for own, command in group.commands.items():
            if hasattr(command, "commands"):
                yield from commands(command, f"{name}{own} ")
            else:
                yield f"{name}{own}", command

    for name, command in commands(typer.main.get_command(app)):
        _, _, rest = (command.help or "").partition("\n\n")
        assert inspect.cleandoc(rest).count("\n    palestra") == rest.count("\n    palestra"), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "n" * 300], "File name too long"),
        (["train", "--resume", "nowhere", "--set", "steps=3"], "nowhere is not a run: it has no config.yaml"),
        (
            ["train", "--resume", "RUN", "--set", "seed=3"],
            "seed=3: a resumed run keeps its config, only --set",
        ),
        (
            ["train", "--resume", "RUN", "--set", "policies.x.lr=1"],
            "policies.walker.lr=... may change. Start",
        ),
        (["train", "--resume", "RUN", "--set", "policies.walker.lr=fast"], "policies.walker"),
        (["train", "--resume", "RUN", "--engine", "http://a"], "engine=http://a: a resumed run keeps its config"),
        (
            ["train", "--resume", "RUN", "--set", "steps=2"],
            "steps=2: the run has steps=3, and can have any",
        ),
        (["train", "--resume", "RUN", "--steps", "2"], "steps=2: the run has steps=3, and can have any"),
        (["train", "--resume", "RUN", "--set", "steps=many"], "steps=many: the run has steps=3, and can"),
        (["eval", "RUN", "--checkpoint", "2"], "no checkpoint after 2 steps; it has: 3"),
        (["eval", "RUN", "--checkpoint", "0"], "no checkpoint after 0 steps; it has: 3"),
        (["eval", "RUN", "--samples", "4", "--temperature", "0"], "--temperature 0 gives the same each time"),
        (["eval", "RUN", "--env", "split"], "write key=value"),
        (["eval", "RUN", "--env", "splt=test"], 'has no option "splt": did you mean split'),
        (["eval", "RUN", "--seats", "guide=nobody"], 'no policy "nobody"'),
        (["eval", "RUN", "--seats", "gide=walker"], 'no seat "gide"'),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_errors_name_the_fix(base, run, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    names = {"CONFIG": write_config(tmp_path, base), "RUN": run[0]}
    assert message in refused(*(names.get(a, a) for a in arguments))


@pytest.mark.parametrize(
    ("config", "key"), [("configs/demo.yaml", "steps"), ("configs/games/spread_mappo.yaml", "env_steps")]
)
def test_steps_is_the_length_of_a_run(config, key):
    """Also after another setting of it, of language agents and of networks; PSRO counts iterations."""
    dry = invoke("train", config, "--set", f"{key}=5", "--steps", "7", "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert parse(dry.stdout)[key] == 7
    dry = invoke("train", "configs/populations/kuhn_psro.yaml", "--steps", "7", "--dry-run")
    assert parse(dry.stdout)["population"]["iterations"] == 7
    words = "--steps does not fit this run: its stages, or its population"
    assert words in refused("train", "configs/populations/rps_league.yaml", "--steps", "7")
    assert invoke("train", config, "--steps", "0").exit_code == 2


def test_help_is_a_command_too():
    assert plain(invoke("help").output) == plain(invoke("--help").output)
    assert plain(invoke("help", "train").output) == plain(invoke("train", "--help").output)


def test_locked_run_is_not_touched(run):
    with Run.open(run[0]):
        assert "is writing the run" in refused("train", "--resume", run[0])


# ---- train


def test_dry_run_prints_the_resolved_config_and_leaves_nothing(base, tmp_path):
    system = "You guide a walker. [bold]Whisper[/bold] the secret: " + "be brief; " * 30 + "é"
    config = write_config(tmp_path, base)
    set_system = f"policies.guide.system={json.dumps(system, ensure_ascii=False)}"
    done = invoke("train", config, "--dry-run", "--root", tmp_path / "runs", "--set", "steps=7", "--set", set_system)
    assert done.exit_code == 0 and not (tmp_path / "runs").exists()
    from palestra.text.config import TextConfig

    resolved = validate(TextConfig, parse(done.stdout))
    assert resolved.steps == 7 and resolved.policies["guide"].system == system
    assert resolved.policies["walker"].rank == 8  # defaults are written out
    assert "rank: 8" in done.stdout


def test_dry_run_reports_the_errors_of_training(base, tmp_path):
    config = write_config(tmp_path, base)
    assert "has no option" in refused("train", config, "--dry-run", "--set", "env.turnz=3")
    assert "no model at" in refused("train", config, "--dry-run", "--set", "policies.guide.base=/nowhere")


def test_training_writes_plot_table_and_logs(run):
    path, output = run
    text = plain(output)
    assert "what was learned" in text and "dev: success of 5" in text and "before training: success" in text
    assert "helpers.toys:Whisper, guide, walker by grpo" in text
    assert f"curves: {path / 'curves.png'}" in output  # on one line, whatever the length
    assert (path / "curves.png").read_bytes().startswith(PNG)
    assert [line["step"] for line in read_lines(path / "evals.jsonl")] == [-1, 2]
    assert {line["policy"] for line in read_lines(path / "metrics.jsonl")} == {"guide", "walker", "team"}
    timed = [(line["step"], line["policy"]) for line in read_lines(path / "timings.jsonl")]
    assert timed == [(step, who) for step in range(3) for who in ("guide", "walker", "team")]
    assert list_checkpoints(path)[-1].step == 2
    meta = json.loads((path / "meta.json").read_text())
    assert meta["seed"] == 0 and meta["palestra"]


def test_each_learner_has_its_own_training_time(run):
    """Learners in this process train one after the other: their times add up to the step's."""
    lines = read_lines(run[0] / "timings.jsonl")
    for step in range(3):
        train_s = {line["policy"]: line["train_s"] for line in lines if line["step"] == step}
        assert 0 < train_s["guide"] + train_s["walker"] <= train_s["team"]


def test_command_line_settings_are_in_the_stored_config(base, tmp_path):
    config = write_config(tmp_path, base, evals={})
    for name in ("mine", "mine-2"):  # an existing name is not overwritten
        settings = ("--set", "steps=1", "--set", "seed=5", "--name", "mine", "--root", tmp_path)
        assert invoke("train", config, *settings).exit_code == 0
        tree = parse((tmp_path / name / "config.yaml").read_text())
        assert tree["steps"] == 1 and tree["seed"] == 5 and tree["name"] == "short"


def test_resume_of_a_finished_run_prints_its_summary(run):
    before = (run[0] / "metrics.jsonl").read_bytes()
    done = invoke("train", "--resume", run[0])
    assert (
        done.exit_code == 0
        and "what was learned" in plain(done.output)
        and "already complete; --set steps=N extends it" in plain(done.output)
    )
    assert (run[0] / "metrics.jsonl").read_bytes() == before


def test_auto_resume_continues_the_run_of_that_name(run):
    """A restarted job has the same command; with another config it is another run."""
    config, root = run[0].parents[1] / "short.yaml", run[0].parent
    again = ("train", config, "--root", root, "--auto-resume")
    done = invoke(*again)
    assert done.exit_code == 0 and "already complete" in plain(done.output)
    assert [path.name for path in root.iterdir()] == ["short"]
    message = refused(*again, "--set", "seed=3")
    assert f"the run {root / 'short'} has another config (seed: 0 -> 3): give the new one another --name" in message


def test_auto_resume_restores_the_run_from_its_mirror(run, tmp_path):
    """The job restarts on a machine without the first one's disk."""
    config, store, root = run[0].parents[1] / "short.yaml", f"file://{tmp_path}/store", tmp_path / "other"
    assert invoke("sync", run[0], "--to", store).exit_code == 0
    done = invoke("train", config, "--root", root, "--auto-resume", "--mirror", store)
    assert done.exit_code == 0 and "already complete" in plain(done.output), done.output
    for name in ("metrics.jsonl", "evals.jsonl"):
        assert (root / "short" / name).read_bytes() == (run[0] / name).read_bytes()


def test_episode_failure_is_printed_and_training_continues(base, tmp_path, monkeypatch):
    (tmp_path / "shaky_cli.py").write_text(
        "from helpers.toys import Whisper\n\n\n"
        "class Shaky(Whisper):\n"
        "    def step(self, actions):\n"
        "        if self.rng.random() < 0.2:\n"
        '            raise RuntimeError("lost [/INST] [bold]token")\n'
        "        return super().step(actions)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = write_config(tmp_path, base, env={"type": "shaky_cli:Shaky"}, max_failed=1.0)
    done = invoke("train", config, "--root", tmp_path / "runs")
    assert done.exit_code == 0, done.output
    assert "RuntimeError: lost [/INST] [bold]token" in plain(done.output)


@pytest.mark.slow
def test_installed_command_finds_an_env_beside_the_config(base, tmp_path):
    """A real process, in the user's folder, with the user's own env."""
    shutil.copy(Path(__file__).parents[1] / "helpers/toys.py", tmp_path / "my_envs.py")
    write_config(tmp_path, base, env={"type": "my_envs:Whisper"}, steps=1, evals={})
    done = subprocess.run([SCRIPT, "train", "short.yaml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs" / "short" / "curves.png").exists()


# ---- the other commands


def test_runs_command_lists_runs(run):
    text = plain(invoke("runs", "--root", run[0].parent).output)
    for word in ("short", "done", "Whisper", "grpo", "3/3", "dev", "held-out"):
        assert word in text
    assert "no runs in" in invoke("runs", "--root", run[0] / "nothing").output


def test_runs_shows_alarms_and_the_headline_of_each_run(tmp_path):
    config = "name: flat\nsteps: 12\nenv: {type: guess}\nalgorithm: {type: grpo}\n"
    with Run.create(tmp_path, config, "flat") as opened:
        for step in range(12):
            opened.log_metrics(step, "team", {"success": 0.0, "failed": 9.0, "episodes": 10.0})
        opened.log_eval(11, "dev", {"success": 0.75, "episodes": 4.0})
        opened.log_eval(11, "test", {"success": 0.53, "episodes": 300.0})
    text = plain(invoke("runs", "--root", tmp_path).output)
    assert "53.0%" in text and "75.0%" not in text and "12/12" in text and "fail" in text


def test_info_names_versions_envs_and_bases():
    done = invoke("info")
    text = plain(done.output)
    assert done.exit_code == 0
    names = ("sokoban", "plan_path", "simple_spread", "grpo", "sft", "qmix", "tiny", "smollm2", "endpoint", "psro")
    for word in ("palestra", "torch", "sandbox", *names):
        assert word in text


def test_info_of_a_base_plans_the_memory_of_a_run(tmp_path, base):
    config = write_config(tmp_path, base)
    text = plain(invoke("info", "--config", config, "--prompt-tokens", 64).output)
    assert "KV cache" in text and "optimizer guide" in text and "adapter walker" in text and "peak" in text
    assert "weights of tiny" in plain(invoke("info", "--base", "tiny").output)
    huge = invoke("info", "--base", "tiny", "--set", "policies.default.micro_batch_tokens=1000000000")
    assert "--set policies.default.gradient_checkpointing=true" in plain(huge.output).replace("\n", " ")
    there = plain(invoke("info", "--base", "tiny", "--gpu-gib", 22).output)
    assert "22.0 GiB are free" in there and "of 2 bytes" in there and "packed weights" not in there
    lost = invoke("info", "--base", "./no-such-folder")
    assert lost.exit_code == 2 and "no model at" in plain(lost.output)


def test_eval_prints_a_table(run):
    done = invoke("eval", run[0], "--episodes", "5")
    text = plain(done.output)
    assert done.exit_code == 0 and "success" in text and "guide@" in text and "5 episodes" in text


def test_eval_as_json_with_seats_swapped(run):
    done = invoke("eval", run[0], "--episodes", "6", "--swap", "--temperature", "0", "--json", "--env", "turns=2")
    figures = json.loads(done.stdout)
    assert figures["episodes"] == 6 and figures["failed"] == 0 and 0 <= figures["success"] <= 1
    assert figures["steps_per_episode"] == 4
    assert figures["seats"]["guide"].startswith("walker@") and figures["seats"]["walker"].startswith("guide@")


def test_eval_can_record_its_result_in_the_run(run, tmp_path):
    path = shutil.copytree(run[0], tmp_path / "copy")
    before = read_lines(path / "evals.jsonl")
    done = invoke("eval", path, "--swap", "--episodes", 4, "--record", "swapped")
    assert done.exit_code == 0, done.output
    *others, line = read_lines(path / "evals.jsonl")
    assert others == before and line["name"] == "swapped" and line["step"] == 2 and line["episodes"] == 4
    assert line["seats"]["guide"].startswith("walker@") and line["seats"]["walker"].startswith("guide@")
    recorded = load_episodes(path / "eval_episodes/swapped/step-000002.parquet")
    assert "".join("1" if episode.success else "0" for episode in recorded) == line["outcomes"]
    own = before[0]["name"]
    assert "evaluates itself under this name" in refused("eval", path, "--episodes", 1, "--record", own)


def test_eval_is_deterministic_and_read_only(run):
    before = {file: file.read_bytes() for file in run[0].rglob("*") if file.is_file()}
    first, second = (invoke("eval", run[0], "--episodes", "9", "--json").stdout for _ in range(2))
    assert first == second
    assert {file: file.read_bytes() for file in run[0].rglob("*") if file.is_file()} == before


def test_eval_accepts_a_config(base, tmp_path):
    done = invoke("eval", write_config(tmp_path, base), "--episodes", "3", "--json")
    assert json.loads(done.stdout)["seats"] == {"guide": "guide", "walker": "walker"}


def test_eval_of_one_member_plays_every_seat(run):
    done = invoke("eval", f"{run[0]}:guide", "--episodes", "3", "--json")
    assert all(policy.startswith("guide@") for policy in json.loads(done.stdout)["seats"].values())


def test_ctrl_c_while_the_command_line_is_imported_ends_without_a_traceback() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "palestra", "--help"]
    seen = []
    as_in_a_terminal = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # background jobs of a shell ignore it
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, preexec_fn=as_in_a_terminal
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            seen.append(line)
            if line.split("|")[-1].strip() == "pydantic":  # half of the time is still to come
                process.send_signal(signal.SIGINT)
    assert process.returncode == -signal.SIGINT
    assert "Traceback" not in "".join(seen)
