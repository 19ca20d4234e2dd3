"""Conversations of real chat templates: prompts, answers, calls and results are the template's own, or refused.

The references are what `apply_chat_template` makes of the messages, written here by hand for each template's keys."""

import json

import numpy as np
import pytest
from helpers.chat_templates import MISTRAL, MISTRAL_NAMED, real_tokenizer, template_names, tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.core.chat import Chat, parse_assistant_message, render_message, tool_calls_of
from palestra.core.types import Answer
from palestra.engine.conversation.answers import end_tokens
from palestra.engine.conversation.encoder import ChatEncoder
from palestra.engine.conversation.report import check_conversations

NAMES = template_names()
ASK = {"role": "user", "content": "hello"}
MORE = {"role": "user", "content": "and more?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Finds.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "description": "t"}, "count": {"type": "integer"}},
            "required": ["text", "count"],
        },
    },
}
# By template: the tokens of an answer with a call, as the model writes it after its prompt.
CALLS = {
    "qwen2_5": '<tool_call>\n{"name": "find", "arguments": {"text": "a b", "count": 3}}\n</tool_call><|im_end|>',
    "qwen3": '<tool_call>\n{"name": "find", "arguments": {"text": "a b", "count": 3}}\n</tool_call><|im_end|>',
    "qwen3_8": (
        "two\n</think>\n\n<tool_call>\n<function=find>\n<parameter=text>\na b\n</parameter>\n<parameter=count>\n3\n"
        "</parameter>\n</function>\n</tool_call><|im_end|>"
    ),
    "llama3_1": '{"name": "find", "parameters": {"text": "a b", "count": 3}}<|eot_id|>',
    "gptoss": (
        "<|channel|>analysis<|message|>two<|end|><|start|>assistant to=functions.find<|channel|>commentary "
        'json<|message|>{"text": "a b", "count": 3}<|call|>'
    ),
    "glm4moe": (
        "\n<think>two</think>\n<tool_call>find\n<arg_key>text</arg_key>\n<arg_value>a b</arg_value>\n"
        "<arg_key>count</arg_key>\n<arg_value>3</arg_value>\n</tool_call><|observation|>"
    ),
    "gemma4": '<|tool_call>call:find{count:3,text:<|"|>a b<|"|>}<tool_call|><|tool_response>',
    "lfm2_2_5": "<|tool_call_start|>[find(text='a b', count=3)]<|tool_call_end|><|im_end|>",
}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call_0", "type": "function", "function": {"name": "find", "arguments": {"text": "a b", "count": 3}}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call_0", "content": "found 69,947"}


def rendered(tokenizer, messages, tools=(), *, generate=True):
    options = {"tools": list(tools)} if tools else {}
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate, **options)


def ids(tokenizer, text):
    return np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)


@pytest.mark.parametrize("name", NAMES)
def test_no_probe_of_a_real_template_is_wrong(name):
    """Each probe is equal, or what differs or is refused is said."""
    findings = check_conversations(real_tokenizer(name))
    assert len(findings) == 8
    for finding in findings:
        assert finding.verdict == "equal" or len(finding.note) > 20
    assert {"system role", "second turn"} <= {finding.probe for finding in findings if finding.verdict != "refused"}


def test_there_are_templates_of_many_families():
    assert len(NAMES) >= 40
    assert {"gptoss", "gemma4", "glm4moe", "llama3_1", "qwen3", "deepseekv3", "phi3", "cohere2"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_second_prompt_is_the_templates_own(name):
    """After a sampled text, with its end token and without."""
    tokenizer = real_tokenizer(name)
    encoder = ChatEncoder(tokenizer)
    if encoder.renderer.form.has_parts:
        pytest.skip("its messages are parts, not texts")
    prompt = encoder.encode_conversation(Chat((ASK,)))
    assert tokenizer.decode(prompt) == rendered(tokenizer, [ASK])
    before = tokenizer.decode(prompt)
    finished = rendered(tokenizer, [ASK, {"role": "assistant", "content": "four"}], generate=False)
    text = "\n</think>\n\nfour"  # where the prompt has begun a thought that the template's answer does not have
    if finished.startswith(before):
        text = finished[len(before) : finished.index("four")] + "four"
    for end in ("", "<|END_RESPONSE|>" * (name == "cohere2") + encoder.form.end):
        sampled = ids(tokenizer, text + end)
        read = encoder.read(sampled, prompt)
        assert read.text.strip() == "four"
        following = encoder.encode_next_turn(Chat((ASK,)), Answer(read.text, "p", prompt, sampled), [MORE])
        turns = [ASK, {"role": "assistant", "content": "four"}, MORE]
        assert tokenizer.decode(following) == rendered(tokenizer, turns)


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_read_and_results_are_seen(name):
    """What a model writes that obeys its template: the env gets the call, and the next prompt is the template's."""
    tokenizer = real_tokenizer(name)
    encoder = ChatEncoder(tokenizer)
    chat = Chat((ASK,), (TOOL,))
    prompt, sampled = encoder.encode_conversation(chat), ids(tokenizer, CALLS[name])
    read = encoder.read(sampled, prompt, chat.tools)
    (call,) = tool_calls_of(parse_assistant_message(read.text))
    assert (call.name, call.arguments) == ("find", {"text": "a b", "count": 3})
    assert read.thought == ("two" if "two" in CALLS[name] else "") and "two" not in read.text
    assert int(sampled[-1]) in end_tokens(tokenizer)
    answer = Answer(read.text, "p", prompt, sampled, thought=read.thought)
    following = tokenizer.decode(encoder.encode_next_turn(chat, answer, [RESULT]))
    key = "thinking" if name == "lfm2_2_5" else "reasoning_content"
    called = CALLED | ({key: "two"} if read.thought else {})
    assert following == rendered(tokenizer, [ASK, called, RESULT], [TOOL])
    assert following.count("found 69,947") == 1


@pytest.mark.parametrize("template", [MISTRAL, MISTRAL_NAMED], ids=["list", "named"])
def test_calls_of_mistral(template):
    """Ids of nine characters, no system role, and a mark that is a special token."""
    tokenizer = tokenizer_of(template)
    encoder = ChatEncoder(tokenizer)
    chat = Chat(({"role": "system", "content": "be brief"}, ASK), (TOOL,))
    prompt = encoder.encode_conversation(chat)
    assert tokenizer.decode(prompt).count("[INST] be brief\n\nhello[/INST]") == 1
    written = {
        MISTRAL: '[TOOL_CALLS] [{"name": "find", "arguments": {"text": "a b", "count": 3}, "id": "abcdefghi"}]</s>',
        MISTRAL_NAMED: '[TOOL_CALLS]find[ARGS]{"text": "a b", "count": 3}</s>',
    }[template]
    sampled = ids(tokenizer, written)
    read = encoder.read(sampled, prompt, chat.tools)
    assert [call.arguments for call in tool_calls_of(parse_assistant_message(read.text))] == [
        {"text": "a b", "count": 3}
    ]
    following = encoder.encode_next_turn(chat, Answer(read.text, "p", prompt, sampled), [RESULT])
    assert tokenizer.decode(following).startswith(tokenizer.decode(prompt) + written)
    assert "found 69,947" in tokenizer.decode(following)[len(tokenizer.decode(prompt)) + len(written) :]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_cannot_be_read_is_given_to_the_env_as_such(name):
    """It stays a broken call, so that the env can say so; it is neither a final answer nor dropped."""
    tokenizer = real_tokenizer(name)
    encoder = ChatEncoder(tokenizer)
    chat = Chat((ASK,), (TOOL,))
    for mark in ("a b", '"count"', "count:3", "<parameter=count>", "<arg_key>count"):
        if mark in CALLS[name]:
            broken = CALLS[name].split(mark)[0]
    read = encoder.read(ids(tokenizer, broken), encoder.encode_conversation(chat), chat.tools)
    assert "tool_calls" not in parse_assistant_message(read.text)
    assert "<tool_call>" in read.text


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "glm4moe", "gptoss", "lfm2_2_5"])
def test_thoughts_are_apart_and_leave_later_prompts_as_the_template_says(name):
    tokenizer = real_tokenizer(name)
    for mode in ("template", "keep"):
        encoder = ChatEncoder(tokenizer, history_thoughts=mode)
        chat = Chat((ASK,))
        prompt = encoder.encode_conversation(chat)
        sampled = encoder.encode_answer(chat, "four", "two and two")
        key = "thinking" if name == "lfm2_2_5" else "reasoning_content"
        said = {"role": "assistant", "content": "four", key: "two and two"}
        finished = rendered(tokenizer, [ASK, said], generate=False).rstrip("\n")
        assert tokenizer.decode([*prompt, *sampled]) in (finished, finished + encoder.form.end)
        read = encoder.read(sampled, prompt)
        assert (read.text, read.thought) == ("four", "two and two")
        answer = Answer(read.text, "p", prompt, sampled, thought=read.thought)
        following = tokenizer.decode(encoder.encode_next_turn(chat, answer, [MORE]))
        if mode == "template":
            assert following == rendered(tokenizer, [ASK, said, MORE]) and "two and two" not in following
        else:
            assert following.startswith(tokenizer.decode([*prompt, *sampled[:-1]]))


CHANNELS = (  # headers before contents, and no key for thoughts
    "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


@pytest.mark.parametrize("name", ["gptoss", None])
def test_what_stands_before_the_channel_of_the_content_is_no_part_of_it(name):
    tokenizer = real_tokenizer(name) if name else tokenizer_of(CHANNELS)
    encoder = ChatEncoder(tokenizer)
    prompt = encoder.encode_conversation(Chat((ASK,)))
    analysis = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>four<|return|>"
    for thoughts in (["two"], ["two", "and two"]):
        sampled = ids(tokenizer, "".join(map(analysis.format, thoughts)) + final)
        read = encoder.read(sampled, prompt)
        assert read.text == "four" and all(thought in read.thought for thought in thoughts)


THINKING = [name for name in NAMES if ChatEncoder(real_tokenizer(name)).form.thought and name != "qwen3_5_nothink"]


@pytest.mark.parametrize("name", THINKING)
@pytest.mark.few(4)
def test_thoughts_that_follow_each_other_are_apart(name):
    """Ended or not: no env sees the second one."""
    encoder = ChatEncoder(real_tokenizer(name))
    prompt = encoder.encode_conversation(Chat((ASK,)))
    marks = encoder.form.thought
    begun = "" if encoder.tokenizer.decode(prompt).rstrip().endswith(marks.open) else marks.open
    two = f"{begun}\nuno\n{marks.close}{marks.header}\n{marks.open}\ndue\n"
    for written, text in ((two, ""), (f"{two}{marks.close}four", "four")):
        read = encoder.read(ids(encoder.tokenizer, written), prompt)
        assert (read.text, read.thought) == (text, "uno\ndue")


@pytest.mark.parametrize("name", THINKING)
@pytest.mark.few(4)
def test_any_thought_to_imitate_is_written_and_read_back(name):
    """Also one that is equal to the answer or to the question, or that spells special tokens. One in which its answer
    was cut has no end."""
    encoder = ChatEncoder(real_tokenizer(name))
    chat = Chat((ASK,))
    prompt = encoder.encode_conversation(chat)
    for thought in ("two", "four", "hello", f"{encoder.form.end} or {encoder.renderer.special[2]}"):
        answer = encoder.encode_answer(chat, "four", thought)
        read = encoder.read(answer, prompt)
        assert (read.text, read.thought) == ("four", encoder.renderer.harmless(thought))
        cut = encoder.encode_answer(chat, "", thought, ends=False)
        assert len(encoder.missing_thought_end(cut, prompt)) and int(cut[-1]) not in encoder._end_ids


@pytest.mark.parametrize("name", THINKING)
@pytest.mark.few(4)
def test_a_thought_in_a_text_is_the_same_as_one_beside_it(name):
    """In an answer to imitate and in earlier turns."""
    encoder = ChatEncoder(real_tokenizer(name))
    said = {"role": "assistant", "content": "four", "reasoning_content": "two"}
    wanted = encoder.encode_answer(Chat((ASK,)), "four", "two").tolist()
    earlier = encoder.encode_conversation(Chat((ASK, said, MORE))).tolist()
    for text in ("<think>\ntwo\n</think>\n\nfour", "<think>two</think>four"):
        for thought in ("", "two"):
            assert encoder.encode_answer(Chat((ASK,)), text, thought).tolist() == wanted
        told = {"role": "assistant", "content": text}
        assert encoder.encode_conversation(Chat((ASK, told, MORE))).tolist() == earlier
    assert encoder.encode_answer(Chat((ASK,)), "two\n</think>\n\nfour").tolist() == wanted  # the prompt began it


@pytest.mark.parametrize("name", [*THINKING, "qwen3_5_nothink"])
@pytest.mark.few(5)
def test_an_answer_to_imitate_that_would_be_read_otherwise_is_refused(name):
    """Templates drop what stands before </think>, or write the thought twice."""
    encoder = ChatEncoder(real_tokenizer(name))
    chat = Chat((ASK,))
    for text, thought in (("<think>\ntwo", ""), ("<think>two</think>four", "three")):
        with pytest.raises(ValueError, match=r"an answer to imitate (begins|has)"):
            encoder.encode_answer(chat, text, thought)
    close = encoder.form.thought.close
    for text, thought in (("four", f"two {close} and two"), (f"four<think>two{close}", "")):
        try:
            answer = encoder.encode_answer(chat, text, thought)
        except ValueError as error:
            assert "\n" not in str(error)
            continue
        read = encoder.read(answer, encoder.encode_conversation(chat))
        assert (read.text, read.thought) == tuple(map(encoder.renderer.harmless, (text, thought)))


def test_a_text_beside_a_call_that_the_template_leaves_out_is_refused():
    """Llama 3's writes the call alone: the text would not be learned."""
    encoder = ChatEncoder(real_tokenizer("llama3_1"))
    chat = Chat((ASK,), (TOOL,))
    call = render_message(CALLED)
    assert encoder.encode_answer(chat, call).size
    with pytest.raises(ValueError, match=r"is read as the text '' .* not as 'I look'"):
        encoder.encode_answer(chat, f"I look\n{call}")


def test_a_thought_that_does_not_end_is_no_answer():
    tokenizer = real_tokenizer("qwen3")
    encoder = ChatEncoder(tokenizer)
    prompt = encoder.encode_conversation(Chat((ASK,)))
    read = encoder.read(ids(tokenizer, "<think>\nthe answer may be 4"), prompt)
    assert (read.text, read.thought) == ("", "the answer may be 4")


def test_marks_that_are_special_tokens_stay_in_answers():
    """`<tool_call>` and `<think>` are special tokens of some bases."""
    names = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    tokenizer = tokenizer_of(real_tokenizer("qwen3").chat_template, special=names)
    encoder = ChatEncoder(tokenizer)
    chat = Chat((ASK,), (TOOL,))
    prompt = encoder.encode_conversation(chat)
    sampled = ids(tokenizer, f"<think>\ntwo\n</think>\n\n{CALLS['qwen3']}")
    read = encoder.read(sampled, prompt, chat.tools)
    assert read.thought == "two" and parse_assistant_message(read.text)["tool_calls"]
    answer = Answer(read.text, "p", prompt, sampled, thought="two")
    following = tokenizer.decode(encoder.encode_next_turn(chat, answer, [RESULT]))
    assert following == rendered(tokenizer, [ASK, CALLED | {"reasoning_content": "two"}, RESULT], [TOOL])


TURNS = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% for c in m.tool_calls or [] %}CALL{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BARE = "{{ c.function.name }}\n{{ c.function.arguments | tojson }}"  # nothing marks the beginning of a call
TYPED = (  # an attribute says whether a value is a string
    '<invoke name="{{ c.function.name }}">{% for k, v in c.function.arguments.items() %}'
    "<parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">"
    "{{ v if v is string else v | tojson }}</parameter>{% endfor %}</invoke>"
)


def test_a_call_that_nothing_marks_is_refused_and_attributes_of_values_may_vary():
    bare = ChatEncoder(tokenizer_of(TURNS.replace("CALL", BARE)))
    with pytest.raises(ValueError, match="no call of a tool can be read"):
        bare.encode_conversation(Chat((ASK,), (TOOL,)))
    typed = ChatEncoder(tokenizer_of(TURNS.replace("CALL", TYPED)))
    chat = Chat((ASK,), (TOOL,))
    written = (
        '<invoke name="find"><parameter name="text" string="true">7</parameter>'
        '<parameter name="count" string="false">3</parameter></invoke><|im_end|>'
    )
    read = typed.read(ids(typed.tokenizer, written), typed.encode_conversation(chat), chat.tools)
    (call,) = tool_calls_of(parse_assistant_message(read.text))
    assert call.arguments == {"text": "7", "count": 3}


def test_tools_are_refused_where_calls_cannot_be_read():
    encoder = ChatEncoder(real_tokenizer("lfm2"))  # it shows tools, and writes no calls
    with pytest.raises(ValueError, match="no call of a tool can be read"):
        encoder.encode_conversation(Chat((ASK,), (TOOL,)))


@pytest.mark.parametrize(
    "wrong",
    [
        "{{ 1 / 0 }}",
        "{% for i in range(10**7) %}{% endfor %}",
        "{% break %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_fails_in_any_way_is_refused(wrong):
    template = wrong + "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="the chat template of the base does not take messages of user: "):
        ChatEncoder(tokenizer_of(template)).encode_conversation(Chat((ASK,)))


def test_a_message_that_the_template_leaves_out_is_refused():
    """Templates that know no tool role drop its messages: the model would never see the result."""
    silent = (
        "{% for m in messages if m.role != 'tool' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    )
    encoder = ChatEncoder(tokenizer_of(silent + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"))
    prompt = encoder.encode_conversation(Chat((ASK,)))
    answer = Answer("four", "p", prompt, ids(encoder.tokenizer, "four<|im_end|>"))
    with pytest.raises(ValueError, match="leaves out a message of role tool"):
        encoder.encode_next_turn(Chat((ASK,)), answer, [RESULT])
    with pytest.raises(ValueError, match="leaves out a message of role tool"):
        encoder.encode_conversation(Chat((ASK, {"role": "assistant", "content": "four"}, RESULT)))


def test_a_base_without_a_template_gets_its_first_token_and_no_more():
    from tokenizers import processors

    tokenizer = tokenizer_of("", end="<eos>")
    tokenizer.chat_template = None
    number = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", number)]
    )
    encoder = ChatEncoder(tokenizer)
    asked = Chat(({"role": "user", "content": "Q: 21 + 34 = ?\nA:"},))
    prompt = encoder.encode_conversation(asked)
    assert prompt.tolist() == tokenizer("Q: 21 + 34 = ?\nA:")["input_ids"]
    sampled = ids(tokenizer, " 55<eos>")
    following = encoder.encode_next_turn(
        asked, Answer(" 55", "p", prompt, sampled), [{"role": "user", "content": "Q:"}]
    )
    assert tokenizer.decode(following) == "<bos>Q: 21 + 34 = ?\nA: 55\nQ:"


# ---- any call, any message

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text("abc \"'\n<>{}[]é\\", max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1, max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
JSON_FORMS = ("qwen2_5", "qwen3", "llama3_1", "gptoss", "mistral", "lfm2_v2", "gemma4_v5", "diffusion_gemma")
ELEMENT_FORMS = ("qwen3_5_think", "glm4moe", "muse_glimmer", "nemotron_3_nano")  # texts that say nothing of their type


@pytest.mark.parametrize("name", [*JSON_FORMS, *ELEMENT_FORMS])
@given(text=st.text("abc \"'\n<>{}[]é\\", max_size=20), more=VALUES)
@settings(max_examples=40, deadline=None)
def test_any_arguments_come_back(name, text, more):
    """A call with any arguments, as the template writes it, is read back with equal ones."""
    encoder = ChatEncoder(tokenizer_of(MISTRAL) if name == "mistral" else real_tokenizer(name))
    chat = Chat((ASK,), (TOOL,))
    more = [more] if name in ELEMENT_FORMS else more
    function = {"name": "find", "arguments": json.dumps({"text": text, "more": more})}
    said = render_message({"role": "assistant", "content": "", "tool_calls": [{"function": function}]})
    sampled = encoder.encode_answer(chat, said)
    read = encoder.read(sampled, encoder.encode_conversation(chat), chat.tools)
    (call,) = tool_calls_of(parse_assistant_message(read.text))
    assert (call.name, call.arguments) == ("find", {"text": encoder.renderer.harmless(text), "more": more})


@given(
    key=st.text("abcdefgh_", min_size=1, max_size=12),
    value=st.one_of(st.text(min_size=1), st.integers(), st.booleans(), st.none(), st.lists(st.integers())),
)
@settings(max_examples=100, deadline=None)
def test_any_field_of_a_message_is_used_or_refused(key, value):
    encoder = ChatEncoder(real_tokenizer("qwen3"), cache_size=0)
    plain = encoder.encode_conversation(Chat((ASK,))).tolist()
    try:
        same = encoder.encode_conversation(Chat((ASK | {key: value},))).tolist() == plain
    except ValueError as error:
        assert key in str(error) or key in ("role", "content", "tool_calls")
        return
    assert not same or value in (None, [], "") or key in ("name", "tool_call_id", "reasoning", "thinking")


WORDS = st.integers(100, 999).map(lambda number: f"w{number}")
PARTS = st.one_of(
    WORDS.map(lambda text: {"type": "text", "text": text}), st.just({"type": "image_url", "image_url": {}})
)
CONTENTS = st.one_of(WORDS, WORDS, st.just(""), st.none(), st.lists(PARTS, min_size=1, max_size=2))
ANY_CALLS = st.lists(WORDS.map(lambda text: {"function": {"name": "find", "arguments": json.dumps({"text": text})}}))
ASKING = {"role": st.sampled_from(["user", "user", "tool", "system", "developer"]), "content": CONTENTS}
ANSWERING = {"role": st.just("assistant"), "content": CONTENTS}
EXTRA = {"tool_calls": ANY_CALLS, "reasoning_content": WORDS}
MESSAGES = st.one_of(
    st.fixed_dictionaries(ASKING),
    st.fixed_dictionaries(ANSWERING, optional=EXTRA),
    st.fixed_dictionaries(ASKING, optional=EXTRA),
)


def texts_of(content):
    """The texts of a message's content; None for what is no text."""
    return [content] if isinstance(content, str) else [part.get("text") for part in content or ()]


@pytest.mark.parametrize("name", [*CALLS, "deepseekv3", "phi3", "idefics3", "muse_glimmer", None])
@given(messages=st.lists(MESSAGES, min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_any_messages_are_shown_or_refused(name, messages):
    """Only a template itself may leave out thoughts of earlier answers, and a text beside calls (as Llama 3's does)."""
    tokenizer = real_tokenizer(name) if name else tokenizer_of("")
    if name is None:
        tokenizer.chat_template = None
    encoder = ChatEncoder(tokenizer, cache_size=0)
    try:
        prompt = tokenizer.decode(encoder.encode_conversation(Chat(tuple(messages))))
    except ValueError as error:
        assert str(error) and "\n" not in str(error)
        return
    for message in messages:
        calls, thought = message.get("tool_calls") or [], message.get("reasoning_content", "")
        assert all(text is not None and (text in prompt or calls) for text in texts_of(message["content"]))
        assert all(json.loads(call["function"]["arguments"])["text"] in prompt for call in calls)
        assert thought in prompt or encoder.form.rewrites_answers
        assert message["role"] == "assistant" or not (calls or thought)
