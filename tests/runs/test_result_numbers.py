"""What is shown of evaluations: the team's reward where no seat earns any, and intervals over different instances."""

import pytest
from helpers.command_line import palestra as command

import palestra as pl
from palestra.api.console import console
from palestra.core.types import Episode, Node, Step
from palestra.dashboard.catalog import CatalogRun
from palestra.dashboard.run_status import list_entry
from palestra.envs import Env, make_env
from palestra.evaluation.report.page import metric_tiles
from palestra.evaluation.report.plot import FigureSpec, draw_figure
from palestra.evaluation.report.run_charts import run_charts
from palestra.evaluation.report.run_report import summary_table
from palestra.evaluation.report.tables import eval_table
from palestra.runs.headline import eval_interval, format_eval, format_return, paid_seats, shows_return
from palestra.runs.series import RunLogs, success_interval
from palestra.text.rollouts.metrics import episode_metrics, seat_returns

ROWS = [{"prompt": f"Answer in {n} characters.", "length": n} for n in range(3, 23)]


@pytest.fixture(autouse=True)
def wide_console(monkeypatch):
    """A console whose lines do not wrap the words of the training bar."""
    monkeypatch.setattr(console, "width", 200)


def train(env, root, **options):
    return pl.train(
        env=env,
        policies={"default": pl.Lora("tiny", rank=2, sampling={"max_tokens": 4})},
        algorithm=pl.GRPO(group_size=4, branch_at="root"),
        steps=1,
        episodes=4,
        root=root,
        **options,
    )


def test_team_reward_leads_where_no_seat_earns_any(tmp_path, capsys):
    """The README's way: a reward function that returns a number."""
    prompts = pl.Prompts(ROWS, reward=lambda row, answer: -abs(len(answer) - row["length"]))
    run = train(prompts, tmp_path, evals={"test": {"episodes": 2, "env": {"split": "test"}}})
    printed = " ".join(capsys.readouterr().out.split())
    line = run.evals.iloc[-1].dropna().to_dict()
    value = f"{line['team_return']:.2f}"
    assert line["return"] == line["team_return"] < 0 and f"return {value} of 2 episodes" in printed
    listed = command("runs", "--root", str(tmp_path))
    assert f"test {value}" in " ".join(listed.split())
    logs = RunLogs(run.path)
    assert value in eval_table(logs) and "return of agent" not in eval_table(logs)
    assert "return" in next(str(cell) for cell in summary_table(run.path).columns[0].cells)
    (chart,) = [chart for chart in run_charts(logs) if chart.title.startswith("returns")]
    assert [curve.series.y[-1] for curve in chart.curves if curve.has_markers] == [line["return"]]
    assert "training return" in printed and "training return -" in printed.replace("(best of 4)", "")


def test_published_card_shows_the_return(tmp_path):
    run = train(pl.Prompts(ROWS, lambda row, answer: float(len(answer))), tmp_path, evals={"test": {"episodes": 2}})
    from palestra.api.agents.model_card import _index, _row

    lines = [dict(line) for line in RunLogs(run.path).evals["test"]]
    rows = "\n".join(_row("test", lines))
    assert format_return(lines[-1]) in rows and "return of agent" not in rows
    assert [m["type"] for entry in _index("test", lines[-1], {}) for m in entry["metrics"]] == ["return"]


def test_seats_that_earn_are_shown_beside_the_team():
    line = {"return": 2.5, "team_return": 2.0, "returns": {"a": 1.0, "b": 0.0}, "returns_ci95": {"a": 0.1, "b": 0.0}}
    assert paid_seats(line) == ["a"] and format_eval(line) == "2.50" and shows_return(line)
    assert not shows_return(line | {"success": 0.5})
    assert paid_seats({"returns": {"a": 0.0, "b": 0.0}}) == ["a", "b"]  # networks, or nobody earned anything
    assert paid_seats(line | {"returns_ci95": {"a": 0.1, "b": 0.2}}) == ["a", "b"]  # a mean of 0


class Duel(Env):
    """What one seat earns the other loses."""

    name = "duel"
    seats = ("left", "right")

    def reset(self, seed: int) -> Step:
        return Step({"left": str(seed), "right": str(seed)})

    def step(self, actions: dict[str, str]) -> Step:
        reward = 1.0 + len(actions["left"]) % 3
        return Step({}, {"left": reward, "right": -reward})


@pytest.mark.parametrize("names", [("left", "right"), ("one", "two")])
def test_opponents_have_no_common_return(tmp_path, capsys, names):
    """It would be 0.00 whatever they learn."""
    policy = pl.Lora("tiny", rank=2, sampling={"max_tokens": 4})
    policies = {"one": policy, "two": policy} if "one" in names else {"default": policy}
    seats = {"left": "one", "right": "two"} if "one" in names else {}
    algorithm = pl.GRPO(group_size=4, branch_at="root")
    env = {"type": f"{__name__}:Duel"}
    config = {
        "env": env,
        "policies": policies,
        "seats": seats,
        "algorithm": algorithm,
        "evals": {"test": {"episodes": 4}},
    }
    run = pl.train(**config, steps=1, episodes=4, root=tmp_path)
    printed = " ".join(capsys.readouterr().out.split())
    logs = RunLogs(run.path)
    line = logs.evals["test"][-1]
    own = [line[f"return.{name}"] for name in names]
    assert own[0] == -own[1] == line["returns"]["left"] > 0
    wanted = f"{names[0]} {own[0]:.2f} {names[1]} {own[1]:.2f}"
    assert format_eval(line) == wanted and f"test {wanted}" in printed
    for text in (printed, eval_table(logs), metric_tiles(logs, logs.config)):
        assert " 0.00 " not in text and ">0.00<" not in text and "return 0" not in text
    (chart,) = [chart for chart in run_charts(logs) if chart.title.startswith("returns")]
    assert all(curve.series.y.any() for curve in chart.curves)
    entry = list_entry(CatalogRun(run.path.parent, run.path.name), {})
    assert entry["headline"] == f"test {wanted}" and entry["return"] is None
    assert "return" not in entry["evals"]["test"]
    told = draw_figure([run.path], FigureSpec(), tmp_path / "figure.svg")
    assert f"1 runs, return.{names[0]} {own[0]:.4g} at the end" in told[0]


class Breaking(Env):
    """Held-out episodes of which the first `broken` fail."""

    name = "breaking"
    seats = ("agent",)

    def __init__(self, broken: int = 0, split: str = "train") -> None:
        self.broken = broken if split == "test" else 0

    def reset(self, seed: int) -> Step:
        if seed < self.broken:
            raise RuntimeError("broken")
        return Step({"agent": str(seed)})

    def step(self, actions: dict[str, str]) -> Step:
        return Step({}, {"agent": float(len(actions["agent"]) % 3)}, info={"success": True})


@pytest.mark.parametrize("broken", [3, 4])
def test_failed_episodes_are_in_no_number(tmp_path, capsys, broken):
    """The number of instances beside a result is that of the others; without others there is no result."""
    env = {"type": f"{__name__}:Breaking", "broken": broken}
    run = train(env, tmp_path, evals={"test": {"episodes": 4, "env": {"split": "test"}}}, max_failed=1.0)
    printed = " ".join(capsys.readouterr().out.split())
    assert f"of 4 episodes, {broken} failed" in printed
    logs = RunLogs(run.path)
    line = logs.evals["test"][-1]
    table = summary_table(run.path)
    titles = [str(cell) for cell in table.columns[0].cells]
    assert "test: failed episodes" in titles
    if broken == 3:
        assert line["success"] == 1.0 and "test: success of 1" in titles
        assert "<td>1</td>" in eval_table(logs)
        return
    assert not {"success", "return", "team_return", "steps_per_episode"} & set(line)
    assert format_eval(line) == "" and "0.0%" not in printed and "0.0%" not in eval_table(logs)
    assert "0.00" not in metric_tiles(logs, logs.config)


def test_repeated_instances_count_once(tmp_path):
    """100 episodes of two prompts, of which one is always solved."""
    rows = [{"prompt": f"size 4 you r{n % 4} c{n // 4} goal r2 c1"} for n in range(16)]
    held = sorted({row["prompt"] for row in pl.Prompts(rows, reward=lambda row, answer: 0.0).rows["test"]})
    assert len(held) == 2

    def reward(row, answer):
        return row["prompt"] == held[0] if row["prompt"] in held else len(answer) % 2 == 0

    evals = {"test": {"episodes": 100, "env": {"split": "test"}}, "twice": {"episodes": 50, "samples": 2}}
    evals["twice"]["env"] = {"split": "test"}
    run = train(pl.Prompts(rows, reward), tmp_path, evals=evals)
    lines = {name: own[-1] for name, own in RunLogs(run.path).evals.items()}
    for line in lines.values():
        assert line["instances"] == 2 and line["success"] == 0.5
        assert success_interval(line) == "50.0% [9.5%, 90.5%]"
        assert eval_interval(line)[0] == pytest.approx(0.0945, abs=1e-3)
        assert line["return_ci95"] == pytest.approx(1.96 * 0.5)  # values 0 and 1: deviation sqrt(1/2), over sqrt(2)
        assert len(line["outcomes"]) == 2
    assert lines["twice"]["pass_at_k"] == {"1": 0.5, "2": 0.5}
    assert lines["twice"]["pass_at_k_ci95"]["1"] == pytest.approx(1.96 * 0.5)
    found = run.evaluate(split="test", episodes=10).metrics
    assert found["instances"] == 2 and found["return_ci95"] == pytest.approx(1.96 * 0.5)


def test_files_of_problems_repeat_their_rows(tmp_path):
    """Envs that read files say which row a seed gives; generated problems are told apart by their seed."""
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(f'{{"question": "{n} + 1?", "answer": "{n + 1}"}}\n' for n in range(3)))
    math = make_env("math", path=str(questions), split="all")
    assert [math.instance_of(seed) for seed in range(5)] == [0, 1, 2, 0, 1]
    assert make_env("math").instance_of(7) == 7


def test_rows_drawn_at_random_are_instances(tmp_path):
    """Seeds that draw the same secret, topic, thing or question have one instance, and others have others."""
    topic = '{{"topic": "Motion {0}.", "pro": ["p{0}", "q{0}"], "con": ["c{0}"]}}\n'
    (tmp_path / "topics.jsonl").write_text("".join(topic.format(n) for n in range(3)))
    debate = {"topics": str(tmp_path / "topics.jsonl"), "split": "all"}
    shown = {
        "guess_number": lambda env: env.secret,
        "twenty_questions": lambda env: env.secret,
        "describe_guess": lambda env: env.instance.thing,
        "debate": lambda env: env.topic.text,
        "tools": lambda env: (env.task.question, str(env.task.files)),
    }
    options = {"debate": debate, "tools": {"kinds": ["lookup"]}}
    for name, drawn in shown.items():
        env = make_env(name, **options.get(name, {}))
        keys = {}
        for seed in range(300):
            env.reset(seed)
            keys.setdefault(drawn(env), set()).add(env.instance_of(seed))
        assert all(len(own) == 1 for own in keys.values()), name
        assert len(set.union(*keys.values())) == len(keys) < 300, name


def test_different_instances_are_not_mentioned():
    env = pl.Prompts([{"prompt": str(n)} for n in range(200)], lambda row, answer: 1.0)("test")
    assert len({env.instance_of(i) for i in range(20)}) == 20 and env.instance_of(23) == env.instance_of(3)
    node = Node(0, None, 0, {}, {}, team_reward=1.0, done=True)
    episodes = [Episode("e", i, {"a": "p"}, [node], instance=i) for i in range(3)]
    assert "instances" not in seat_returns(episodes)
    assert seat_returns([*episodes, Episode("e", 9, {"a": "p"}, [node], instance=1)])["instances"] == 3


def test_return_is_the_team_reward_plus_the_mean_of_the_seats():
    node = Node(0, None, 0, {}, {}, {"a": 1.0, "b": 4.0}, 2.0, done=True)
    metrics = episode_metrics([Episode("e", 0, {"a": "p", "b": "q"}, [node])])
    assert metrics["return"] == 4.5 and metrics["team_return"] == 2.0 and "success" not in metrics


def test_partial_success_counts_as_what_it_is():
    episodes = [
        Episode("e", i, {"a": "p"}, [Node(0, None, 0, {}, {}, done=True, info={"success": own})])
        for i, own in enumerate((0.25, True, False))
    ]
    assert episode_metrics(episodes)["success"] == pytest.approx(1.25 / 3)
