"""The Python API, with short runs of every kind."""

import asyncio
import shutil
import signal
import subprocess
import sys
import threading
from typing import get_args

import pytest
from helpers.command_line import palestra as command
from helpers.command_line import refused

import palestra as pl
from palestra.api.train import config_tree, plain_data
from palestra.core.files import read_lines
from palestra.envs import local, make_env
from palestra.envs.text.grid.plan_path import PlanPath
from palestra.populations.build import build as population
from palestra.populations.build import language as language_population
from palestra.populations.plans import matchmaking, solvers
from palestra.text import config as text_config
from palestra.text import policy_configs as text_policies
from palestra.vector import config as vector_config

ROWS = [{"prompt": f"Say a word with {letter}", "letter": letter} for letter in "abcdefghijkl"]


def is_plain(row, answer):
    return bool(row["letter"]) and answer.isascii()


def speech(base, **settings):
    return {"default": pl.Lora(str(base), lr=1e-2, sampling={"max_tokens": 2}, **settings)}


class RecordingCallback(pl.Callback):
    """Records every event; stops after some steps."""

    def __init__(self, steps=1000):
        self.left, self.steps, self.evals, self.episodes = steps, [], [], 0

    def on_step(self, step, metrics):
        self.steps.append((step, sorted(metrics)))
        if len(self.steps) == self.left:
            self.stop()

    def on_episode(self, episode):
        self.episodes += 1

    def on_eval(self, step, name, metrics):
        self.evals.append((step, name))


def whisper(base, root, **changes):
    parts = {
        "env": "helpers.toys:Whisper",
        "policies": speech(base, rank=4),
        "algorithm": pl.GRPO(group_size=2),
        "evals": {"dev": {"episodes": 2}},
        "steps": 2,
        "episodes": 2,
    }
    return pl.train(root=root, **parts | changes)


def test_text_run_from_python_objects(base, tmp_path):
    seen = RecordingCallback()
    run = whisper(base, tmp_path, callbacks=[seen], name="w", **{"policies.default.rank": 2})
    assert run.path == tmp_path / "w" and run.config["policies"]["default"]["rank"] == 2
    assert seen.steps == [(0, ["default", "team"]), (1, ["default", "team"])]
    assert seen.evals == [(-1, "dev"), (1, "dev")] and seen.episodes == 4
    assert len(run.metrics) == 4 and len(run.evals) == 2
    assert run.plot()._repr_png_().startswith(b"\x89PNG")
    result = run.evaluate(seats={"walker": "random"}, episodes=2)
    assert result.policy_names == {"guide": "default@2", "walker": "random"} and len(result.episodes) == 2


def test_config_file_trains_as_on_the_command_line(base, tmp_path):
    run = whisper(base, tmp_path, name="w", evals={})
    command("train", run.path / "config.yaml", "--root", tmp_path, "--name", "cli")
    assert (run.path / "metrics.jsonl").read_bytes() == (tmp_path / "cli" / "metrics.jsonl").read_bytes()


def test_envs_of_one_class_are_told_apart():
    """Two functions, and two classes of a notebook with the same name."""

    def of_size(size):
        return lambda: PlanPath(size=size)

    def mine(seat):
        class Mine(pl.Env):
            seats = (seat,)

        return Mine

    small, large = of_size(4), of_size(8)
    tree = config_tree(None, {"envs": {"small": small, "large": large, "again": small}}, None)
    made = {name: make_env(**env).reset(0).observations for name, env in tree["envs"].items()}
    assert made["small"] == made["again"] != made["large"] and made["small"] == PlanPath(size=4).reset(0).observations
    names = [local.env_config(mine(seat))["type"] for seat in "ab"]
    assert [local.find_local_env(name).seats for name in names] == [("a",), ("b",)]


def test_a_config_can_be_cleared_by_none():
    tree = {"env": "sokoban", "mirror": {"url": "s3://b/r"}, "policies": {"default": {"type": "lora", "system": "S"}}}
    changed = config_tree(tree, {"mirror": None, "policies.default.system": None}, None)
    assert changed["mirror"] is None and changed["policies"]["default"]["system"] is None


def test_callback_stops_a_run_that_can_be_resumed(base, tmp_path):
    run = whisper(base, tmp_path, steps=5, callbacks=[RecordingCallback(steps=2)])
    assert len(run.metrics) == 4
    again = RecordingCallback()
    assert pl.train(resume=run, steps=4 + 2, callbacks=[again]).path == run.path
    assert [step for step, _ in again.steps] == [2, 3, 4, 5] and run.config["steps"] == 6
    with pytest.raises(ValueError, match="steps=6, and can have any number from 6 on"):
        pl.train(resume=run.path, steps=1)
    for changes in ({"seed": 1}, {"root": tmp_path}):
        with pytest.raises(ValueError, match="keeps its config"):
            pl.train(resume=run.path, **changes)


def test_a_resume_may_shorten_the_run_and_change_learning_rates(base, tmp_path):
    """The schedule is that of the new config from the next step on, as if it had been so from the start."""
    policies = speech(base, lr_schedule="linear", rank=4)
    algorithm = pl.GRPO(group_size=2, kl_coef=0.1)
    run = whisper(base, tmp_path, steps=8, policies=policies, algorithm=algorithm, callbacks=[RecordingCallback(3)])
    with pytest.raises(ValueError, match="steps=2: the run has steps=8, and can have any number from 3 on"):
        pl.train(resume=run, steps=2)
    again = pl.train(resume=run, steps=6, **{"policies.default.lr": 1e-3})
    lines = read_lines(again.path / "metrics.jsonl")
    rates = {line["step"]: line["lr"] for line in lines if "lr" in line}
    assert list(rates) == list(range(6)) and read_lines(again.path / "evals.jsonl")[-1]["step"] == 5
    first, later = {step: 1e-2 * (1 - step / 8) for step in range(3)}, {s: 1e-3 * (1 - s / 6) for s in range(3, 6)}
    assert rates == pytest.approx(first | later)
    pl.train(resume=run, steps=6)
    assert read_lines(again.path / "metrics.jsonl") == lines


def test_a_resume_names_files_that_changed(base, tmp_path, capsys, monkeypatch):
    """A base, and the module of an env, with other contents than when the run began."""
    own = shutil.copytree(base, tmp_path / "base")
    (tmp_path / "whispers.py").write_text("from helpers.toys import Whisper\n")
    monkeypatch.syspath_prepend(tmp_path)
    run = whisper(own, tmp_path / "runs", env="whispers:Whisper", steps=3, callbacks=[RecordingCallback(steps=1)])
    pl.train(resume=run, steps=2)
    assert "changed since" not in capsys.readouterr().out
    weights = own / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-100:] = bytes(100)
    weights.write_bytes(content)
    (tmp_path / "whispers.py").write_text("from helpers.toys import Whisper  # mended\n")
    pl.train(resume=run, steps=3)
    (note,) = [line for line in capsys.readouterr().out.splitlines() if "changed since the run began" in line]
    assert str(own) in note and "whispers:Whisper" in note


def test_a_resume_may_shorten_a_run_of_networks(tmp_path, capsys):
    """Down to the env steps of its newest checkpoint, with which it is complete."""
    net = {"all": pl.Net(hidden=[8], lr=1e-3)}
    env = {"type": "simple_spread", "num_envs": 4}
    parts = {"env": env, "policies": net, "algorithm": pl.vector.PPO(rollout_length=8, minibatches=1), "log_every": 32}
    run = pl.train(root=tmp_path, steps=320, callbacks=[RecordingCallback(3)], **parts)
    with pytest.raises(ValueError, match="env_steps=64: the run has env_steps=320, and can have any number from 96 on"):
        pl.train(resume=run, steps=64)
    with pytest.raises(ValueError, match=r"only --set env_steps=\.\.\., policies.all.lr=\.\.\., device=\.\.\. may"):
        pl.train(resume=run, **{"policies.all.hidden": [4]})
    again = pl.train(resume=run, steps=128, **{"policies.all.lr": 1e-4})
    assert (
        read_lines(again.path / "metrics.jsonl")[-1]["env_steps"] == 128
        and again.config["policies"]["all"]["lr"] == 1e-4
    )
    capsys.readouterr()
    assert pl.train(resume=run, steps=128).path == run.path and "already complete" in capsys.readouterr().out


def test_train_works_inside_a_running_event_loop(base, tmp_path):
    async def cell():
        run = whisper(base, tmp_path, steps=1)
        return run, run.evaluate(episodes=2)

    run, result = asyncio.run(cell())
    assert len(run.metrics) == 2 and len(result.episodes) == 2


class Interrupts(pl.Callback):
    """Sends SIGINT, the signal of Ctrl-C, to the main thread after the first step."""

    def on_step(self, step, metrics):
        if step == 0:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


@pytest.mark.parametrize("inside_loop", [False, True])
def test_interrupted_run_can_be_resumed(base, tmp_path, request, inside_loop):
    async def cell():  # as in a notebook, whose event loop does not change the signal handler
        return whisper(base, tmp_path, steps=1000, callbacks=[Interrupts()])

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    if inside_loop:
        loop = asyncio.new_event_loop()
        run = loop.run_until_complete(cell())
        loop.close()
    else:
        run = whisper(base, tmp_path, steps=1000, callbacks=[Interrupts()])
    done = len(run.metrics) // 2
    assert 1 <= done < 1000  # the main thread may take a moment to receive the signal
    seen = RecordingCallback(steps=1)
    pl.train(resume=run, callbacks=[seen])
    assert seen.steps[0][0] == done


def test_class_without_module_trains_in_process_only(base, tmp_path, monkeypatch):
    class Echo(pl.Env):
        seats = ("agent",)

        def __init__(self, word: str = "up") -> None:
            self.word = word

        def reset(self, seed):
            return pl.Step({"agent": self.word})

        def step(self, actions):
            return pl.Step({}, {"agent": float(actions["agent"].isascii())})

    def train_env(env, **changes):
        return pl.train(env=env, policies=speech(base), steps=1, episodes=2, root=tmp_path, **changes)

    run = train_env({"type": Echo, "word": "left"})
    assert run.config["env"] == {"type": "local:Echo", "word": "left"}
    assert len(run.evaluate(episodes=2).episodes) == 2
    assert train_env(lambda: Echo("down")).trees()[0].nodes[0].observations == {"agent": "down"}
    with pytest.raises(ValueError, match="move the class to a module"):
        train_env(Echo, backend={"type": "local", "workers": 1})
    with pytest.raises(ValueError, match='no option "sound"'):
        train_env({"type": Echo, "sound": 1})
    monkeypatch.setattr(local, "_local_envs", {})  # as in another process
    with pytest.raises(ValueError, match=r"cannot be resumed .* Move the class to a module"):
        pl.train(resume=run, steps=2)
    assert "Move the class to a module" in refused("train", "--resume", run.path)


def test_prompts_and_a_reward_function(base, tmp_path):
    run = pl.train(
        env=pl.Prompts(ROWS, reward=is_plain),
        policies=speech(base),
        evals={"dev": {"episodes": 2}},
        steps=1,
        episodes=2,
        root=tmp_path,
    )
    assert [line["episodes"] for line in read_lines(run.path / "evals.jsonl") if "success" in line] == [2, 2]
    assert run.evaluate(split="train", episodes=2).metrics["episodes"] == 2


def test_prompts_are_split_by_their_text():
    prompts = pl.Prompts(ROWS + ROWS[::-1], reward=is_plain)
    parts = {split: {row["prompt"] for row in prompts(split).rows} for split in ("train", "dev", "test")}
    assert [len(part) for part in parts.values()] == [10, 1, 1] and len(set().union(*parts.values())) == 12
    assert parts == {split: {row["prompt"] for row in pl.Prompts(ROWS[::-1], is_plain)(split).rows} for split in parts}
    for split in parts:
        pl.check_env(lambda split=split: prompts(split))
    with pytest.raises(ValueError, match="at least 3"):
        pl.Prompts(ROWS[:2], is_plain)("test")
    with pytest.raises(ValueError, match="row 0 has no prompt"):
        pl.Prompts([{"question": "hi"}], is_plain)


def test_vector_run_from_python_objects(tmp_path):
    seen = RecordingCallback(steps=3)
    run = pl.train(
        env={"type": "kuhn_poker", "num_envs": 4},
        policies={"default": pl.Net(hidden=[8])},
        algorithm=pl.vector.PPO(rollout_length=8, minibatches=1),
        steps=320,
        log_every=32,
        root=tmp_path,
        callbacks=[seen],
    )
    assert [step for step, _ in seen.steps] == [0, 1, 2] and seen.steps[0][1] == ["default", "team"]
    assert pl.train(resume=run).path == run.path and len(run.metrics) == 20
    assert run.evaluate(seats={"player_1": "random"}, episodes=8).metrics["episodes"] == 8
    with pytest.raises(ValueError, match=r"PPO is for language agents.*palestra\.vector"):
        pl.train(env="kuhn_poker", policies={"default": pl.Net()}, algorithm=pl.PPO(), root=tmp_path)


def test_population_run_from_python(tmp_path):
    seen = RecordingCallback()
    run = pl.train(
        "configs/populations/kuhn_psro_exact.yaml",
        steps=1,
        root=tmp_path,
        backend={"type": "inline"},
        callbacks=[seen],
    )
    assert len(seen.steps) == len(read_lines(run.path / "tasks.jsonl")) and run.population is not None
    assert run.plot().path.exists()
    with pytest.raises(ValueError, match="trains a population"):
        run.evaluate()


def test_a_class_of_ones_own_with_a_built_in_type_is_refused(base):
    class Mine(pl.GRPO):
        pass

    class Named(pl.GRPO):
        type: str = "named:Named"

    for algorithm in (Mine(), text_config.TextConfig(env={"type": "sokoban"}, policies=speech(base), algorithm=Mine())):
        with pytest.raises(ValueError, match=r'Mine is a class of yours with type "grpo", .* "module:Mine"'):
            plain_data(algorithm)
    assert plain_data(Named())["type"] == "named:Named"


def config_classes(union):
    """The config classes of a union with `type:` as its discriminator."""
    return [part for part in get_args(get_args(union)[0]) if isinstance(part, type)]


def test_every_type_of_a_config_has_an_export():
    exported = [getattr(names, name) for names in (pl, pl.vector) for name in names.__all__]
    unions = [
        text_config.TextAlgorithmConfig,
        vector_config.VectorAlgorithmConfig,
        text_policies.PolicyConfig,
        vector_config.VectorPolicyConfig,
        population.PlanConfig,
        language_population.OracleConfig,
        solvers.MetaSolverConfig,
        matchmaking.MatchmakerConfig,
    ]
    known = [kind for union in unions for kind in config_classes(union)]
    assert len(known) > 40
    classes = [value for value in exported if isinstance(value, type)]
    assert [kind.__name__ for kind in known if not any(issubclass(value, kind) for value in classes)] == []


def test_public_names_exist_and_import_is_light():
    assert all(getattr(pl, name) is not None and name in dir(pl) for name in pl.__all__)
    assert "group_size: whole number" in pl.GRPO.__doc__ and "Siblings per group" in pl.GRPO.__doc__
    assert "rank: whole number" in pl.Lora.__doc__ and "Units of each hidden layer" in pl.vector.Net.__doc__
    code = "import sys, palestra; sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'pydantic')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
