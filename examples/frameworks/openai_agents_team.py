"""Two agents of OpenAI's Agents SDK, by its default, the Responses API: a caller with tools, whose events are streamed,
and a checker that answers in a schema.

    OPENAI_BASE_URL=... OPENAI_API_KEY=... python examples/frameworks/openai_agents_team.py
"""

import asyncio

from agents import Agent, AgentsException, Runner, function_tool, set_tracing_disabled
from census import Census, main, number_in
from pydantic import BaseModel

set_tracing_disabled(True)  # else the SDK sends what the agents say, and the key, to OpenAI
TRIES = 2


class Verdict(BaseModel):
    """The number that answers the question."""

    people: int


async def play(census: Census) -> int | None:
    @function_tool
    def search(query: str) -> str:
        """Looks up how many people live in a place."""
        return census.search(query)

    @function_tool
    def calculator(expression: str) -> str:
        """Adds or subtracts two numbers, as in 581 - 323."""
        return census.calculator(expression)

    caller = Agent("caller", instructions="tools agent", tools=[search, calculator], model="caller")
    checker = Agent("checker", instructions="math reasoner", output_type=Verdict, model="checker")
    try:
        running = Runner.run_streamed(caller, census.question, max_turns=5)
        async for _ in running.stream_events():
            pass
    except AgentsException:  # a call that was none, or too many: the checker sees what was found
        pass
    for _ in range(TRIES):
        try:
            return (await Runner.run(checker, census.to_check())).final_output.people
        except AgentsException:
            continue
    plain = checker.clone(output_type=str)  # then a plain number will do
    return number_in((await Runner.run(plain, census.to_check())).final_output)


def solve(census: Census) -> int | None:
    return asyncio.run(play(census))


if __name__ == "__main__":
    main(solve)
