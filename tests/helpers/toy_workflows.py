"""Agent programs as users write them, for tests: configs name them as "helpers.toy_workflows:relay"."""

import http.client
import json
import random
import threading
from contextlib import closing
from typing import TypedDict
from urllib.parse import urlsplit

import httpx
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

from palestra.envs.adapters.workflow import WorkflowContext, WorkflowResult


def secret(play: WorkflowContext) -> str:
    """The word of an instance."""
    return random.Random(f"{play.split} {play.seed}").choice(("red", "green", "blue"))


def ask(play: WorkflowContext, model: str, text: str, **more: object) -> httpx.Response:
    """One call by plain HTTP."""
    body = {"model": model, "messages": [{"role": "user", "content": text}], **more}
    headers = {"Authorization": f"Bearer {play.api_key}"}
    return httpx.post(f"{play.base_url}/chat/completions", json=body, headers=headers, timeout=30)


def said(response: httpx.Response) -> str:
    return str(response.raise_for_status().json()["choices"][0]["message"]["content"])


def relay(play: WorkflowContext) -> WorkflowResult:
    """Plain HTTP: a guide names a word, a walker repeats it; each is rewarded for its own part, the team for both."""
    word = secret(play)
    hint = said(ask(play, "guide", f"say {word}"))
    play.add_reward("guide", float(hint == word))
    heard = said(ask(play, "walker", f"repeat {hint}"))
    return WorkflowResult(
        {"walker": float(heard == hint)}, team_reward=float(heard == word), success=heard == word, info={"word": word}
    )


class State(TypedDict):
    word: str
    hint: str
    heard: str


def graph(play: WorkflowContext) -> WorkflowResult:
    """The same in LangGraph, whose nodes are two models of LangChain's."""
    models = {
        seat: ChatOpenAI(model=seat, base_url=play.base_url, api_key=play.api_key, timeout=30) for seat in play.seats
    }
    flow = StateGraph(State)
    flow.add_node("guide", lambda state: {"hint": models["guide"].invoke(f"say {state['word']}").content})
    flow.add_node("walker", lambda state: {"heard": models["walker"].invoke(f"repeat {state['hint']}").content})
    flow.add_edge(START, "guide")
    flow.add_edge("guide", "walker")
    flow.add_edge("walker", END)
    end = flow.compile().invoke({"word": secret(play), "hint": "", "heard": ""})
    return WorkflowResult(team_reward=float(end["heard"] == end["word"]), success=end["heard"] == end["word"])


@tool
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


async def sums(play: WorkflowContext) -> dict[str, float]:
    """A tool-calling agent, asynchronous: two and three are to be added by the tool."""
    model = ChatOpenAI(model="agent", base_url=play.base_url, api_key=play.api_key, streaming=True).bind_tools([add])
    messages: list = [("user", "what is 2 + 3?")]
    first = await model.ainvoke(messages)
    if not first.tool_calls:
        return {"agent": 0.0}
    result = await add.ainvoke(first.tool_calls[0])
    last = await model.ainvoke([*messages, first, result])
    return {"agent": float(last.content == "5")}


def counting(play: WorkflowContext) -> WorkflowResult:
    """Returns what the endpoint tells beside the text."""
    reply = ask(play, "agent", "say much").raise_for_status().json()
    return WorkflowResult(info={"usage": reply["usage"], "choice": reply["choices"][0]})


def forms(play: WorkflowContext) -> WorkflowResult:
    """Asks for JSON, then for anything."""
    heard = [said(ask(play, "agent", "how many?", response_format={"type": "json_object"}))]
    heard.append(said(ask(play, "agent", "sure?")))
    return WorkflowResult(info={"heard": heard})


def restless(play: WorkflowContext) -> dict[str, float]:
    """Makes other model calls each time that it is played."""
    ask(play, "agent", f"{random.random()}")
    ask(play, "agent", "and now?")
    return {"agent": 1.0}


def hanging(play: WorkflowContext) -> dict[str, float]:
    """One episode in ten never returns."""
    if play.seed % 10 == 0:
        threading.Event().wait()
    body = json.dumps({"model": "agent", "messages": [{"role": "user", "content": "yes?"}]})
    with closing(
        http.client.HTTPConnection(urlsplit(play.base_url).netloc)
    ) as line:  # creating one of httpx takes 30 ms
        line.request("POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {play.api_key}"})
        answer = json.load(line.getresponse())["choices"][0]["message"]["content"]
    return {"agent": float(answer == "yes")}


def broken(play: WorkflowContext) -> dict[str, float]:
    raise KeyError("no such thing")


def silly(play: WorkflowContext) -> dict[str, float]:
    return {"nobody": 1.0}
