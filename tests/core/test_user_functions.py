"""A user's functions and methods that do not fit are refused in one line before a run begins."""

import pytest

import palestra as pl
from palestra.core.types import Step
from palestra.core.user_functions import check_overrides
from palestra.text.algorithms.base import TextAlgorithm

ROWS = [{"prompt": f"say {n}"} for n in range(40)]


class Short(pl.Callback):
    def on_step(self, step):
        """Lacks the metrics."""


class LikeTrl(pl.Callback):
    def on_step_end(self, args, state, control, **more):
        """A hook of another library."""


class Late(pl.Callback):
    async def on_eval(self, step, name, metrics):
        """Would never be awaited."""


class Free(pl.Callback):
    def on_step(self, *what, **more):
        """Takes everything."""


class Stranger:
    def on_step(self, step, metrics):
        """Has no other hook."""


class Unread(TextAlgorithm):
    def loss(self):
        """Lacks @property."""


class Unready(TextAlgorithm):
    def build_samples(self, episodes):
        """Lacks the policy and the state."""


class Passing(TextAlgorithm):
    def finalize_samples(self, samples, learner, state):
        return super().finalize_samples(samples, learner, state)  # which is awaited


class Seedless(pl.Env):
    name = "seedless"
    seats = ("a",)

    def reset(self):
        return Step({"a": "say a"})

    async def step(self, actions):
        return Step({}, {"a": 1.0})


def seedful(self, seed, options=None):
    return Step({"a": "say a"})


CASES = {
    "a function": ({"callbacks": [print]}, "of subclasses of palestra.Callback, with on_step"),
    "no list": ({"callbacks": Short()}, "must be a list of objects"),
    "a class": ({"callbacks": [Free]}, "must be a list of objects"),
    "another class": ({"callbacks": [Free(), Stranger()]}, "must be a list of objects"),
    "too short": ({"callbacks": [Short()]}, "Short.on_step takes (self, step), and is called with (self, step, met"),
    "another hook": ({"callbacks": [LikeTrl()]}, "callback LikeTrl has on_step_end, which is never called: there are"),
    "a coroutine": ({"callbacks": [Late()]}, "callback Late.on_eval is not awaited: write it without async"),
    "a value": ({"algorithm": {"type": f"{__name__}:Unread"}}, "Unread.loss is a method, and is read as a value"),
    "a hook": ({"algorithm": {"type": f"{__name__}:Unready"}}, "build_samples takes (self, episodes), and is called"),
    "an env": ({"env": Seedless}, 'env "seedless": Seedless.reset takes (self), and is called with (self, seed)'),
}


@pytest.mark.parametrize("name", CASES)
def test_what_does_not_fit_is_refused_before_the_run(name, tmp_path):
    parts, says = CASES[name]
    whole = {"env": pl.Prompts(ROWS, lambda row, answer: 1.0), "algorithm": "grpo"} | parts
    with pytest.raises(ValueError) as caught:
        pl.train(policies={"default": pl.Lora("tiny")}, steps=1, root=tmp_path, **whole)
    assert says in str(caught.value) and "\n" not in str(caught.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (lambda answer: 1.0, "takes (answer), and is called with (row, answer)"),
        (3, "must be a function of (row, answer), and is 3"),
        (None, "must be a function of (row, answer), and is None"),
    ],
)
def test_reward_functions_are_checked_where_they_are_given(reward, says):
    with pytest.raises(ValueError) as caught:
        pl.Prompts(ROWS, reward)
    assert says in str(caught.value)


def test_what_fits_is_left_alone():
    check_overrides(Free, "callback")
    check_overrides(Passing, "algorithm")
    check_overrides(type("Wide", (Seedless,), {"reset": seedful}), "env", may_be_coroutines=True)
    pl.Prompts(ROWS, lambda *row_and_answer: 1.0)
    pl.Prompts(ROWS, dict)  # has no signature
