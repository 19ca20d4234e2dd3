"""Writes docs/results-real.md and its plots from the published rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from palestra.evaluation.report.charts import curve_style
from palestra.runs.series import wilson_interval
from results.ledger import provenance
from results.pages import half_interval, moving_mean, read_notes, table, wrapped
from results.real.rates import FILE, is_tuned

Result = dict[str, Any]
RATE_BEFORE = 5e-4  # of rows that do not record theirs
NOTES = Path(__file__).parent / "notes.md"
TITLES = {
    "story": "A story in two parts (`math_relay`, results/real/configs/story_team.yaml)",
    "sums": "Sums of two numbers below 100 (`math_review`, results/real/configs/sums_team.yaml)",
    "tools": "A calculator and a search (`tool_review`, results/real/configs/tools_team.yaml)",
    "chain": "A story in four parts (`math_relay`, results/real/configs/chain_team.yaml)",
    "gemma story": "A story in two parts, with Gemma 3 270M (pretrained; as lines: results/real/configs/lines.jinja)",
    "gemma sums": "Sums of two numbers below 100, with Gemma 3 270M",
    "guess": "A thing described and guessed among eight (`describe_guess`, results/real/configs/guess_team.yaml)",
}
HEAD = """# Results with a real model

Made by `python results/real/run.py --report` from the published rows; without `--report` it measures them again,
some 40 hours of one core, and prints both; `--list` names them. Scripts, configs, notes and rows are in
[results/real/](../results/real/). SmolLM2-135M-Instruct where no other model is named, LoRA rank 16, {episodes:.0f}
held-out instances, greedy answers. *lr* is the learning rate and its schedule. Rows at a linear rate have the settings
of now: all methods of a task have one rate, by a rule (rates.py there), and each adapter has equally many answers per
optimizer step; "(not tuned)" is the rate of the config. Rows at a constant rate were measured before, each with a rate
of its own that was chosen by one run a rate, and an adapter of one role had half the answers of a shared one in a step:
rows of the two kinds are not comparable. One seed: the 95 % Wilson interval over instances. Several: the mean over
seeds with its 95 % interval (Student's t, a spread between runs), and each seed's score. *Complete*: the share of
episodes whose last answer ends before its token limit and states a number (with tools: a number or a call; guessing: a
thing of the list); *right if complete* is the success among these; "–" where it was not counted. *Answers* are those
trained on (with SFT, the expert's). CPU minutes are of training, mean over the seeds that ran on a CPU, on the machine
and under the load of that day: a busy machine takes more of them for the same work.{gpu}"""
GPU = """

{number} of {all} training runs were on a GPU ({name}), in float32 as on the CPU, several at once; they have no CPU
minutes. The second column counts the seeds on each."""
CURVES_SAY = """In rollouts AT-GRPO continues from the best of eight answers on stories: its curve there is above what
an evaluation has."""
KUHN_TITLE = "Kuhn poker by self-play (`text_kuhn`, results/real/configs/text_kuhn_self_play.yaml)"
KUHN_HEAD = """Two adapters, one for each player, learn in slices against the history of the other. NashConv (0 at an
equilibrium) and the mean payoff per game against each opponent (the columns after it; mean over both seats) are exact:
from the probabilities of the two words at each of the twelve information states. The opponents were not trained
against, except the uniform player, the first member of each history. Answers that are neither word are replaced by one
drawn at random."""
SERVICE_TITLE = "Programs on the service"
SERVICE_HEAD = """Programs with an official client of Tinker or MinT, on a server:
`palestra serve --base smollm2 --alias Qwen/Qwen3-0.6B=smollm2`."""
PROGRAMS = {
    "two agents": "`examples/mint_two_agents.py`, two agents that name the last of three words",
    "debate": "`examples/mint_debate.py`, two debaters and a judge, by PPO",
}
PROMPTS_HEAD = """The untrained model on {episodes:.0f} instances of split dev, with as many examples as earlier turns
(the rows above have those of the config). Greedy answers, 95 % Wilson intervals."""
COLUMNS = [
    "",
    "seeds, CPU / GPU",
    "success",
    "by seed",
    "complete",
    "right if complete",
    "answers",
    "CPU minutes",
    "lr",
]


# Ending of the file name, key of the results, title. The second plot has the rows that were evaluated during training.
PLOTS = (("", "curve", "Success in rollouts, mean of 5 steps"), ("-dev", "dev", "Success on split dev"))


def write_report(lines: Sequence[Result], order: Sequence[str], target: Path) -> None:
    """Writes the page `target`: the tables, with methods in `order`, and the notes; and its plots beside it. Raises
    SystemExit if there are no results. Rows that chose learning rates are not shown."""
    untuned = [r for r in lines if not r["name"].rpartition("/")[2].startswith("lr ")]
    results = sorted((r for r in untuned if "shots" not in r), key=lambda r: r["name"])
    scored = [r for r in results if r["task"] in TITLES]
    if not scored:
        raise SystemExit("no result is published: `python results/real/run.py` measures, --publish publishes")
    trained = [r for r in scored if r.get("curve")]
    on_gpu = [r["device"] for r in trained if on_a_gpu(r)]
    gpu = GPU.format(number=len(on_gpu), all=len(trained), name=", ".join(sorted(set(on_gpu)))) if on_gpu else ""
    head = HEAD.format(episodes=scored[0]["episodes"], gpu=gpu)
    head += f"\n\n{provenance(untuned)}"
    page = "\n\n".join("\n".join(wrapped(paragraph)) for paragraph in head.split("\n\n")).splitlines()
    for task, title in TITLES.items():
        own = {method: [r for r in scored if (r["task"], r["method"]) == (task, method)] for method in order}
        rows = [[method, *figures(found)] for method, found in own.items() if found]
        page += ["", f"## {title}", "", *table(COLUMNS, rows)] if rows else []
    page += prompt_section([r for r in untuned if "shots" in r])
    page += ["", "## Over training", ""]
    for name, values, title in PLOTS:
        picture = target.with_name(f"{target.stem}{name}.png")
        if draw(
            [r for r in scored if bool(r.get("dev")) == (values == "dev") and r.get("curve")], values, title, picture
        ):
            page.append(f"![{title}, by training step]({picture.name})")
    page += ["", CURVES_SAY]
    page += kuhn_section([r for r in results if r["task"] == "kuhn"])
    page += service_section([r for r in results if r["task"] == "service"])
    target.write_text("\n".join([*page, "", read_notes(NOTES).strip()]) + "\n")


def figures(results: Sequence[Result]) -> list[str]:
    """The table cells of a method; `results` has one for each seed."""
    trained = [r for r in results if r.get("curve")]
    complete, right = (mean_share(results, key) for key in ("complete", "success_if_complete"))
    on_cpu = [r for r in trained if not on_a_gpu(r)]
    seeds = " ".join(f"{r['success']:.1%}" for r in results) if len(results) > 1 else "–"
    answers = f"{np.mean([r['answers'] for r in trained]):,.0f}" if trained else "–"
    minutes = f"{np.mean([r['train_cpu_minutes'] for r in on_cpu]):.0f}" if on_cpu else "–"
    runs = f"{len(on_cpu)} / {len(trained) - len(on_cpu)}" if trained else "–"
    return [runs, success(results), seeds, complete, right, answers, minutes, rate_cell(trained)]


def rate_cell(trained: Sequence[Result]) -> str:
    """The learning rates of a method's runs and their schedules, and that the rate was not tuned."""
    if not trained:
        return "–"
    rates = {(r.get("lr", RATE_BEFORE), r.get("lr_schedule", "constant")) for r in trained}
    told = ", ".join(f"{rate:g} {schedule}" for rate, schedule in sorted(rates))
    is_current = all("config" in r for r in trained)
    return f"{told} (not tuned)" if is_current and not is_tuned(trained[0]["task"], FILE.read()) else told


def mean_share(results: Sequence[Result], key: str) -> str:
    """Mean of a share over the results; "–" if not all have it."""
    return f"{np.mean([r[key] for r in results]):.1%}" if all(key in r for r in results) else "–"


def on_a_gpu(result: Result) -> bool:
    """True if the result's run was trained on a GPU."""
    return result.get("device", "cpu") != "cpu"


def prompt_section(results: Sequence[Result]) -> list[str]:
    """The section on the untrained model by number of worked examples, as lines."""
    if not results:
        return []
    numbers = sorted({r["shots"] for r in results})
    rows = []
    for task, method in sorted({(r["task"], r["method"]) for r in results}):
        own = {r["shots"]: r for r in results if (r["task"], r["method"]) == (task, method)}
        rows.append([f"{task}, {method}", *(success([own[n]]) if n in own else "–" for n in numbers)])
    head = PROMPTS_HEAD.format(episodes=results[0]["episodes"]).splitlines()
    return ["", "## By number of worked examples", "", *head, "", *table(["", *map(str, numbers)], rows)]


def kuhn_section(results: Sequence[Result]) -> list[str]:
    """The section on self-play in Kuhn poker, as lines: NashConv and payoffs before and after training, NashConv by
    slice, and probabilities of a bet."""
    if not results:
        return []
    names = list(results[0]["payoffs"])
    slices = len(results[0]["nash_conv"])
    before = [signed(results[0]["payoffs_untrained"].get(name, 0.0)) for name in names]
    rows = [["untrained", "–", f"{results[0]['nash_conv_untrained']:.3f}", *before, "–"]]
    rows += [
        [
            f"average of {slices} slices",
            str(r["seed"]),
            f"{r['nash_conv'][-1]:.3f}",
            *(signed(r["payoffs"][name]) for name in names),
            f"{r['train_cpu_minutes']:.0f}",
        ]
        for r in results
    ]
    bets = [f"{text} {share:.2f}" for text, share in results[0]["bets"].items()]
    return [
        *["", f"## {KUHN_TITLE}", "", *KUHN_HEAD.splitlines(), ""],
        *table(["", "seed", "NashConv", *names, "CPU minutes"], rows),
        *["", *(f"NashConv by slice, seed {r['seed']}: {series(r['nash_conv'], 3)}." for r in results)],
        *["", f"Probability of a bet, seed {results[0]['seed']}:", "", *(f"- {line}" for line in bets)],
    ]


def service_section(results: Sequence[Result]) -> list[str]:
    """The section on the programs of examples/ that trained on a server, as lines: losses and shares by epoch."""
    lines = ["", f"## {SERVICE_TITLE}", "", *SERVICE_HEAD.splitlines()] if results else []
    for r in results:
        first, second = ([pair[i] for pair in r["losses"]] for i in (0, 1))
        lines += ["", f"{PROGRAMS[r['method']]} (`{' '.join(r['options'])}`, {r['minutes']:.0f} minutes):", ""]
        if "wins" in r:
            lines.append(f"- debates won by the one that knows, by epoch: {series(r['wins'], 2)}")
        for name, (before, after) in r.get("right", {}).items():
            lines.append(f"- {name}: right before {right(before, r)}, after {right(after, r)}")
        lines += [f"- loss of the first, by epoch: {series(first, 3)}", f"- of the second: {series(second, 3)}"]
    return lines


def signed(value: float) -> str:
    return f"{round(value, 3) + 0.0:+.3f}"  # the sum turns -0.0 into 0.0


def series(values: Sequence[float], digits: int) -> str:
    return " ".join(f"{value:.{digits}f}" for value in values)


def right(share: float, result: Result) -> str:
    """A share of right answers with its 95 % Wilson interval."""
    low, high = wilson_interval(share * result["questions"], result["questions"])
    return f"{share:.0%} [{low:.0%}, {high:.0%}]"


def success(results: Sequence[Result]) -> str:
    """Success with its 95 % interval: over instances for one result (Wilson), over seeds for several (Student's t)."""
    shares = [r["success"] for r in results]
    if len(shares) > 1:
        return f"{np.mean(shares):.1%} ± {half_interval(shares):.1%}"
    low, high = wilson_interval(shares[0] * results[0]["episodes"], results[0]["episodes"])
    return f"{shares[0]:.1%} [{low:.1%}, {high:.1%}]"


def draw(results: Sequence[Result], key: str, title: str, target: Path) -> bool:
    """Draws `key` of the results by step, with a panel for each task; returns False if there is nothing to draw."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    tasks = [task for task in TITLES if any(r["task"] == task for r in results)]
    if not tasks:
        return False
    figure, axes = plt.subplots(1, len(tasks), figsize=(5 * len(tasks), 4.2), constrained_layout=True, squeeze=False)
    styles = {method: curve_style(number) for number, method in enumerate(sorted({r["method"] for r in results}))}
    for task, axis in zip(tasks, axes[0], strict=True):
        own = [r for r in results if r["task"] == task]
        for method in sorted({r["method"] for r in own}):
            colour, line = styles[method]
            curves = [curve(r, key) for r in own if r["method"] == method]
            steps, values = curves[0][0], [y for _, y in curves]
            label = f"{method} ({len(curves)} seed{'s' * (len(curves) > 1)})"
            axis.plot(steps, np.mean(values, 0), line, color=colour, label=label)
            axis.fill_between(steps, np.min(values, 0), np.max(values, 0), color=colour, alpha=0.2)
        axis.set(title=task, xlabel="training step", ylabel=title, ylim=(0, 1.02))
        axis.grid(alpha=0.25)
        axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2, frameon=False)
    figure.savefig(target, dpi=120)
    plt.close(figure)
    return True


def curve(result: Result, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps [T] and success [T] of a result: on split dev, or in rollouts (a moving mean)."""
    if key == "dev":
        steps, success = np.array(result["dev"]).T
        return steps, success
    return np.arange(1, len(result["curve"]) + 1), moving_mean(np.array(result["curve"]), window=5)
