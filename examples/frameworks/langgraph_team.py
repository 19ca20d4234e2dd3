"""A LangGraph graph of two agents: a caller with tools, whose answers are streamed, and a checker that answers in a
schema, and is asked again once if it does not.

    OPENAI_BASE_URL=... OPENAI_API_KEY=... python examples/frameworks/langgraph_team.py
"""

from census import Census, main, number_in
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import RetryPolicy
from pydantic import BaseModel, ValidationError

UNREADABLE = (OutputParserException, ValidationError)


class Verdict(BaseModel):
    """The number that answers the question."""

    people: int


class State(MessagesState):
    """The caller's conversation, and the verdict."""

    people: int


def solve(census: Census) -> int | None:
    def search(query: str) -> str:
        """Looks up how many people live in a place."""
        return census.search(query)

    def calculator(expression: str) -> str:
        """Adds or subtracts two numbers, as in 581 - 323."""
        return census.calculator(expression)

    tools = [search, calculator]
    caller = ChatOpenAI(model="caller", streaming=True, stream_usage=True).bind_tools(tools)
    checker = ChatOpenAI(model="checker")
    report = checker.with_structured_output(Verdict, method="json_schema")

    def call(state: State) -> dict:
        return {"messages": [caller.invoke(state["messages"])]}

    def check(state: State) -> dict:
        return {"people": report.invoke([SystemMessage("math reasoner"), HumanMessage(census.to_check())]).people}

    graph = StateGraph(State)
    graph.add_node("call", call)
    graph.add_node("tools", ToolNode(tools))
    graph.add_node("check", check, retry_policy=RetryPolicy(max_attempts=2, initial_interval=0.01, retry_on=UNREADABLE))
    graph.add_edge(START, "call")
    graph.add_conditional_edges("call", tools_condition, {"tools": "tools", END: "check"})
    graph.add_edge("tools", "call")
    graph.add_edge("check", END)
    asked = [SystemMessage("tools agent"), HumanMessage(census.question)]
    try:
        return graph.compile().invoke({"messages": asked}, {"recursion_limit": 12})["people"]
    except (*UNREADABLE, RecursionError):  # then a plain number will do
        return number_in(checker.invoke([SystemMessage("math reasoner"), HumanMessage(census.to_check())]).text)


if __name__ == "__main__":
    main(solve)
