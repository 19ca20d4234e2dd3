"""A crew of CrewAI: a caller with tools, and a checker that answers in a schema and is asked again if it does not.

OPENAI_BASE_URL=... OPENAI_API_KEY=... python examples/frameworks/crewai_team.py
"""

import os

os.environ["CREWAI_DISABLE_TELEMETRY"] = os.environ["OTEL_SDK_DISABLED"] = "true"

from census import Census, main, number_in
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from pydantic import BaseModel


class Verdict(BaseModel):
    """The number that answers the question."""

    people: int


def solve(census: Census) -> int | None:
    @tool("search")
    def search(query: str) -> str:
        """Looks up how many people live in a place."""
        return census.search(query)

    @tool("calculator")
    def calculator(expression: str) -> str:
        """Adds or subtracts two numbers, as in 581 - 323."""
        return census.calculator(expression)

    caller = Agent(
        role="tools agent",
        goal="find the number",
        backstory="",
        tools=[search, calculator],
        llm=LLM(model="caller", provider="openai"),
        max_iter=5,
    )
    checker = Agent(
        role="math reasoner",
        goal="check the number",
        backstory="",
        llm=LLM(model="checker", provider="openai", stream=True),
    )
    call = Task(description=census.question, expected_output="a number", agent=caller)
    Crew(agents=[caller], tasks=[call]).kickoff()
    check = Task(description=census.to_check(), expected_output="the number", agent=checker, output_pydantic=Verdict)
    try:
        return Crew(agents=[checker], tasks=[check]).kickoff().pydantic.people
    except ValueError:  # the crew has asked again: a plain number will do
        asked = [{"role": "system", "content": "math reasoner"}, {"role": "user", "content": census.to_check()}]
        return number_in(checker.llm.call(asked))


if __name__ == "__main__":
    main(solve)
