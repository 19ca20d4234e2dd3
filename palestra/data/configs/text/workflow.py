"""A team of two agents in LangGraph, trained without changes to the graph: a coder turns a sum into an expression,
which the graph evaluates, and a reasoner gives the final answer.

    palestra train configs/text/workflow.yaml

Only `episode` is for training: it runs the graph once and returns the rewards.
"""

from __future__ import annotations

import random
from typing import TypedDict

try:
    from langchain_core.messages import HumanMessage, SystemMessage
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, StateGraph
except ImportError as error:
    raise ImportError(f"{error}: pip install 'palestra[workflow]' langgraph langchain-openai") from error

from palestra.environments.math.expressions import evaluate
from palestra.envs.adapters.workflow import WorkflowContext, WorkflowResult
from palestra.envs.support.splits import split_of_text


class State(TypedDict, total=False):
    """The state of the graph: each node reads some keys and writes one."""

    question: str
    guess: str  # the reasoner's first answer
    found: str  # the value of the coder's expression
    answer: str


def graph(coder: ChatOpenAI, reasoner: ChatOpenAI) -> StateGraph:
    """Builds the graph: think, calculate, decide."""

    def ask(model: ChatOpenAI, role: str, text: str) -> str:
        return str(model.invoke([SystemMessage(role), HumanMessage(text)]).content)

    def think(state: State) -> State:
        return {"guess": ask(reasoner, "math reasoner", state["question"])}

    def calculate(state: State) -> State:
        return {"found": worth(ask(coder, "math tool", state["question"]))}

    def decide(state: State) -> State:
        asked = f"{state['question']} tool {state['found']} you {state['guess']}"
        return {"answer": ask(reasoner, "math reasoner", asked)}

    flow = StateGraph(State)
    for node in (think, calculate, decide):
        flow.add_node(node.__name__, node)
    for one, other in ((START, "think"), ("think", "calculate"), ("calculate", "decide"), ("decide", END)):
        flow.add_edge(one, other)
    return flow


def worth(expression: str) -> str:
    """The value of an expression as text; "error" if it is not plain arithmetic."""
    try:
        value = evaluate(expression)
    except (SyntaxError, ValueError, ArithmeticError):
        value = None
    return "error" if value is None else str(value)


def question(play: WorkflowContext) -> str:
    """A sum of three numbers, fixed by the instance's seed and of the instance's split."""
    rng = random.Random(f"sum {play.seed}")
    while True:
        a, b, c = (rng.randint(2, 99) for _ in range(3))
        text = f"{a} {rng.choice('+-')} {b} + {c}"
        if split_of_text(text) == play.split:
            return text


def episode(play: WorkflowContext) -> WorkflowResult:
    """Plays one episode: asks both seats by the graph, and pays the coder for its value and the team for the answer."""
    coder, reasoner = (
        ChatOpenAI(model=seat, base_url=play.base_url, api_key=play.api_key, max_retries=0) for seat in play.seats
    )
    asked = question(play)
    truth = worth(asked)
    end = graph(coder, reasoner).compile().invoke({"question": asked})
    right = end["answer"].strip() == truth
    return WorkflowResult({"coder": float(end["found"] == truth)}, team_reward=float(right), success=right)
