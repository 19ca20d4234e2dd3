"""The page of a run: complete for runs of every kind, and safe for any text of agents."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from helpers.command_line import invoke, palestra, refused

from palestra.core.types import Answer, Episode, Node
from palestra.evaluation.report.episodes import episode_html, pick_samples
from palestra.evaluation.report.page import report_html
from palestra.runs import Run

HOSTILE = (
    "</pre></section><script>alert(1)</script><img src=x onerror=alert(2)>'\"><style>*{display:none}</style>"
    "\x00\u202e&lt;"
)
VOID = {"meta", "img", "source", "br", "hr", "link", "input"}
DRAWN = "data:image/svg+xml;base64,"


class Page(HTMLParser):
    """The contents of a page: tags, attributes and text; tags must be closed in order."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes, self.words = [], [], [], ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data


def loads_nothing(page):
    read = Page(page)
    assert not {"script", "iframe", "object", "link", "base", "form"} & set(read.tags)
    assert not [name for name, _ in read.attributes if name.startswith("on") or name == "href"]
    assert all(value.startswith(DRAWN) for name, value in read.attributes if name in ("src", "srcset"))
    assert "url(" not in page and "@import" not in page and page.count("<style>") == 1
    assert ("http-equiv", "Content-Security-Policy") in read.attributes
    return read


def tree(text="up"):
    """An episode of two joint steps, each with a sibling that was not continued."""
    nodes = []
    for depth in range(2):
        parent = None if depth == 0 else 0
        for k in range(2):
            answer = Answer(f"{text}{depth}{k}", "planner@3", stop_reason="length" if k else "stop")
            node = Node(
                len(nodes), parent, depth, {"planner": f"see {text}"}, {"planner": answer}, {"planner": 0.5 - k}
            )
            node.chosen, node.done, node.team_reward = k == 0, depth == 1 and k == 0, 1.0 if depth else 0.0
            node.advantages = {"planner": 0.25 - k / 2}
            node.info = {"success": True, "note": text} if node.done else {}
            nodes.append(node)
    nodes[2].parent = nodes[3].parent = 0
    return Episode("maze", 7, {"planner": "planner@3"}, nodes)


@pytest.fixture
def run(tmp_path):
    """A run with hostile text in every place where text can be."""
    config = f"name: a\nseed: 3\nsteps: 2\nenv: {{type: maze}}\nalgorithm: {{type: grpo}}\nnote: {HOSTILE[:60]!r}\n"
    with Run.create(tmp_path, config, "a", {"seed": 3}) as run:
        for step, success in ((-1, 0.25), (1, 0.75)):
            returns = {"returns": {HOSTILE: 1.5}, "returns_ci95": {HOSTILE: 0.25}}
            run.log_eval(
                step, f"test{HOSTILE}", {"success": success, "episodes": 100, "steps_per_episode": 3.0} | returns
            )
        for step in range(2):
            run.log_metrics(step, HOSTILE, {"loss": 0.5, "entropy": 1.0 / (step + 1), "kl": None})
            run.log_metrics(step, "team", {"success": 0.5, "team_return": 1.0})
            run.log_timings(step, "team", {"rollout_s": 3.0, "train_s": 1.0, "train_cpu_s": 9.0, "tokens_per_s": 100.0})
        failed = Episode("maze", 8, {"planner": HOSTILE}, error=f"boom {HOSTILE}")
        run.write_episodes(1, [tree(), tree(HOSTILE), failed])
    return run.path


def test_agent_text_is_escaped(run):
    page = report_html(run)
    read = loads_nothing(page)
    assert "<script>alert(1)</script>" in read.words and "\x00" not in page and "\u202e" not in page
    assert page.count("<section") == page.count("</section>")


def test_page_shows_the_contents_of_the_run(run):
    words = Page(report_html(run)).words
    for expected in (
        "25.0% [17.5%, 34.3%]",
        "75.0% [65.7%, 82.5%]",
        "1.50 ± 0.25",
        "palestra0.1.0",
        "seed3",
        "maze by grpo",
    ):
        assert expected in words
    assert re.search(r"rollout\D*26\.075%", words), "3 of 4 seconds, and no CPU seconds, were rollout"
    assert "the best: maze, instance 7" in words and "one that failed: maze, instance 8" in words
    assert "reward +0.5" in words and "advantage +0.25" in words and "1 sibling" in words and "cut off" in words


def test_page_of_a_run_with_stages_and_failed_evaluation_episodes(tmp_path):
    config = "env: {type: maze}\nsteps: 9\nalgorithm: {type: grpo}\nstages: [{algorithm: {type: sft}, steps: 2}, {}]\n"
    with Run.create(tmp_path, config, "a", {}) as run:
        run.log_metrics(3, "team", {"success": 0.5})
        run.log_eval(3, "dev", {"success": 0.5, "episodes": 100.0, "failed": 60.0, "steps_per_episode": 1.0})
    words = Page(report_html(run.path)).words
    assert "maze by sft, then grpo" in words and "4 of 11" in words
    assert "success of 40 [35%, 65%]" in words


def test_command_writes_one_file(run, tmp_path):
    assert f"report: {run}/report.html" in palestra("report", run).replace("\n", "")
    palestra("report", run, "--out", tmp_path / "new" / "page.html", "--episodes", 0)
    page = (tmp_path / "new" / "page.html").read_text()
    assert "Sample episodes" not in page and DRAWN in page
    assert "it has those of: 2" in refused("report", run, "--step", 7)
    assert "is not a run" in refused("report", tmp_path)


def test_run_without_data_has_a_page(tmp_path):
    with Run.create(tmp_path, "{}", "a") as run:
        pass
    page = report_html(run.path)
    loads_nothing(page)
    assert "<h1>a</h1>" in page and "Nothing is recorded yet" in page and "<h2>Curves" not in page


def test_page_names_a_log_that_lost_lines(tmp_path):
    with Run.create(tmp_path, "{}", "a") as run:
        run.log_metrics(0, "team", {"success": 0.5})
        run.checkpoint(0, lambda folder: (folder / "weights").touch())
    log = run.path / "metrics.jsonl"
    assert "Damaged" not in report_html(run.path)
    log.write_bytes(log.read_bytes()[:-9])
    page = report_html(run.path)
    loads_nothing(page)
    assert f"Damaged:</strong> {log} has" in page and "lines are missing" in page


def test_samples_include_best_worst_failed_and_random_episodes():
    def worth(value):
        node = Node(0, None, 0, {}, {}, {"a": value}, done=True)
        return Episode("e", int(10 * value), {"a": "a@0"}, [node])

    episodes = [worth(i / 10) for i in range(9)] + [Episode("e", 99, {"a": "a@0"}, error="x")]
    chosen = pick_samples(episodes, 5, seed=1)
    assert [episode.seed for _, episode in chosen[:3]] == [8, 0, 99] and len({e.seed for _, e in chosen}) == 5
    assert [e.seed for _, e in pick_samples(episodes, 5, 1)] == [e.seed for _, e in chosen]
    assert (
        pick_samples([], 5, 0) == []
        and len(pick_samples(episodes[:1], 5, 0)) == 1
        and len(pick_samples(episodes, 2, 0)) == 2
    )


def test_all_trajectories_of_a_tree_are_shown():
    nodes = [Node(0, None, 0, {"a": "?"}, {"a": Answer("first", "a@0")})]
    nodes += [Node(i, 0, 1, {"a": "?"}, {"a": Answer(f"line{i}", "a@0")}, done=True) for i in (1, 2)]
    html = episode_html(Episode("e", 0, {"a": "a@0"}, nodes))
    assert html.count("first") == 1 and "line1" in html and "line2" in html and "2 trajectories" in html
    assert "step 0 · a@0" in html and "step 1 · a@0" in html and "another trajectory, from step 1 on" in html


def test_steps_are_counted_as_done(run):
    assert "3 of the 3 of step 2, as they were sampled" in Page(report_html(run, step=2)).words  # of step-000001


def test_policy_table_names_its_log_lines(run):
    read = Page(report_html(run)).words
    assert "first and last line of 2" in read


@pytest.mark.slow
def test_vector_and_population_runs_have_pages(tmp_path):
    small = ("--root", tmp_path, "--backend", "inline", "--set", "population.iterations=1")
    palestra(
        "train", "configs/populations/kuhn_psro.yaml", "--name", "pop", *small, "--set", "population.env_steps=2000"
    )
    words = loads_nothing(report_html(tmp_path / "pop")).words
    assert "Who beats whom" in words and "player_0-1" in words and "mixture of player_0" in words
    palestra("train", "configs/games/two_step_qmix.yaml", "--name", "g", "--root", tmp_path, "--set", "env_steps=2000")
    words = loads_nothing(report_html(tmp_path / "g")).words
    assert "held_out" in words and "env steps" in words
    palestra("plot", tmp_path / "pop", "--metric", "nash_conv", "--out", tmp_path / "p.svg")
    assert "Who beats whom" not in Path(tmp_path / "p.svg").read_text()
    (tmp_path / "file").touch()
    done = invoke("report", run, "--out", tmp_path / "file" / "page.html")
    assert done.exit_code == 1 and "file" in done.stderr and "is not as palestra writes it" not in done.stderr
