"""What is refused or said of a base's conversations before a run begins."""

import shutil

import pytest
from helpers.chat_templates import real_tokenizer, template_folder

from palestra.core.chat import Chat
from palestra.core.config import validate
from palestra.core.types import Answer
from palestra.engine.conversation.encoder import ChatEncoder
from palestra.text.build.build import build
from palestra.text.config import TextConfig
from palestra.text.policy_configs import FrozenConfig

ASK = {"role": "user", "content": "hello"}
NEEDS_TOOLS = (
    "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
RWKV = (
    "{% for m in messages %}{{ {'user': 'User: ', 'system': 'System: '}.get(m.role, 'Assistant: ') + m.content }}\n\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


def config_of(base, template, algorithm=None):
    guide = {"type": "lora", "base": str(base), "chat_template": template}
    return validate(
        TextConfig,
        {
            "env": {"type": "helpers.toys:Whisper"},
            "policies": {"guide": guide, "walker": {"type": "scripted", "answers": ["0"]}},
            "algorithm": algorithm or {"type": "grpo", "branch_at": "root"},
        },
    )


def test_a_template_that_needs_tools_is_refused_at_the_start(base):
    with pytest.raises(ValueError, match=r"does not take messages of user: .*nothing but conversations with tools"):
        build(config_of(base, NEEDS_TOOLS))


def test_a_world_model_of_answers_that_are_written_anew_is_refused(base):
    """It would predict the answer itself, which the later prompt repeats without its thought."""
    template = str(template_folder() / "qwen3.jinja")
    algorithm = {"type": "sft", "world_model_weight": 1.0}
    with pytest.raises(ValueError, match=r"set policies.guide.history_thoughts: keep"):
        build(config_of(base, template, algorithm))
    config = config_of(base, template, algorithm)
    policies = config.policies | {"guide": config.policies["guide"].model_copy(update={"history_thoughts": "keep"})}
    assert build(config.model_copy(update={"policies": policies})).learners["guide"]


def test_turns_that_end_with_white_space_alone_end_once():
    """As the template of RWKV: an answer may have the line breaks that end a turn, all of them or some."""
    tokenizer = real_tokenizer("qwen3").__class__(tokenizer_object=real_tokenizer("qwen3").backend_tokenizer)
    tokenizer.chat_template, tokenizer.eos_token = RWKV, "<|im_end|>"
    encoder = ChatEncoder(tokenizer)
    prompt = encoder.encode_conversation(Chat((ASK,)))
    for said in (" four", " four\n", " four\n\n", " four\n\n<|im_end|>", " four<|im_end|>"):
        answer = Answer("four", "p", prompt, encoder.encode_text(said))
        following = encoder.encode_next_turn(Chat((ASK,)), answer, [ASK])
        assert tokenizer.decode(following) == "User: hello\n\nAssistant: four\n\nUser: hello\n\nAssistant:"


def test_conversations_of_a_base_on_a_server_are_checked_too(base, tmp_path):
    """Its tokenizer and template are known here."""
    client = pytest.importorskip("palestra.text.tinker.client")
    shutil.copy(base / "config.json", tmp_path)
    real_tokenizer("deepseekv3").save_pretrained(tmp_path)
    engines = client.RemoteEngines(None)
    engines._samplers[str(tmp_path)] = None  # made by a request to the server
    for _ in range(2):
        engines.build_frozen_policy("p", validate(FrozenConfig, {"base": str(tmp_path)}))
    (note,) = engines.notes()
    assert note.startswith(f"conversations of {tmp_path}: ") and "chat template" in note
