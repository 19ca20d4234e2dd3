"""Logs are read from the end of the last read, also if they were truncated in between."""

import json

import pytest

from palestra.runs.metric_log import MetricLog, last_lines


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def add(path, *lines, end="\n"):
    with path.open("a") as file:
        file.write("\n".join(json.dumps(line) for line in lines) + end)


def row(step, value, policy="red"):
    return {"step": step, "policy": policy, "entropy": value, "note": "text", "returns": {"a": value + 1}}


def values(log, key="entropy", name="red"):
    log.refresh()
    steps, found = log.column(name, key)
    return dict(zip(steps.tolist(), found.tolist(), strict=True))


def test_appended_lines_are_read(path):
    log = MetricLog(path, "policy")
    assert values(log) == {}
    add(path, row(0, 1.5), row(0, 2.5, "blue"))
    assert values(log) == {0: 1.5} and values(log, name="blue") == {0: 2.5}
    add(path, row(1, 1.25))
    assert values(log) == {0: 1.5, 1: 1.25} and values(log, "returns/a") == {0: 2.5, 1: 2.25}
    assert log.metric_keys() == {"red": ["entropy", "returns/a"], "blue": ["entropy", "returns/a"]}
    assert log.last_by_name()["red"]["step"] == 1


def test_partial_line_is_read_when_complete(path):
    log = MetricLog(path, "policy")
    add(path, row(0, 1.0))
    whole = json.dumps(row(1, 2.0))
    with path.open("a") as file:
        file.write(whole[:20])
    assert values(log) == {0: 1.0}
    with path.open("a") as file:
        file.write(whole[20:] + "\n")
    assert values(log) == {0: 1.0, 1: 2.0}


def test_truncated_and_regrown_log_is_reread(path):
    log = MetricLog(path, "policy")
    add(path, row(0, 1.0), row(1, 2.0))
    assert values(log) == {0: 1.0, 1: 2.0}
    path.write_text("")
    add(path, row(0, 1.0), row(1, 3.0), row(2, 4.0), row(3, 5.0))
    assert values(log) == {0: 1.0, 1: 3.0, 2: 4.0, 3: 5.0}


def test_unparsable_lines_are_counted(path):
    path.write_text('nonsense\n[1]\n{"step": null, "policy": "red"}\n')
    add(path, row(0, 1.0))
    log = MetricLog(path, "policy")
    assert values(log) == {0: 1.0} and log.num_unparsed == 3


def test_last_lines_reads_the_end_of_a_log(path):
    add(path, *(row(step, float(step), name) for step in range(200) for name in ("red", "blue")))
    found = last_lines(path, "policy", max_bytes=600)
    assert found["red"]["step"] == found["blue"]["step"] == 199
    assert last_lines(path.with_name("none"), "policy") == {}
