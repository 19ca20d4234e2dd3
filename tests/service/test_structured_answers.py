"""Structured answers of a real server, as OpenAI's own client asks for and reads them.

A small random model is trained to answer one question with one JSON object.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from helpers.processes import serving
from pydantic import BaseModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from palestra.core.chat import Chat
from palestra.engine.conversation.encoder import ChatEncoder

ANSWER = '{"n": 7}'
JSON_OBJECT: Any = {"type": "json_object"}
QUESTION: Any = {"role": "user", "content": "how many?"}
ASK: Any = {"model": "tiny", "messages": [QUESTION], "temperature": 0, "max_tokens": 16}


class Count(BaseModel):
    n: int


class Name(BaseModel):
    n: str


def write_trained(base: Path, folder: Path) -> Path:
    """A folder with the model in `base`, trained to answer "how many?" with ANSWER."""
    model = AutoModelForCausalLM.from_pretrained(base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    prompt = ChatEncoder(tokenizer).encode_conversation(Chat((QUESTION,))).tolist()
    said = [*tokenizer.encode(ANSWER, add_special_tokens=False), tokenizer.eos_token_id]
    ids = torch.tensor([prompt + said])
    labels = torch.tensor([[-100] * len(prompt) + said])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(40):
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Asked:
    """A client of a server with two bases: "tiny", which was trained, and "random"."""

    def __init__(self, url: str) -> None:
        self.client = openai.OpenAI(base_url=f"{url}/oai/api/v1", api_key="any", max_retries=0)
        self.completions = self.client.chat.completions

    def create(self, **options: Any) -> Any:
        return self.completions.create(**ASK | options).choices

    def parse(self, form: type[BaseModel], **options: Any) -> Any:
        return self.completions.parse(**ASK | options, response_format=form).choices[0].message


@pytest.fixture(scope="module")
def asked(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    folder = tmp_path_factory.mktemp("served")
    trained = write_trained(base, folder / "trained")
    with serving(folder / "data", "--base", f"tiny={trained}", "--base", f"random={base}") as url:
        opened = Asked(url)
        yield opened
        opened.client.close()


def test_answer_of_the_form_is_parsed(asked: Asked) -> None:
    message = asked.parse(Count)
    assert message.parsed == Count(n=7) and message.content == ANSWER and message.refusal is None
    assert asked.create(response_format=JSON_OBJECT)[0].message.content == ANSWER


def test_answer_of_another_form_is_a_refusal(asked: Asked) -> None:
    message = asked.parse(Name)
    assert message.parsed is None and message.content is None
    assert message.refusal == "the answer is not of the schema of response_format: $.n: 7 is not of type 'string'"


def test_model_that_writes_no_json_refuses_every_choice(asked: Asked) -> None:
    answers = asked.create(model="random", response_format=JSON_OBJECT, n=3, temperature=1, seed=1)
    assert {choice.message.content for choice in answers} == {None}
    assert all("is no JSON object" in choice.message.refusal for choice in answers)


def test_cut_answer_is_no_answer_of_the_form(asked: Asked) -> None:
    (choice,) = asked.create(response_format=JSON_OBJECT, max_tokens=3)
    assert choice.finish_reason == "length" and choice.message.content is None and choice.message.refusal
    with pytest.raises(openai.LengthFinishReasonError):
        asked.parse(Count, max_tokens=3)


def test_streams_have_the_answer_or_the_refusal(asked: Asked) -> None:
    for form, said in ((Count, ANSWER), (Name, "")):
        with asked.completions.stream(**ASK, response_format=form) as stream:
            message = stream.get_final_completion().choices[0].message
        assert (message.content or "") == said and bool(message.refusal) != bool(said)


def test_form_that_is_not_served_is_refused_in_one_line(asked: Asked) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        asked.create(response_format={"type": "grammar", "grammar": "x"})
    message = refused.value.body["message"]
    assert message.startswith("'response_format' is ") and "send type text, json_object" in message
    assert "\n" not in message
