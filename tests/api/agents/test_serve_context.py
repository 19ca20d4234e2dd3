"""A served agent sees conversations as in training: within its budget of context, and with results of tools cut."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from palestra.api.agents.serve import ServedAgent
from palestra.api.agents.trained_agent import TrainedAgent
from palestra.core.chat import Chat
from palestra.core.http.calls import ChatCall, ChatReply
from palestra.text.build.engines import Engines
from palestra.text.policies.base import Query

LONG = Chat(
    (
        {"role": "user", "content": "look up 1"},
        *(
            message
            for i in range(6)
            for message in (
                {"role": "assistant", "content": f"call {i}"},
                {"role": "tool", "content": f"result {i} ".ljust(40, "abcdefgh"[i])},
            )
        ),
    )
)


async def last_two(messages, limit, count_tokens):
    """A user's function, as a coroutine."""
    await asyncio.sleep(0)
    assert count_tokens(messages[:1]) < count_tokens(messages)
    return [messages[0], *messages[-2:]]


def served(base: Path, context: dict[str, Any], **more: Any) -> ServedAgent:
    settings = {"context": context, "sampling": {"max_tokens": 6}, **more}
    return ServedAgent(TrainedAgent("agent", 0, base, "model", settings, role="look up"), Engines("cpu", 8))


def answers(agent: ServedAgent, chat: Chat) -> tuple[ChatReply, Any]:
    """The served answer to a conversation without its role, and the policy's own with it, of one seed."""

    async def both() -> tuple[ChatReply, Any]:
        reply = await agent.answer(ChatCall("agent", chat, {"seed": 5}))
        framed = Chat(({"role": "system", "content": "look up"}, *chat.messages))
        (own,) = await agent.policy.act(Query("", framed, seed=5))
        return reply, own

    return asyncio.run(both())


@pytest.mark.parametrize(
    "context",
    [
        {"max_tokens": 240},
        {"max_tokens": 240, "max_tool_tokens": 16, "target": 0.8},
        {"max_tool_tokens": 16},
        {"max_tokens": 240, "compress": f"{__name__}:last_two"},
    ],
    ids=str,
)
@pytest.mark.parametrize("more", [{}, {"system": "be brief"}], ids=str)
@pytest.mark.few(4)
def test_served_prompts_are_those_of_the_policy(base: Path, context: dict[str, Any], more: dict[str, Any]) -> None:
    agent = served(base, context, **more)
    reply, own = answers(agent, LONG)
    assert (reply.text, reply.token_counts) == (own.text, (len(own.prompt_ids), len(own.token_ids)))
    whole, _ = answers(served(base, {}, **more), LONG)
    assert reply.token_counts and whole.token_counts
    assert reply.token_counts[0] != whole.token_counts[0]  # with byte tokens the mark of a cut is longer than the cut
    assert "max_tokens" not in context or reply.token_counts[0] <= context["max_tokens"]


def test_conversation_that_cannot_be_shortened_is_refused(base: Path) -> None:
    agent = served(base, {"max_tokens": 40})
    with pytest.raises(ValueError, match=r"the agent's budget is 40 \(context.max_tokens\)"):
        asyncio.run(agent.answer(ChatCall("agent", LONG)))
