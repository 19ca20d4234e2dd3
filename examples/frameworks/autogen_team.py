"""Two agents of AutoGen: a caller with tools, whose answers are streamed, and a checker that answers in a schema.

OPENAI_BASE_URL=... OPENAI_API_KEY=... python examples/frameworks/autogen_team.py
"""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import TaskResult
from autogen_agentchat.messages import StructuredMessage, TextMessage
from autogen_core.models import ModelFamily, ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient
from census import Census, main, number_in
from pydantic import BaseModel, ValidationError

INFO = ModelInfo(
    vision=False, function_calling=True, json_output=True, structured_output=True, family=ModelFamily.UNKNOWN
)
TRIES = 2


class Verdict(BaseModel):
    """The number that answers the question."""

    people: int


async def say(agent: AssistantAgent, text: str) -> StructuredMessage[Verdict] | TextMessage:
    """An agent's last message, whose events are streamed."""
    async for event in agent.run_stream(task=text):
        if isinstance(event, TaskResult):
            return event.messages[-1]
    raise RuntimeError("the stream has no end")


async def play(census: Census) -> int | None:
    caller = AssistantAgent(
        "caller",
        OpenAIChatCompletionClient(model="caller", model_info=INFO),
        tools=[census.search, census.calculator],
        system_message="tools agent",
        max_tool_iterations=5,
        model_client_stream=True,
    )
    model = OpenAIChatCompletionClient(model="checker", model_info=INFO)
    await say(caller, census.question)
    for _ in range(TRIES):
        checker = AssistantAgent("checker", model, system_message="math reasoner", output_content_type=Verdict)
        try:
            return (await say(checker, census.to_check())).content.people
        except ValidationError:
            continue
    plain = AssistantAgent("checker", model, system_message="math reasoner")  # then a plain number will do
    return number_in((await say(plain, census.to_check())).content)


def solve(census: Census) -> int | None:
    return asyncio.run(play(census))


if __name__ == "__main__":
    main(solve)
