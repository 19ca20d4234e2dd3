"""Real chat templates, read from the installed package `trl`, with tokenizers that know their special tokens."""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKEN = re.compile(
    r"<\|[^<>|\s]+?\|>|<｜[^<>]+?｜>|<\|[a-z_\"]+>|<[a-z_]+\|>|<\|\"\|>|"
    r"<(?:start_of_turn|end_of_turn|bos|eos|s|/s|think|/think|tool_call|/tool_call|image|end_of_utterance)>|"
    r"\[(?:INST|/INST|TOOL_CALLS|TOOL_RESULTS|/TOOL_RESULTS|AVAILABLE_TOOLS|/AVAILABLE_TOOLS|ARGS)\]"
)
PLAIN_TOKENS = {"<think>", "</think>", "<tool_call>", "</tool_call>"}  # one token, but no special one
ENDS = (
    "<|im_end|>",
    "<|return|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<turn|>",
    "<|END_OF_TURN_TOKEN|>",
    "<｜end▁of▁sentence｜>",
    "<|endoftext|>",
    "<end_of_utterance>",
)


def template_folder() -> Path:
    """The folder of trl's chat templates; trl is not imported, since it needs more packages."""
    found = find_spec("trl")
    assert found and found.submodule_search_locations, "pip install --no-deps trl==1.16.0"
    return Path(found.submodule_search_locations[0]) / "chat_templates"


def template_names() -> list[str]:
    """The names of trl's copies of templates, without its own variants for training."""
    return sorted(file.stem for file in template_folder().glob("*.jinja") if not file.stem.endswith("_training"))


def tokenizer_of(template: str, *, special=(), end: str | None = None) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with the special tokens that a template spells."""
    spelled = sorted({*SPECIAL_TOKEN.findall(template), *special})
    marks = [token for token in spelled if token not in PLAIN_TOKENS or token in special]
    eos = end or next((token for token in ENDS if token in marks), "</s>")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(["<|pad|>", eos, "<bos>", *marks, *alphabet]))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=eos,
        bos_token="<bos>",
        pad_token="<|pad|>",
        additional_special_tokens=marks,
    )
    fast.add_tokens([AddedToken(token, special=False) for token in spelled if token not in marks])
    fast.chat_template = template
    return fast


@cache
def real_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of one of trl's templates."""
    return tokenizer_of((template_folder() / f"{name}.jinja").read_text(encoding="utf-8"))


# Written after Mistral's documents: calls after a mark, as a list of JSON objects with ids of nine characters (v3), or
# as a name and JSON (v11); tools stand before the last user message; roles must alternate.
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% elif m.role == 'user' %}{% if tools and loop.last or tools and messages[loop.index].role != 'user' %}"
    "[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    '[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]</s>"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
MISTRAL_NAMED = re.sub(
    r"\[TOOL_CALLS\] \[.*?\{% endfor %\}\]</s>",
    "{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"
    "{% endfor %}</s>",
    MISTRAL,
    flags=re.DOTALL,
)
