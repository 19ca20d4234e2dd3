"""`palestra train --engine URL` equals `palestra train`: the same metrics and checkpoints, and equally clear errors."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.processes import Server
from helpers.warm_processes import start_palestra

from palestra.core.config import dump, validate
from palestra.core.files import read_lines
from palestra.core.http.retry import RetryPolicy
from palestra.core.losses import LOSSES, actor_critic_loss, cispo_loss, clipped_policy_loss, gspo_loss
from palestra.core.types import Metrics, Step
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.envs.base import Env
from palestra.runs import Run, list_checkpoints
from palestra.runs.loop import restore_checkpoint, run_training
from palestra.service.server.api_keys import add_key
from palestra.text.build.build import build
from palestra.text.build.engines import Engines
from palestra.text.config import TextConfig
from palestra.text.learners.lm_config import FullPolicyConfig, LoraPolicyConfig
from palestra.text.losses import preference_loss
from palestra.text.policies.base import Query
from palestra.text.policy_configs import FrozenConfig
from palestra.text.rollouts.tree_rollout import Branching, EpisodeRunner, EpisodeSpec
from palestra.text.tinker import connection, remote_weights
from palestra.text.tinker.client import connect
from palestra.text.tinker.connection import RequestRefused, ServiceConnection
from palestra.text.tinker.remote_weights import WireLoss, to_wire_loss
from palestra.text.training.trainer import TextTrainer
from palestra.text.training.update import update_learner

STEPS = 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    data = tmp_path_factory.mktemp("server")
    key = add_key(data / "keys", "ada")
    started = Server(data / "data", "--auth", str(data / "keys"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_API_KEY", key)
        yield started
    started.kill()


def config(folder: Path, name: str, **changes: Any) -> Path:
    speech = {"type": "lora", "base": "tiny", "rank": 4, "lr": 1e-3, "sampling": {"max_tokens": 4}}
    tree: dict[str, Any] = {
        "name": name,
        "steps": STEPS,
        "episodes": 4,
        "env": {"type": "plan_path", "size": 5, "team": "planner_executor", "max_turns": 2, "reward": "dense"},
        "policies": {"planner": speech, "executor": speech | {"batch_size": 8}},
        "algorithm": {"type": "grpo", "group_size": 4, "entropy_coef": 0.05},
        "evals": {"dev": {"episodes": 4, "every": 2}},
        "checkpoint_every": 2,
    }
    for path, value in changes.items():
        branch = tree
        *way, last = path.split("__")
        for key in way:
            branch = branch[key]
        branch[last] = value
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(tree))
    return folder / f"{name}.yaml"


def start_command(folder: Path, *words: Any, **given: Any) -> Any:
    return start_palestra(*words, cwd=folder, with_stderr=False, **given)


def wait_for_success(process: Any) -> str:
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    return said


def refused(folder: Path, *words: Any, key: str | None = None) -> str:
    """The error message of a refused command line, run as a process because of its threads."""
    env = os.environ | ({"TINKER_API_KEY": key} if key else {})
    done = start_command(folder, *words, env=env)
    said, _ = done.communicate(timeout=240)
    assert done.returncode == 2, said
    assert "Traceback" not in said
    return " ".join(said.split())


TIMES = ("seconds", "time", "per_second", "_s")


def figures(run: Path, log: str = "metrics.jsonl") -> list[dict[str, float]]:
    lines = [{k: v for k, v in line.items() if isinstance(v, float)} for line in read_lines(run / log)]
    return [{k: v for k, v in line.items() if not any(word in k for word in TIMES)} for line in lines]


def assert_alike(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        assert a == pytest.approx(b, abs=1e-5, rel=1e-4)


def test_remote_training_equals_local_training_also_after_kills(server: Server, tmp_path: Path) -> None:
    path = config(tmp_path, "here")
    here = start_command(tmp_path, "train", path)
    there = start_command(tmp_path, "train", path, "--engine", server.url, "--name", "there")
    run = tmp_path / "runs" / "there"
    while len(read_lines(run / "metrics.jsonl")) < 2 * 3:
        assert there.poll() is None, there.communicate()
        time.sleep(0.01)
    there.kill()
    there.communicate()
    assert there.returncode == -signal.SIGKILL
    wait_for_success(start_command(tmp_path, "train", "--resume", run))
    wait_for_success(here)
    assert_alike(figures(run), figures(tmp_path / "runs" / "here"))
    assert_alike(figures(run, "evals.jsonl"), figures(tmp_path / "runs" / "here", "evals.jsonl"))
    assert list_checkpoints(run)[-1].step == STEPS - 1
    # in this process, from the downloaded weights
    output = wait_for_success(start_command(tmp_path, "eval", run, "--episodes", 5))
    assert "5 episodes" in " ".join(output.split())  # the path of a run may break the line


def whisper(algorithm: dict[str, Any], **tree: Any) -> dict[str, Any]:
    speech = {"type": "lora", "base": "tiny", "rank": 4, "alpha": 32, "lr": 3e-3, "batch_size": 12, "epochs": 2}
    speech |= {"sampling": {"max_tokens": 3}, "history": "conversation"}
    whole = {"name": "whisper", "steps": 2, "episodes": 4, "env": {"type": "helpers.toys:Whisper", "turns": 2}}
    return whole | {"policies": {"guide": speech, "walker": speech}, "algorithm": algorithm} | tree


def close(setup: TextTrainer) -> None:
    for each in {learner.weights.connection for learner in setup.learners.values()}:  # type: ignore[attr-defined]
        each.close()


def train_run(folder: Path, tree: dict[str, Any], engine: str | None = None, pause: int | None = None) -> Path:
    """The folder of a run, here or on a server; with `pause` it was stopped after that many steps, and resumed."""
    config = validate(TextConfig, tree | {"engine": engine})
    ends = [lambda: len(list_checkpoints(run.path)) + 1 == pause, lambda: False] if pause else [lambda: False]
    with Run.create(folder, dump(config), "there" if engine else "here") as run:
        for stop in ends:
            setup = build(config)
            assert restore_checkpoint(setup, run) == (0 if stop is ends[0] else pause)
            assert run_training(setup, run, should_stop=stop) == (stop is ends[-1])
            if engine:
                close(setup)
    return run.path


# Skipped: if no answer has an advantage, the first gradient of a penalty is rounding, which Adam scales to a full step.
SKIP = {"flat_groups": "skip"}
ELSEWHERE = {  # algorithms that need only log-probabilities
    "dpo": {"type": "dpo", "group_size": 4, "pairs": "all"},
    "kl": {"type": "grpo", "group_size": 4, "kl_coef": 0.1, "clip": 0.05} | SKIP,
    "dual_clip": {"type": "grpo", "group_size": 4, "dual_clip": 1.01, "loss_aggregation": "sequence"},
    "clipped": {"type": "grpo", "group_size": 4, "loss_aggregation": "sequence", "clip": 0.02, "clip_high": 0.05},
    "cispo": {"type": "grpo", "group_size": 4, "surrogate": "cispo", "clip_high": 0.05},
    "gspo": {"type": "grpo", "group_size": 4, "surrogate": "gspo", "clip": 0.01},
    "gspo_kl": {"type": "grpo", "group_size": 4, "surrogate": "gspo", "clip": 0.01, "kl_coef": 0.1} | SKIP,
    "sft": {"type": "sft", "imitate": "all", "world_model_weight": 0.5},
}


FAST = ("dpo", "kl", "gspo", "sft")  # that the others map to other losses is test_losses_map_to_wire_losses


def assert_the_same(here: Path, there: Path) -> None:
    """Except for the entropy, which is not requested, and for the accuracy on pairs, which depends on rounding while
    the policy equals its reference."""
    ours, theirs = figures(here), figures(there)
    assert any("loss" in line for line in theirs) and not any("entropy" in line for line in theirs)
    vague = {"entropy", "accuracy"}
    assert_alike(*([{k: v for k, v in line.items() if k not in vague} for line in lines] for lines in (theirs, ours)))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in ELSEWHERE])
@pytest.mark.few(1)
def test_algorithm_trains_remotely_as_locally(
    server: Server, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_weights, "MAX_CHUNK_SEQUENCES", 5)  # pairs are split over two requests
    tree = whisper(ELSEWHERE[name])
    assert_the_same(train_run(tmp_path, tree), train_run(tmp_path, tree, server.url))


@pytest.mark.parametrize("name", ["clipped", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gspo", "dpo"))])
def test_only_standard_requests_are_sent_to_other_servers(
    server: Server, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def other(self: ServiceConnection) -> bool:
        return False

    monkeypatch.setattr(ServiceConnection, "is_palestra", other)
    tree = whisper(ELSEWHERE[name])
    assert_the_same(train_run(tmp_path, tree), train_run(tmp_path, tree, server.url))


def test_off_policy_correction_is_the_same_remotely(server: Server, tmp_path: Path) -> None:
    """Two updates on the same episodes: in the second the weights have moved."""

    async def update_twice(setup: TextTrainer) -> list[Metrics]:
        moment, learner = setup.position_of(0), setup.learners["guide"]
        algorithm = moment.stage.algorithm
        episodes = await moment.stage.source.play(moment.episode_numbers, algorithm.branching, setup.algorithm_state)
        return [await update_learner(algorithm, learner, episodes, 0.0) for _ in range(2)]

    tree = whisper({"type": "grpo", "group_size": 4, "importance_cap": 1.05})
    here, there = (build(validate(TextConfig, tree | {"engine": engine})) for engine in (None, server.url))
    ours, theirs = asyncio.run(update_twice(here)), asyncio.run(update_twice(there))
    close(there)
    assert theirs[1]["sampler_kl"] > 1e-3 and theirs[1]["importance_cap_fraction"] > 0
    assert_alike(theirs, [{k: v for k, v in line.items() if k != "entropy"} for line in ours])


@pytest.mark.slow
def test_stage_reference_is_the_same_remotely_also_after_resume(server: Server, tmp_path: Path) -> None:
    """Also after a stop in the middle of a stage."""
    stages = [{"steps": 1, "algorithm": ELSEWHERE["sft"]}, {"steps": 2, "algorithm": ELSEWHERE["kl"]}]
    tree = whisper(ELSEWHERE["sft"], stages=stages, checkpoint_every=1)
    assert_the_same(train_run(tmp_path, tree), train_run(tmp_path, tree, server.url, pause=2))


class Lengthening(Env):
    """One seat acts twice; its second observation is `text`. The first answer is rewarded with 1."""

    name, seats, roles = "lengthening", ("a",), {"a": "r"}

    def __init__(self, text: str) -> None:
        self.text = text

    def reset(self, seed: int) -> Step:
        return Step({"a": "a"})

    def step(self, actions: dict[str, str]) -> Step:
        return Step({"a": self.text}, {"a": 1.0})


@pytest.mark.parametrize("left", [2, -100])
def test_trajectory_beyond_the_context_is_truncated_remotely(server: Server, left: int) -> None:
    """The second prompt leaves fewer positions than max_tokens, or none."""
    engines = connect(server.url)
    policy = engines.build_frozen_policy("a", FrozenConfig(sampling=SamplingConfig(max_tokens=4)))
    text = "0" * (2048 - left - len(policy.encode_prompt(Query("r", ""))))
    assert len(policy.encode_prompt(Query("r", text))) == 2048 - left
    arena = EpisodeRunner(lambda: Lengthening(text), "lengthening")
    (episode,) = asyncio.run(arena.play_all([EpisodeSpec(0, {"a": policy}, 0)], Branching()))
    engines.connection.close()
    assert episode.error is None
    (node,) = episode.nodes
    assert node.truncated and node.info["context_full"] and node.rewards == {"a": 1.0}


STOPS: list[dict[str, Any]] = [
    {},
    {"stop": ["!", "can"]},
    {"stop_token_ids": [76, 225]},
    {"stop_at_eos": False},
]


def test_answers_end_remotely_as_locally(server: Server) -> None:
    """With every combination of stop conditions that is not refused."""
    engines = connect(server.url)

    async def sample(made: Any, changes: dict[str, Any]) -> list[tuple[list[int], str]]:
        config = FrozenConfig(base="tiny", sampling=SamplingConfig(max_tokens=24, **changes))
        answers = await made.build_frozen_policy("x", config).act(Query("r", "x", n=32, seed=3))
        return [(answer.token_ids.tolist(), answer.stop_reason) for answer in answers]

    here, there = ([asyncio.run(sample(made, s)) for s in STOPS] for made in (Engines("cpu", 512), engines))
    engines.connection.close()
    assert here == there
    assert len({str(answers) for answers in here}) == len(STOPS)
    ends = {ids[-1] for ids, reason in here[2] if reason == "stop"}
    assert ends > {76, 225}  # the end token too


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stop": ["a"], "stop_token_ids": [7]}, "stop and stop_token_ids, and .* leave one of them out"),
        ({"stop": ["a"], "stop_at_eos": False}, "stop_at_eos: false beside stop, .* set stop_at_eos: true"),
        ({"stop_token_ids": [7], "stop_at_eos": False}, "stop_at_eos: false beside stop_token_ids, "),
    ],
)
def test_stop_conditions_that_the_protocol_has_no_field_for_are_refused(
    server: Server, changes: dict[str, Any], message: str
) -> None:
    engines = connect(server.url)
    config = LoraPolicyConfig(sampling=SamplingConfig(**changes))
    with pytest.raises(ValueError, match=rf"policies\.x\.sampling sets {message}"):
        engines.check_supported(clipped_policy_loss, {}, {"x": config})
    with pytest.raises(ValueError, match=rf"policies\.x\.sampling sets {message}"):
        engines.build_frozen_policy("x", FrozenConfig(sampling=SamplingConfig(**changes)))
    tree = whisper(ELSEWHERE["sft"], eval_sampling=changes)
    with pytest.raises(ValueError, match=rf"policies\.guide\.sampling with eval_sampling sets {message}"):
        build(validate(TextConfig, tree), engines)
    engines.connection.close()


def test_losses_map_to_wire_losses() -> None:
    def bounds(low: float, high: float) -> dict[str, Any]:
        return pytest.approx({"clip_low_threshold": low, "clip_high_threshold": high})

    assert to_wire_loss(clipped_policy_loss, {"clip": 0.1}) == WireLoss("ppo", bounds(0.9, 1.1))
    assert to_wire_loss(clipped_policy_loss, {"clip": 0.1, "clip_high": 0.3}) == WireLoss("ppo", bounds(0.9, 1.3))
    assert to_wire_loss(cispo_loss, {"clip_high_threshold": 5.0}) == WireLoss("cispo", bounds(0.0, 5.0))
    assert to_wire_loss(gspo_loss, {}) == WireLoss("gspo", bounds(0.8, 1.2))
    assert to_wire_loss(LOSSES["cross_entropy"], {}) == WireLoss("cross_entropy", {})
    words = to_wire_loss(clipped_policy_loss, {"entropy": 0.05})
    assert words and words.options["entropy"] == 0.05
    computed_here = [(preference_loss, {}), (gspo_loss, {"kl": 0.1}), (clipped_policy_loss, {"dual_clip": 3.0})]
    assert [to_wire_loss(loss, options) for loss, options in [*computed_here, (LOSSES["dro"], {})]] == [None] * 4


def test_unsupported_features_are_refused_before_training(server: Server, tmp_path: Path) -> None:
    engines = connect(server.url)
    speech: dict[str, Any] = {"type": "lora", "base": "tiny", "sampling": SamplingConfig(max_tokens=4)}
    warm = LoraPolicyConfig(**speech | {"sampling": SamplingConfig(max_tokens=4, temperature=0.7)})
    with pytest.raises(ValueError, match=r"policies\.x\.sampling\.temperature must be 1"):
        engines.check_supported(clipped_policy_loss, {}, {"x": warm})
    with pytest.raises(ValueError, match=r"policies\.x\.chat_template: with engine: the server ends answers by"):
        engines.check_supported(clipped_policy_loss, {}, {"x": LoraPolicyConfig(**speech, chat_template="none")})
    with pytest.raises(ValueError, match=r"entropy_coef: -0\.1 is a cost"):
        engines.check_supported(clipped_policy_loss, {"entropy": -0.1}, {})
    with pytest.raises(ValueError, match="servers train adapters"):
        engines.build_learner("x", FullPolicyConfig(**speech | {"type": "full"}), 1)
    with pytest.raises(ValueError, match=r"policies\.x\.path: with engine: an adapter starts on the server"):
        engines.build_learner("x", LoraPolicyConfig(**speech, path="saved"), 1)
    with pytest.raises(ValueError, match="all layers of a part or none"):
        engines.build_learner("x", LoraPolicyConfig(**speech, target_modules=["q_proj"]), 1)
    with pytest.raises(RequestRefused, match='this server has no base "other"'):
        engines.build_learner("x", LoraPolicyConfig(**speech | {"base": "other"}), 1)
    for loss, more in ((clipped_policy_loss, "kl"), (clipped_policy_loss, "dual_clip"), (gspo_loss, "clip")):
        with pytest.raises(ValueError, match=r"entropy_coef: 0\.05 is paid by servers .* train without --engine"):
            engines.check_supported(loss, {"entropy": 0.05, more: 1.5}, {})
    with pytest.raises(ValueError, match="servers train no critic"):
        engines.check_supported(actor_critic_loss, {}, {})
    engines.connection.close()
    algorithm = {"type": "grpo", "kl_coef": 0.1, "entropy_coef": 0.05}
    said = refused(tmp_path, "train", config(tmp_path, "x", algorithm=algorithm), "--engine", server.url)
    assert "train without --engine" in said
    warmer = [{"steps": 1}, {"steps": 1, "policies": {"planner": {"sampling": {"temperature": 0.7}}}}]
    said = refused(tmp_path, "train", config(tmp_path, "x", stages=warmer), "--engine", server.url)
    assert "policies.planner.sampling.temperature must be 1" in said
    assert not read_lines(tmp_path / "runs" / "x" / "metrics.jsonl")


def test_entropy_bonus_is_sent_to_palestra_servers_only(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = connect(server.url)
    engines.check_supported(clipped_policy_loss, {"entropy": 0.05}, {})
    monkeypatch.setattr(engines.connection, "_palestra", False)
    with pytest.raises(ValueError, match=r"is not a palestra server, and only those know algorithm\.entropy_coef"):
        engines.check_supported(clipped_policy_loss, {"entropy": 0.05}, {})
    engines.connection.close()


def test_unreachable_server_is_reported_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "FIRST_RETRY", RetryPolicy(0.1, 5.0, timeout_s=0.2))
    began = time.monotonic()
    with pytest.raises(ConnectionError, match="Is `palestra serve` running"):
        connect("http://127.0.0.1:9")
    assert time.monotonic() - began < 10


def test_unknown_api_key_is_reported(server: Server, tmp_path: Path) -> None:
    with pytest.raises(RequestRefused, match="answered 401: this server needs a valid API key"):
        connect(server.url, "tml-wrong")
    said = refused(tmp_path, "train", config(tmp_path, "wrong"), "--engine", server.url, key="tml-wrong")
    assert "set TINKER_API_KEY" in said
