"""Endpoint policies at the context limit of a served model: a real HTTP server, and truncated trees."""

import asyncio

import pytest
from core.http.test_chat_client import FINE, Script
from helpers.toys import Whisper

from palestra.core.failures import ContextLengthExceeded
from palestra.core.http.chat_client import EndpointError
from palestra.text.policies.base import Query
from palestra.text.policies.endpoint import EndpointConfig, EndpointPolicy
from palestra.text.rollouts.tree_rollout import Branching, EpisodeRunner, EpisodeSpec

OPENAI = {
    "error": {
        "message": "Your input exceeds the limit of this model.",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }
}
VLLM = {
    "error": {
        "message": "This model's maximum context length is 32 tokens. However, you requested 40 tokens",
        "type": "BadRequestError",
        "param": "input_tokens",
        "code": 400,
    }
}
OLD_VLLM = {"object": "error", "message": "This model's maximum context length is 32 tokens.", "code": 400}
OTHER = {"error": {"message": "temperature must be at most 2", "type": "invalid_request_error", "code": None}}


def policy(server: Script, **options: object) -> EndpointPolicy:
    return EndpointPolicy("far", EndpointConfig(url=server.url, model="m", **options))


@pytest.mark.parametrize("refusal", [OPENAI, VLLM, OLD_VLLM], ids=["openai", "vllm", "old vllm"])
def test_a_refused_prompt_exceeds_the_context(refusal):
    with Script((400, refusal)) as server, pytest.raises(ContextLengthExceeded, match="lower max_tokens"):
        asyncio.run(policy(server).act(Query("r", "x")))
    assert len(server.heard) == 1


@pytest.mark.parametrize("reply", [(400, OTHER), (400, "no"), (400, []), (401, OPENAI)], ids=str)
def test_other_refusals_are_errors_of_the_endpoint(reply):
    with Script(reply) as server, pytest.raises(EndpointError, match=f"answered HTTP {reply[0]}"):
        asyncio.run(policy(server).act(Query("r", "x")))


def test_the_key_is_not_in_the_error(monkeypatch):
    monkeypatch.setenv("TEST_KEY", "sk-very-secret")
    refusal = {"error": VLLM["error"] | {"message": "maximum context length, sk-very-secret"}}
    with Script((400, refusal)) as server, pytest.raises(ContextLengthExceeded) as error:
        asyncio.run(policy(server, key_env="TEST_KEY").act(Query("r", "x")))
    assert "***" in str(error.value) and "secret" not in repr(error.value) + repr(error.value.__cause__)


def test_a_trajectory_at_the_endpoint_context_limit_is_truncated_and_scored():
    """The third answer is refused; the two turns before it are kept."""
    with Script((200, FINE), (200, FINE), (400, VLLM)) as server:
        team = {"guide": policy(server), "walker": policy(server)}
        arena = EpisodeRunner(lambda: Whisper(turns=4), "whisper")
        (episode,) = asyncio.run(arena.play_all([EpisodeSpec(0, team, 0)], Branching()))
    assert episode.error is None and len(episode.nodes) == 2
    assert episode.nodes[-1].truncated and episode.nodes[-1].info["context_full"]


def test_an_answer_cut_at_the_limit_of_its_tokens_is_marked_as_cut():
    cut = {"choices": [{"message": {"role": "assistant", "content": "and then"}, "finish_reason": "length"}]}
    with Script((200, cut), (200, FINE)) as server:
        answers = [asyncio.run(policy(server).act(Query("r", "x")))[0] for _ in range(2)]
    assert [answer.stop_reason for answer in answers] == ["length", "stop"] and answers[0].text == "and then"


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_the_thought_of_an_endpoint_is_kept_beside_the_text(field):
    message = {"role": "assistant", "content": "4", field: "two and two"}
    with Script((200, {"choices": [{"message": message, "finish_reason": "stop"}]})) as server:
        (answer,) = asyncio.run(policy(server).act(Query("r", "2 + 2?")))
    assert (answer.text, answer.thought, answer.stop_reason) == ("4", "two and two", "stop")


@pytest.mark.parametrize(
    ("content", "read"),
    [
        ("<think>\ntwo and two\n</think>\n\n4", ("4", "two and two")),
        ("two and two</think>4", ("4", "two and two")),
        ("<think>two and", ("", "two and")),
        ("4 <think>no</think>", ("4 <think>no</think>", "")),
    ],
)
def test_a_thought_that_a_server_writes_into_the_content_is_apart(content, read):
    with Script((200, {"choices": [{"message": {"role": "assistant", "content": content}}]})) as server:
        (answer,) = asyncio.run(policy(server).act(Query("r", "2 + 2?")))
    assert (answer.text, answer.thought) == read


@pytest.mark.parametrize("thought", [{"reasoning_content": "two and"}, {}], ids=["shown", "hidden"])
def test_an_answer_cut_inside_its_thought_is_empty_and_asked_for_once(thought):
    cut = {"choices": [{"message": {"role": "assistant", "content": None, **thought}, "finish_reason": "length"}]}
    with Script((200, cut)) as server:
        (answer,) = asyncio.run(policy(server).act(Query("r", "2 + 2?")))
    assert (answer.text, answer.stop_reason) == ("", "length") and len(server.heard) == 1
    assert answer.thought == thought.get("reasoning_content", "")
