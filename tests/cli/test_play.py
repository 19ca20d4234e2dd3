"""Evaluation with any assignment of policies to seats, recording of episodes, and play at the terminal."""

import json

import pyarrow.parquet as pq
import pytest
import yaml
from helpers.command_line import invoke
from helpers.terminal_text import plain

from palestra.core.http.chat_server import ChatSession
from palestra.runs.episodes import load_episodes, read_episodes

WHISPER = "helpers.toys:Whisper"


@pytest.fixture(scope="module")
def config(base, tmp_path_factory):
    """A config whose guide and walker are adapters on the small base."""
    speech = {"type": "lora", "base": str(base), "sampling": {"max_tokens": 2}}
    tree = {"env": {"type": WHISPER}, "policies": {"guide": speech, "walker": speech}}
    path = tmp_path_factory.mktemp("play") / "whisper.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture
def server():
    """An endpoint that answers every call with the last letter of its prompt."""
    session = ChatSession(["echo"], lambda asked: asked.answer.set_result(asked.chat.messages[-1]["content"][-1]))
    yield session
    session.close()


# ---- eval


def test_cross_plays_every_seat_assignment(config):
    done = invoke("eval", config, "--cross", "--member", "expert", "--member", "random", "--episodes", 40, "--json")
    assert done.exit_code == 0, done.output
    found = {tuple(line["seats"].values()): line for line in json.loads(done.stdout)}
    assert set(found) == {(a, b) for a in ("expert", "random") for b in ("expert", "random")}
    assert found["expert", "expert"]["success"] == 1 and found["expert", "expert"]["returns"]["guide"] == 1
    assert found["random", "random"]["success"] < 0.6
    assert 0 < found["random", "expert"]["returns"]["guide"] < 1
    assert found["random", "expert"]["returns_ci95"]["guide"] > 0


def test_cross_of_a_run_uses_its_own_policies(config):
    text = plain(invoke("eval", config, "--cross", "--episodes", 2).output)
    assert text.count("%") == 4 * 3  # a share and its interval in each of four rows


def test_cross_of_a_vector_env_plays_every_seat_assignment(tmp_path):
    """Kuhn poker is zero-sum, and both mixed assignments equal those of `--seats`."""
    env = {"type": "kuhn_poker", "num_envs": 16}
    tree = {"env": env, "policies": {"gambler": {"type": "net", "hidden": [8]}}, "env_steps": 256}
    (tmp_path / "kuhn.yaml").write_text(yaml.safe_dump(tree))
    done = invoke("train", tmp_path / "kuhn.yaml", "--root", tmp_path)
    assert done.exit_code == 0, done.output
    run = tmp_path / "run"
    asked = ("--cross", "--member", "gambler", "--member", "random", "--episodes", 64)
    done = invoke("eval", run, *asked, "--json", "--record", "crossed")
    assert done.exit_code == 0, done.output
    found = [(list(line["seats"].values()), line["returns"]) for line in json.loads(done.stdout)]
    assert [[name.split("/")[0].split("@")[0] for name in names] for names, _ in found] == [
        ["gambler", "gambler"], ["gambler", "random"], ["random", "gambler"], ["random", "random"],
    ]  # fmt: skip
    assert all(sum(returns.values()) == pytest.approx(0) for _, returns in found)
    alone = invoke("eval", run, "--seats", "player_1=random", "--episodes", 64, "--json")
    assert json.loads(alone.stdout)["returns"] == found[1][1]
    table = plain(invoke("eval", run, *asked).output)
    assert table.count("gambler") == table.count("random/") == 4 and "team" not in table
    assert sum("crossed: player_0=" in line for line in (run / "evals.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--member", "expert"), "--member is only used with --cross"),
        (("--cross", "--swap"), "not --seats or --swap"),
        (("--best-response", 1000, "--judge", "expert"), "--best-response goes with --env"),
        (("--seats", "guide=nobody"), "or say base, expert, random, human"),
        (("--seats", "cook=expert"), 'no seat "cook"'),
        (("--cross", *(part for n in range(17) for part in ("--member", f"m{n}"))), "more than 256"),
    ],
)
def test_invalid_arguments_are_explained(config, arguments, message):
    done = invoke("eval", config, *arguments)
    assert done.exit_code == 2 and message in plain(done.output)


def test_traceback_is_shown_on_request(config, monkeypatch):
    monkeypatch.setenv("PALESTRA_TRACEBACK", "1")
    done = invoke("eval", config, "--seats", "cook=expert")
    assert isinstance(done.exception, ValueError) and done.exit_code == 1


def test_env_name_alone_is_accepted():
    done = invoke("eval", "text_kuhn", "--seats", "player_0=random", "--seats", "player_1=random", "--json")
    figures = json.loads(done.stdout)
    assert figures["failed"] == 0 and figures["returns"]["player_0"] == -figures["returns"]["player_1"]
    assert invoke("eval", "no_such_env").exit_code == 2


def test_endpoint_plays_a_seat(config, server, monkeypatch):
    """The echo answers the bit that it observes: right for a guide, wrong for a walker."""
    monkeypatch.setenv("OPENAI_API_KEY", server.key)
    who = f"guide={server.url}#echo"
    done = invoke("eval", config, "--seats", who, "--seats", "walker=expert", "--episodes", 5, "--json")
    figures = json.loads(done.stdout)
    assert figures["success"] == 1 and figures["seats"]["guide"] == "echo" and server.key not in done.stdout


def test_show_prints_whole_episodes(config):
    seats = ("--seats", "guide=expert", "--seats", "walker=expert")
    text = invoke("eval", config, *seats, "--episodes", 3, "--show", 2).output
    assert text.count("guide sees: ") == text.count("walker says: ") == 2
    assert "-> team +1" in text and 'the end: {"success": true, "invalid": false}' in text


@pytest.mark.parametrize("kind", ["a name", "a folder"])
def test_any_base_plays_a_seat(config, base, kind):
    name = "tiny" if kind == "a name" else str(base)
    done = invoke("eval", config, "--seats", f"guide={name}", "--seats", "walker=expert", "--episodes", 3, "--json")
    assert json.loads(done.stdout)["seats"] == {"guide": name, "walker": "expert"}, done.output
    missing = invoke("eval", config, "--seats", "guide=./none.gguf")
    assert missing.exit_code == 2 and "none.gguf" in plain(missing.output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--seats", "guide=expert", "--seats", "walker=expert"), "leave one for you"),
        (("--seat", "guide", "--seats", "guide=expert"), "gives your seat, guide, to expert"),
    ],
)
def test_seat_that_a_policy_has_is_not_taken_from_it(config, arguments, message):
    done = invoke("play", config, *arguments)
    assert done.exit_code == 2 and message in plain(done.output)


def test_person_has_the_first_seat_that_is_left(config):
    done = invoke("play", config, "--seats", "guide=expert", input="up\n")
    assert "(you)" in done.output and "return of walker (you)" in plain(done.output), done.output


# ---- collect


def test_episodes_are_recorded_with_tokens(config, tmp_path):
    out = tmp_path / "sub" / "all.parquet"
    done = invoke("collect", config, "--out", out, "--episodes", 7)
    assert done.exit_code == 0 and "7 of 7 episodes" in plain(done.output), done.output
    episodes = load_episodes(out)
    assert len(episodes) == 7 and len({episode.seed for episode in episodes}) == 7
    for node in (node for episode in episodes for node in episode.nodes):
        for answer in node.answers.values():
            assert len(answer.token_ids) == len(answer.logprobs) > 0 and len(answer.prompt_ids) > 0
    assert not list(out.parent.glob(".tmp*"))


def test_collect_filters_by_return_and_success(config, tmp_path):
    """A random guide is right half of the time; a success earns at most 2.5, half of it for the guide."""
    arguments = ("collect", config, "--episodes", 60, "--seats", "guide=random", "--seats", "walker=expert")
    out = tmp_path / "some.parquet"
    assert invoke(*arguments, "--out", out, "--successes").exit_code == 0
    some = load_episodes(out)
    assert 0 < len(some) < 60 and all(episode.success for episode in some)
    assert {*read_episodes(out).column("episode").to_pylist()} == set(range(len(some)))
    assert invoke(*arguments, "--out", out, "--min-return", "1.5").exit_code == 0
    assert [episode.seed for episode in load_episodes(out)] == [episode.seed for episode in some]
    assert invoke(*arguments, "--out", out, "--min-return", "2").exit_code == 0 and load_episodes(out) == []


def test_collect_is_deterministic(config, tmp_path):
    one, two = tmp_path / "one.parquet", tmp_path / "two.parquet"
    for out in (one, two):
        invoke("collect", config, "--out", out, "--episodes", 3)
    assert read_episodes(one).equals(read_episodes(two))


def test_collect_from_a_vector_env_heeds_its_options(tmp_path):
    out = tmp_path / "games.parquet"
    arguments = ("collect", "matrix", "--seats", "*=random", "--out", out, "--num-envs", 2, "--steps", 40)
    for game, rewards in (("penalty", {-100.0, 0.0, 2.0, 10.0}), ("rock_paper_scissors", {-1.0, 0.0, 1.0})):
        done = invoke(*arguments, "--env", f"game={game}")
        assert done.exit_code == 0 and "80 joint steps" in plain(done.output), done.output
        assert {*pq.read_table(out).column("reward").drop_null().to_pylist()} == rewards
    for options, message in (
        (("--env", "bogus=1"), "bogus"),
        (("--successes",), "--successes is for the episodes of text envs: leave it out; there are --num-envs, --steps"),
        (("--min-return", 9), "--min-return is for the episodes of text envs"),
        (("--episodes", 9), "--episodes is for the episodes of text envs"),
        (("--in-process",), "--in-process is for the episodes of text envs"),
        (("--temperature", 0.3), "networks play as trained, or with --temperature 0"),
    ):
        done = invoke(*arguments, *options)
        assert done.exit_code == 2 and message in plain(done.output), done.output
    done = invoke("collect", "text_kuhn", "--seats", "*=random", "--out", out, "--steps", 9)
    assert done.exit_code == 2 and "--steps is for vector envs: leave it out; there are --episodes" in plain(
        done.output
    )


# ---- play


def test_person_plays_a_seat_in_the_terminal(config):
    """The walker observes the guide's bit at the end of its prompt, and must answer the other bit."""
    done = invoke("play", config, "--seat", "walker", "--seats", "guide=expert", input="x\n")
    assert done.exit_code == 0 and "[w]" in done.output and "walker (you)" in plain(done.output)
    heard = done.output.split("[w]\n", 1)[1].splitlines()[0][-1]
    won = invoke("play", config, "--seat", "walker", "--seats", "guide=expert", input=f"{1 - int(heard)}\n")
    assert "success yes" in plain(won.output.replace("│", ""))


def test_legal_actions_are_shown(config):
    done = invoke("play", "text_kuhn", "--seats", "player_1=random", input="pass\n" * 3)
    assert done.exit_code == 0 and "(pass, bet)" in done.output


def test_rules_and_answer_format_are_shown_to_a_person():
    compact = ("--env", "rendering=compact", "--env", "team=planner_executor")
    output = plain(invoke("play", "plan_path", *compact, "--seats", "executor=expert", input="r1 c1\n").output)
    assert "a walker (@) must reach the goal" in output and "for example: #### r2 c3 r4 c3" in output
    assert "r2 c3 is the cell in row 2 and column 3" in output
    full = plain(invoke("play", "plan_path", "--env", "rendering=ascii", "--env", "team=single", input="up\n").output)
    assert full.count("a walker (@) must reach the goal") == 1  # in the role's prompt only
    assert "Answer with exactly one of the words" in plain(invoke("play", "text_kuhn", input="pass\n" * 3).output)


def test_giving_up_prints_no_traceback(config):
    done = invoke("play", config, "--seat", "guide", input="")
    assert done.exit_code == 2 and "ended early" in plain(done.output)


def test_browser_page_is_for_one_person():
    done = invoke("play", "text_kuhn", "--seats", "player_1=human", "--browser")
    assert done.exit_code == 2 and "one person can play at the page" in plain(done.output)


def test_vector_envs_are_refused_for_people():
    done = invoke("play", "kuhn_poker")
    assert done.exit_code == 2 and "whose seats take arrays" in plain(done.output)
