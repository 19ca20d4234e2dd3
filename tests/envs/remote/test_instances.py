"""Intervals of evaluations on servers are over different instances, as without servers."""

import asyncio
import json
import warnings

import pytest
from helpers.command_line import palestra as command
from helpers.env_servers import serving

import palestra as pl
from palestra.core.http.loop_thread import LoopThread
from palestra.envs.remote.remote_env import env_factory
from palestra.envs.remote.server import EnvServer, EnvServerOptions
from palestra.envs.remote.sessions import EnvSessions
from palestra.text.policies.scripted import ScriptedPolicy
from palestra.text.rollouts.metrics import instance_outcomes, seat_returns
from palestra.text.rollouts.tree_rollout import Branching, EpisodeRunner, EpisodeSpec

ROWS = "helpers.remote_toys:Rows"


@pytest.fixture(scope="module")
def server():
    with serving(ROWS) as server:
        yield server


def play(seeds, **env):
    """Episodes of Rows by a policy that always answers alike."""
    runner = EpisodeRunner(env_factory({"type": ROWS, **env}), "rows")
    specs = [EpisodeSpec(seed, {"a": ScriptedPolicy("0")}, 0) for seed in range(seeds)]
    return asyncio.run(runner.play_all(specs, Branching()))


@pytest.mark.parametrize("form", ["number", "tuple"])
def test_episodes_on_a_server_have_the_instances_of_those_here(server, form):
    there, here = (play(30, form=form, **at) for at in ({"at": [server.address]}, {}))
    assert [e.instance for e in there] == [e.instance for e in here] and len({e.instance for e in here}) == 3
    assert seat_returns(there) == seat_returns(here) and seat_returns(there)["instances"] == 3
    assert instance_outcomes(there) == instance_outcomes(here)


def test_an_instance_whose_reset_fails_is_still_one(server):
    there, here = (play(30, broken=1, **at) for at in ({"at": [server.address]}, {}))
    assert [e.instance for e in there] == [e.instance for e in here]
    assert {e.error for e in there} == {None, "ValueError: row 1 is broken"}


def test_the_error_of_a_reset_is_told_and_not_that_of_its_instance(server):
    for at in ({"at": [server.address]}, {}):
        episodes = play(12, broken=1, form="drawn", **at)
        assert {e.error for e in episodes} == {None, "ValueError: row 1 is broken"}
        assert {e.instance for e in episodes if e.error is None} == {0, 2}  # known after the reset only


@pytest.mark.parametrize("place", ["here", "there"])
def test_an_instance_that_cannot_be_compared_fails_its_episode(server, place):
    at = {"at": [server.address]} if place == "there" else {}
    (episode,) = play(1, form="list", **at)
    assert "returned a list for seed 0: return a number, a text, or a tuple of such" in episode.error
    (episode,) = play(1, form="object", **at)
    said = "returned a object for seed 0" if place == "here" else "a builtins.object cannot be sent to or from an env"
    assert said in episode.error
    (episode,) = play(1, form="nan", **at)
    assert "returned a float for seed 0" in episode.error


def test_evaluations_count_instances_of_a_server(server, tmp_path):
    """During training, after it, and with several samples."""
    evals = {"test": {"episodes": 20}, "twice": {"episodes": 10, "samples": 2}}
    run = pl.train(
        env={"type": ROWS, "at": [server.address]},
        policies={"default": pl.Lora("tiny", rank=2, sampling={"max_tokens": 2})},
        algorithm=pl.GRPO(group_size=2, branch_at="root"),
        steps=1,
        episodes=2,
        evals=evals,
        root=tmp_path,
    )
    lines = run.evals.drop_duplicates("name", keep="last").set_index("name")
    assert list(lines["instances"]) == [3, 3] and list(lines["outcomes"].str.len()) == [3, 3]
    shown = [
        command("eval", str(run.path), "--episodes", "20", "--json", "--env", at) for at in ("split=test", "at=null")
    ]
    there, here = (json.loads(text.splitlines()[-1]) for text in shown)
    assert there == here and there["instances"] == 3


class OlderSessions(EnvSessions):
    """Leaves out of its replies what servers did not say before."""

    def execute(self, client, request):
        reply = super().execute(client, request)
        if isinstance(reply, asyncio.Task):
            return asyncio.ensure_future(self._older(reply))
        reply.ClearField("instance")
        return reply

    async def _older(self, task):
        reply = await task
        reply.ClearField("instance")
        return reply


def test_an_older_server_is_named_once_and_counted_by_seed():
    loop = LoopThread("older server", 5.0)
    older = loop.run(make_server())
    try:
        address = f"127.0.0.1:{loop.run(older.start())}"
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("default")
            episodes = play(12, at=[address])
        assert [episode.instance for episode in episodes] == list(range(12))
        assert [address in str(one.message) and "count seeds" in str(one.message) for one in said] == [True]
    finally:
        loop.run(older.stop())


async def make_server():
    return EnvServer(OlderSessions([ROWS]), EnvServerOptions((ROWS,), port=0))
