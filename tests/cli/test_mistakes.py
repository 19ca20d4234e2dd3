"""What newcomers type wrongly, on the command line, in YAML and in Python: each is answered by one line that says what
to write instead. Mistakes in prompts and rewards: tests/envs/text/test_chain.py; of a run's seats and its resume:
test_main.py."""

import re
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest
import yaml
from helpers.command_line import invoke

import palestra as pl
from palestra.text.config import TextConfig

CONFIG = {
    "name": "mine",
    "steps": 1,
    "episodes": 2,
    "env": {"type": "mistaken_envs:Fine"},
    "policies": {"default": {"type": "lora", "base": "tiny", "rank": 2, "sampling": {"max_tokens": 3}}},
    "algorithm": {"type": "grpo", "branch_at": "root", "group_size": 2},
}
FILES = {
    "mine.yaml": yaml.safe_dump(CONFIG),
    "one_policy.yaml": yaml.safe_dump(CONFIG | {"policies": {"type": "lora", "base": "tiny"}}),
    "list.yaml": "- steps\n- env\n",
    "text.yaml": "hello\n",
    "tab.yaml": "steps: 1\n\tenv: x\n",
    "empty.yaml": "# nothing yet\n",
    "bad.gguf": "not a model",
    "syntax_error.py": "class Broken(Env)\n    pass\n",
    "needs_package.py": "import package_that_nobody_has\n",
    "fails_at_import.py": 'value = {}["key"]\n',
    "exits_at_import.py": "import sys\n\nsys.exit(0)\n",
    "mistaken_envs.py": """
from palestra import Env, Step


class Fine(Env):
    seats = ("a",)

    def reset(self, seed):
        return Step({"a": "hi"})

    def step(self, actions):
        return Step({}, team_reward=1.0)


class NoSeats(Env):
    reset = Fine.reset
    step = Fine.step


class NoStep(Env):
    seats = ("a",)
    reset = Fine.reset


class Raises(Fine):
    def __init__(self):
        raise RuntimeError("no licence")


class FaultyReset(Fine):
    def reset(self, seed):
        return {}["board"]


class TextReward(Fine):
    def step(self, actions):
        return Step({}, team_reward="1.0")


class Tuples(Fine):
    def step(self, actions):
        return "", 1.0, True


class LongPrompt(Fine):
    def reset(self, seed):
        return Step({"a": "word " * 5000})
""",
}


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory):
    """A folder with these files, in which everything is typed."""
    path = tmp_path_factory.mktemp("mistakes")
    for name, text in FILES.items():
        (path / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.syspath_prepend(path)
        patch.setenv("COLUMNS", "300")  # boxes of usage errors are not wrapped
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield path


TYPED = {
    # the file
    "train": "name a config to start a run, or --resume RUN",
    "train nowhere.yaml": "cannot read config nowhere.yaml: No such file",
    "train demo": "did you mean configs/demo.yaml, which comes with palestra?",
    "train configs/dmo.yaml": "did you mean configs/demo.yaml",
    "train empty.yaml": "empty.yaml is empty: `palestra init` lists configs",
    "train list.yaml": "a config is a mapping of keys to values, this is a list",
    "train text.yaml": "a config is a mapping of keys to values, this is text",
    "train tab.yaml": "tab.yaml, line 2, column 1: found a tab character",
    "train .": ". is not a config, but a folder",
    "train bad.gguf": "a config is a mapping of keys to values, this is text",
    "train --resume nowhere": "nowhere is not a run: it has no config.yaml; `palestra runs` lists",
    "train --resume mine.yaml": "is a file, not a run: `palestra train mine.yaml` starts a run",
    "train --resume configs/demo.yaml": "is a file, not a run: `palestra train configs/demo.yaml` starts",
    "train mine.yaml --resume nowhere": "name a config to start a run, or --resume RUN to resume one",
    # options
    "trian mine.yaml": "No such command 'trian'. Did you mean 'train'?",
    "train mine.yaml --steps ten": "Invalid value for '--steps': Input should be a valid integer",
    "train mine.yaml --steps 0": "Invalid value for '--steps': Input should be greater than or equal to 1",
    "train mine.yaml steps=10": "a setting of the config is changed with --set steps=10",
    "train mine.yaml --lr 1e-3": "a setting of the config is changed with --set lr=...",
    "train mine.yaml more": "unexpected extra argument(s) (more)",
    "train mine.yaml --set steps": "write key=value",
    "train mine.yaml --name a/b": "plain folder name",
    # keys
    "train mine.yaml --set stepz=3": "unknown key stepz: did you mean steps?",
    "train mine.yaml --set learning_rate=1e-4": "unknown key learning_rate: did you mean policies.default.lr?",
    "train mine.yaml --set max_steps=4": "unknown key max_steps: did you mean steps?",
    "train mine.yaml --set num_train_epochs=4": "unknown key num_train_epochs: did you mean steps?",
    "train mine.yaml --set policies.default.r=8": "unknown key policies.default.r: did you mean rank?",
    "train mine.yaml --set policies.default.lora_alpha=8": "did you mean alpha?",
    "train mine.yaml --set policies.default.max_new_tokens=8": "did you mean policies.default.sampling.max_tokens",
    "train mine.yaml --set algorithm.num_generations=8": "did you mean group_size?",
    "train mine.yaml --set algorithm.type=gppo": "unknown algorithm.type 'gppo': did you mean ppo?",
    "train mine.yaml --set algorithm=gppo": "unknown algorithm.type 'gppo': did you mean ppo?",
    "train mine.yaml --set policies.default.type=lorra": "did you mean lora?",
    "train mine.yaml --set sinks=[wandbb]": "unknown sinks[0].type 'wandbb': did you mean wandb?",
    # values
    "train mine.yaml --set steps=": "the setting 'steps=' has no value: write null",
    "train mine.yaml --set episodes=3.5": "episodes: should be a valid integer, got a number with a fractional part",
    "train mine.yaml --set policies.default.lr=abc": "policies.default.lr: should be a valid number",
    "train mine.yaml --set policies.default.sampling.temperature=-1": "should be greater than or equal to 0, not -1",
    "train mine.yaml --set evals=5": "evals: should be a mapping, not 5",
    "train mine.yaml --set policies={}": 'seat "a" has no policy: .* policies: is empty',
    "train one_policy.yaml": "each policy has a name: write policies: {default: ...}",
    "train mine.yaml --set device=gpu": "unknown device 'gpu': write auto, cpu, cuda",
    # bases
    "train mine.yaml --set policies.default.base=smolm2": "did you mean smollm2?",
    "train mine.yaml --set policies.default.base=./none.gguf": "no GGUF file at none.gguf: name a file that exists",
    "train mine.yaml --set policies.default.base=./bad.gguf": "it does not begin with the bytes GGUF. Copy it again",
    "train mine.yaml --set policies.default.base=no/such": "the hub does not answer, .*name a local folder or a .gguf",
    "info --base no/such": "it is not a shipped one (.*tiny.*); the hub does not answer",
    # envs
    "train mine.yaml --set env=sokoban": "write a mapping, which has room for options: env: {type: sokoban}",
    "train mine.yaml --set env.type=sokobann": 'unknown env "sokobann": did you mean sokoban?',
    "train mine.yaml --set env.type=CartPole-v1": 'env: {type: gymnasium, id: "CartPole-v1"}',
    "train mine.yaml --set env.type=mistaken_envs": 'mistaken_envs.py is a module, write "mistaken_envs:CLASS"',
    "train mine.yaml --set env.type=mistaken_envs:Nothing": "has no attribute 'Nothing'",
    "train mine.yaml --set env.type=no_module:Env": "there is no module no_module in ",
    "train mine.yaml --set env.type=syntax_error:Env": "fails when it is imported: SyntaxError: .*error.py, line 1",
    "train mine.yaml --set env.type=needs_package:Env": "needs the package package_that_nobody_has, which",
    "train mine.yaml --set env.type=fails_at_import:Env": "fails when it is imported: KeyError: 'key'",
    "train mine.yaml --set env.type=exits_at_import:Env": "fails when it is imported: SystemExit: 0",
    "train mine.yaml --set env.type=mistaken_envs:NoSeats": 'env NoSeats has no seats: set seats = ("player", ...)',
    "train mine.yaml --set env.type=mistaken_envs:NoStep": "env NoStep cannot be made: .* abstract class NoStep",
    "train mine.yaml --set env.type=mistaken_envs:Raises": "RuntimeError: no licence (mistaken_envs.py, line ",
    # other commands
    "eval nowhere": "there is no run, config or env nowhere: `palestra runs` lists the runs",
    "eval x": "there is no run, config or env x",
    "eval text_kuhnn": "did you mean text_kuhn?",
    "eval configs/dmo.yaml": "did you mean configs/demo.yaml",
    "eval text_kuhn --episode 3": "No such option: --episode (Possible options: --episodes",
    "eval text_kuhn --seats player_0": "write SEAT=POLICY, for example agent_0=random",
    "eval text_kuhn --seats player_9=random": 'no seat "player_9": env "text_kuhn" plays player_0, player_1',
    "play kuhn_poker": "palestra play is for text envs; kuhn_poker is a vector env",
    "play text_kuhn --seats player_0=random --seats player_1=random": "leave one for you, or look on with --watch",
    "play text_kuhn --watch --seat player_0": "--watch leaves no seat for you: leave out --seat",
    "play text_kuhn --watch --seats player_0=human --seats player_1=random": "give seat player_0 one, or leave out",
    "collect text_kuhn --out x.csv": "episodes are written as Parquet: name it x.parquet",
    "collect text_kuhn": "Missing option '--out'",
    "render runs/none --out x.txt": "is neither a .gif nor an .mp4: name the file so",
    "grid mine.yaml": "is the config of a run, not a grid of several: palestra train mine.yaml",
    "plot nowhere": "nowhere is not a run",
    "publish nowhere --out x": "there is no run and no published agent at nowhere",
    "config gppo": 'no config has "gppo": did you mean ppo?',
    "init demo.yml": "there is no config demo.yml: did you mean demo?",
    "serve --port 99999999": "Input should be less than or equal to 65535",
}


def matches(message, text):
    """Whether `text` has the parts of `message` between `.*`, in this order."""
    return re.search(".*".join(map(re.escape, message.split(".*"))), text)


@pytest.mark.parametrize("typed", TYPED)
def test_a_command_line_is_answered_by_one_line(typed):
    done = invoke(*typed.split())
    answer = done.stderr.strip()
    assert isinstance(done.exception, SystemExit) and done.exit_code in (1, 2), done.exception
    assert done.exit_code == 2 or "bad.gguf" in typed
    assert matches(TYPED[typed], answer), answer
    assert "Usage:" in answer or (answer.startswith("error: ") and len(answer.splitlines()) == 1), answer
    assert not re.search(r"Traceback|pydantic|\.py\", line", answer)
    assert not Path("runs").exists()


BROKEN_EPISODES = {
    "FaultyReset": ("with KeyError: 'board'. Fix the env", "in reset"),
    "TextReward": ("gives the team a reward of '1.0' (str): rewards must be finite numbers. Fix the env", ""),
    "Tuples": ("returned a tuple, as in Gymnasium: write return Step({seat: observation}", ""),
    "LongPrompt": ("exceed the base's context length, 2048: shorten the observation", ""),
}


@pytest.mark.parametrize("env", BROKEN_EPISODES)
def test_a_run_whose_episodes_fail_says_why_and_shows_the_users_lines_only(env):
    message, frame = BROKEN_EPISODES[env]
    done = invoke("train", "mine.yaml", "--set", f"env.type=mistaken_envs:{env}", "--root", env)
    error, *trace = done.stderr.strip().splitlines()
    assert done.exit_code == 1 and matches(message, error), error
    assert error.startswith("error: step 1: 2 of 2 episodes failed, the first (instance 0) with ")
    files = {line.split('"')[1] for line in trace if line.lstrip().startswith("File ")}
    assert {Path(file).name for file in files} == ({"mistaken_envs.py"} if frame else set())
    assert frame in done.stderr


class Gym(gymnasium.Env):
    """An env without spaces."""


def env(name):
    import mistaken_envs

    return getattr(mistaken_envs, name)


def start(**changes):
    """A call of `train` with some arguments replaced."""
    policies = {"default": pl.Lora("tiny", rank=2)}
    return pl.train(**{"env": env("Fine"), "policies": policies, "algorithm": pl.GRPO(), "steps": 1} | changes)


NETS = {"default": pl.vector.Net()}
ROWS = [{"prompt": f"say {i}"} for i in range(9)]

CALLS = [
    # configs
    (lambda: pl.GRPO(num_generations=8), "unknown key num_generations: did you mean group_size?"),
    (lambda: pl.GRPO(learning_rate=1e-3), "unknown key learning_rate: lr is a key of a policy, Lora(...)"),
    (lambda: pl.GRPO(group_size="many"), "group_size: should be a valid integer"),
    (lambda: pl.GRPO(8), "GRPO takes its keys by name: GRPO(KEY=...)"),
    (lambda: pl.Lora("tiny", r=8), "unknown key r: did you mean rank?"),
    (lambda: pl.Lora("tiny", learning_rate=1e-3), "unknown key learning_rate: did you mean lr?"),
    (lambda: pl.Lora(3), "base: should be a valid string, not 3"),
    (lambda: pl.vector.PPO(n_steps=128), "unknown key n_steps: did you mean rollout_length?"),
    (lambda: pl.PPO(vf_coef=0.5), "unknown key vf_coef: did you mean value_coef?"),
    (lambda: pl.GRPO.model_validate({"num_generations": 8}), "unknown key num_generations: did you mean group_size?"),
    (lambda: pl.GRPO.model_validate({"group_size": "x"}), "group_size: should be a valid integer"),
    (lambda: pl.GRPO.model_validate(8), "config: should be a mapping, not 8"),
    (lambda: pl.GRPO.model_validate_json('{"group_sise": 8}'), "unknown key group_sise: did you mean group_size?"),
    (lambda: TextConfig.model_validate({"policies": {}, "stpes": 3}), "unknown key stpes: did you mean steps?"),
    (lambda: setattr(pl.GRPO(), "group_size", 4), "a config does not change: make another, GRPO(group_size=...)"),
    (lambda: TextConfig(), "policies is missing"),
    # names
    (lambda: pl.MAPPO(), 'palestra has no class MAPPO: .* algorithm="mappo"'),
    (lambda: pl.Grpo(), "has no attribute 'Grpo': did you mean GRPO?"),
    (lambda: pl.GRPOTrainer(), "has no attribute 'GRPOTrainer': did you mean GRPO?"),
    (lambda: pl.vector.GRPO(), "has no attribute 'GRPO': it is palestra.GRPO"),
    # train
    (lambda: pl.train(), 'nothing to train: give a config, train("configs/demo.yaml"), or env= and policies='),
    (lambda: pl.train(3), "config is 3: give a YAML file, a mapping or a config object"),
    (lambda: pl.train("nope.yaml"), "cannot read config nope.yaml"),
    (lambda: pl.train(resume="nowhere"), "nowhere is not a run"),
    (lambda: start(stpes=3), "unknown key stpes: did you mean steps?"),
    (lambda: start(learning_rate=1e-3), "unknown key learning_rate: did you mean policies.default.lr?"),
    (lambda: start(steps="ten"), "steps: should be a valid integer"),
    (lambda: start(algorithm=pl.GRPO), "GRPO is a class: give an object of it, GRPO(...)"),
    (lambda: start(algorithm="gppo"), "unknown algorithm.type 'gppo': did you mean ppo?"),
    (lambda: start(algorithm=pl.vector.PPO()), "algorithm PPO is for vectorised envs"),
    (lambda: start(policies={}), "policies: is empty. Add policies.a"),
    (lambda: start(policies=pl.Lora("tiny")), "each policy has a name: write policies: {default: ...}"),
    (lambda: start(policies="tiny"), "each policy has a name: write policies: {default: ...}"),
    (lambda: start(policies={"default": "tinny"}), "did you mean tiny?"),
    (lambda: start(evals={"dev": 5}), "evals.dev: should be a mapping, not 5"),
    (lambda: start(callbacks=[print]), "callbacks must be a list of objects of subclasses of palestra.Callback"),
    (lambda: start(callbacks=pl.Callback()), "callbacks must be a list .* and one is <"),
    # envs
    (lambda: start(env=3), "env is 3: give a name, a config"),
    (lambda: start(env=lambda: 3), "returned a int: give a name, a config"),
    (lambda: start(env="sokobann"), "did you mean sokoban?"),
    (lambda: start(env=env("Fine")()), "env is an instance, and several are played: give Fine"),
    (lambda: start(env=env("NoSeats")), "env NoSeats has no seats"),
    (lambda: start(env=env("Raises")), "env Raises cannot be made: RuntimeError: no licence (mistaken_envs.py"),
    (lambda: start(env=Gym, algorithm="ppo", policies=NETS), "'Gym' object has no attribute 'action_space'"),
    (lambda: start(env=ROWS), "of rows of prompts, palestra.Prompts(rows, reward=...)"),
    (lambda: pl.check_env(env("NoSeats")), "env NoSeats has no seats"),
    (lambda: pl.check_env(env("Raises")), "env Raises cannot be made"),
    (lambda: pl.check_env(env("TextReward")), "rewards must be finite numbers"),
    (lambda: pl.check_env(Gym), "env Gym cannot be made"),
    (lambda: pl.make_env("sokoban", boxs=2), 'env "sokoban" has no option "boxs": did you mean boxes?'),
    # runs
    (lambda: pl.load_run("nowhere"), "nowhere is not a run"),
    (lambda: pl.load_agent("nowhere"), "there is no run and no published agent at nowhere"),
    (lambda: pl.evaluate("nowhere"), "there is no run, config or env nowhere"),
]


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[str(number) for number in range(len(CALLS))])
def test_a_call_is_answered_by_one_line(call, message):
    with pytest.raises((ValueError, AttributeError)) as refusal:
        call()
    answer = str(refusal.value)
    assert matches(message, answer) and "pydantic" not in answer, answer
    faults = answer.count("\n  ")
    assert answer.count("\n") == faults and not Path("runs").exists()


def test_there_are_more_than_sixty_of_each_kind_and_none_twice():
    assert len(TYPED) >= 60 and len({message for _, message in CALLS}) >= 40


@pytest.mark.slow
@pytest.mark.parametrize("typed", ["train mine.yaml --set learning_rate=1e-4", "train mine.yaml --steps 0", "eval x"])
def test_a_real_process_answers_likewise(typed):
    command = [Path(sys.executable).parent / "palestra", *typed.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and matches(TYPED[typed], done.stderr), done.stderr
    assert "Traceback" not in done.stderr
