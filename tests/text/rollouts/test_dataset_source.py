"""Learning from files: conversion of each kind of file, assignment to policies, order, and refused files."""

import asyncio
import json
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.chat_templates import real_tokenizer
from helpers.toys import Spoken, Whisper

from palestra.core.chat import Chat
from palestra.core.config import validate
from palestra.core.types import Answer, Episode, Node
from palestra.engine.conversation.encoder import ChatEncoder
from palestra.engine.sampling.request import max_positions
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.runs.episodes import load_episodes, to_table
from palestra.testing import tiny_lm
from palestra.text.algorithms.dpo import DPO
from palestra.text.algorithms.grpo import GRPO
from palestra.text.algorithms.reward_model import RewardModel
from palestra.text.algorithms.sft import SFT
from palestra.text.config import TextConfig
from palestra.text.policies.lm import LanguagePolicy
from palestra.text.policies.scripted import ScriptedPolicy
from palestra.text.rollouts.dataset import DataConfig, read_data
from palestra.text.rollouts.dataset_source import DatasetSource
from palestra.text.rollouts.sources import STAGE_START_KEY
from palestra.text.rollouts.tree_rollout import Branching, EpisodeRunner, EpisodeSpec


@pytest.fixture(scope="module")
def engine():
    return tiny_lm()


@pytest.fixture(scope="module")
def speaker(engine):
    def make(name="p@3", memory="none", **options):
        encoder = ChatEncoder(engine.tokenizer)
        return LanguagePolicy(name, Sampler(engine), encoder, SamplingConfig(max_tokens=3), history=memory, **options)

    return make


def write_lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path, seat="a", **options):
    return read_data([DataConfig(path=str(path), **options)], seat)


def recorded(path, seats, roles=None, seed=0, **options):
    roles = {"train": {"a": "r", "guide": "g", "walker": "w"}} if roles is None else roles
    return DatasetSource(read(path, **options), lambda: seats, seed, roles)


def play(source, numbers, memory=None):
    return asyncio.run(source.play(numbers, Branching(), {} if memory is None else memory))


def text(policy, token_ids):
    return policy.encoder.tokenizer.decode(token_ids)


# ---- rows of tables


def tree(path, **options):
    """The episodes of a table: (parent, observation, answer, reward, done, success) of each node."""
    (record,) = read(path, **options)
    return [
        [
            (n.parent, n.observations["a"], n.answers["a"].text, n.rewards.get("a"), n.done, n.info.get("success"))
            for n in episode.nodes
        ]
        for episode in record.episodes
    ]


def answers_of(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


def test_completion_rows_become_successful_trajectories(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "2 + 2", "completion": "4"}, {"prompt": "3", "completion": "x"})
    assert tree(path) == [[(None, "2 + 2", "4", 1.0, True, True)], [(None, "3", "x", 1.0, True, True)]]


@pytest.mark.parametrize("label", [True, False, None])
def test_label_says_whether_a_row_succeeded(tmp_path, label):
    """A null, as in a table in which few rows have a label, is none."""
    good, spoken = label is not False, [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x"}]
    rows = ({"prompt": "q", "completion": "x", "label": label}, {"messages": spoken, "label": label})
    for row in rows:
        (((*_, reward, done, success),),) = tree(write_lines(tmp_path / "a.jsonl", row))
        assert (reward, done, success) == (float(good), True, good)


def test_preference_rows_become_two_siblings(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "2 + 2", "chosen": "4", "rejected": "5"})
    assert tree(path) == [[(None, "2 + 2", "4", 1.0, True, True), (None, "2 + 2", "5", 0.0, True, False)]]


def test_message_prompts_become_chat_observations(tmp_path):
    asked, answers = (
        answers_of(("system", "s"), ("user", "2 + 2")),
        (answers_of(("assistant", "4")), answers_of(("assistant", "5"))),
    )
    prompted = {"prompt": asked, "chosen": answers[0], "rejected": answers[1]}
    repeated = {"prompt": "2 + 2", "chosen": asked[1:] + answers[0], "rejected": asked[1:] + answers[1]}
    unprompted = {"chosen": asked + answers[0], "rejected": asked + answers[1]}
    path = write_lines(tmp_path / "a.jsonl", prompted, unprompted)
    seen = Chat(tuple(asked))
    expected = [(None, seen, "4", 1.0, True, True), (None, seen, "5", 0.0, True, False)]
    assert tree(path) == [expected, expected]
    assert [node[1:3] for node in tree(write_lines(path, repeated))[0]] == [("2 + 2", "4"), ("2 + 2", "5")]
    assert tree(write_lines(path, {"prompt": asked, "completion": "4"})) == [expected[:1]]


def test_each_assistant_message_is_a_turn(tmp_path):
    tools = [{"type": "function", "function": {"name": "add"}}]
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    messages = [
        *answers_of(("user", "?")),
        call,
        {"role": "tool", "content": "1"},
        *answers_of(("assistant", "one"), ("user", "ta")),
    ]
    first, second = tree(write_lines(tmp_path / "a.jsonl", {"messages": messages, "tools": tools}))[0]
    spelled = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert first == (None, Chat(tuple(messages[:1]), tuple(tools)), spelled, None, False, None)
    assert second == (0, Chat(tuple(messages[:3]), tuple(tools)), "one", 1.0, True, True)


def test_a_message_of_weight_0_is_seen_and_not_learned(tmp_path):
    spoken = answers_of(("user", "u"), ("assistant", "x"), ("user", "v"), ("assistant", "y"))
    row = {"messages": [message | {"weight": int(message["content"] != "x")} for message in spoken]}
    ((node,),) = tree(write_lines(tmp_path / "a.jsonl", row))
    assert node == (None, Chat(tuple(spoken[:3])), "y", 1.0, True, True)


@pytest.mark.parametrize("written", ["apart", "in the text"])
def test_the_thought_of_a_row_is_learned_as_the_template_writes_it(tmp_path, speaker, written):
    """Under a prompt that begins the thought (as of DeepSeek-R1), which would double or swallow it."""
    said = {"role": "assistant", "content": "4", "reasoning_content": "two and two"}
    if written == "in the text":
        said = {"role": "assistant", "content": "<think>\ntwo and two\n</think>\n\n4"}
    path = write_lines(tmp_path / "a.jsonl", {"prompt": [{"role": "user", "content": "2 + 2"}], "completion": [said]})
    policy = speaker()
    tokenizer = real_tokenizer("qwen3_5_think")
    policy.encoder = ChatEncoder(tokenizer)
    (episode,) = play(recorded(path, {"a": policy}), [0])
    answer = episode.nodes[0].answers["a"]
    whole = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]
    whole[1]["reasoning_content"] = "two and two"
    wanted = tokenizer.apply_chat_template(whole, tokenize=False)
    assert tokenizer.decode([*answer.prompt_ids, *answer.token_ids]) == wanted.rstrip("\n")


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "gemma4_v5", "glm4moe", "lfm2_2_5", "gptoss"])
@pytest.mark.parametrize("weight", [0, 1])
def test_later_prompts_do_not_depend_on_how_a_row_writes_a_thought(tmp_path, speaker, name, weight):
    """Templates drop it from earlier turns where they know it as one; `history_thoughts: keep` keeps its tokens."""
    policy = speaker()
    apart = {"content": "4", "reasoning_content": "two and two"}
    prompts = []
    inline = {"content": "<think>\ntwo and two\n</think>\n\n4"}
    for said, mode in ((apart, "template"), (inline, "template"), (apart, "keep"), (inline, "keep")):
        policy.encoder = ChatEncoder(real_tokenizer(name), history_thoughts=mode)
        first, second, third = answers_of(("user", "2 + 2"), ("user", "and 1?"), ("assistant", "5"))
        row = {"messages": [first, {"role": "assistant", "weight": weight, **said}, second, third]}
        (episode,) = play(recorded(write_lines(tmp_path / "a.jsonl", row), {"a": policy}, {}), [0])
        prompts.append(policy.encoder.tokenizer.decode(episode.nodes[-1].answers["a"].prompt_ids))
    assert prompts[0] == prompts[1] and "two and two" not in prompts[0]
    assert prompts[2] == prompts[3] and ("two and two" in prompts[2]) == bool(weight)


def test_a_thought_that_the_base_cannot_show_is_refused(tmp_path, speaker):
    """Its template shows none: the row would be learned without it, in silence."""
    said = [{"role": "assistant", "content": "4", "reasoning_content": "two and two"}]
    earlier = [{"role": "user", "content": "2 + 2"}, *said, {"role": "user", "content": "and 1?"}]
    for row in ({"prompt": earlier[:1], "completion": said}, {"prompt": earlier, "completion": "5"}):
        source = recorded(write_lines(tmp_path / "a.jsonl", row), {"a": speaker()})
        with pytest.raises(
            ValueError, match=r"a\.jsonl, row 1: a message has a thought \(reasoning_content\), and the"
        ):
            play(source, [0])


def test_rows_longer_than_the_base_are_refused_before_the_run_or_cut(tmp_path, speaker):
    policy = speaker()
    most = max_positions(policy.sampler.engine)
    rows = [{"prompt": "q", "completion": "a"}, {"prompt": "q", "completion": "b" * most}]
    path = write_lines(tmp_path / "a.jsonl", *rows)
    source = recorded(path, {"a": policy})
    with pytest.raises(ValueError, match=rf"a\.jsonl, row 2 has .* tokens, and the base of p@3 takes {most:,}"):
        source.check(SFT(), {"p"})
    cut = recorded(path, {"a": policy}, too_long="cut")
    cut.check(SFT(), {"p"})
    answers = [node.answers["a"] for episode in play(cut, [0, 1]) for node in episode.nodes]
    assert sorted(len(a.prompt_ids) + len(a.token_ids) for a in answers)[-1] == most
    assert sorted(a.stop_reason for a in answers) == ["length", "stop"]


def test_columns_that_nothing_depends_on_are_named(tmp_path):
    (record,) = read(write_lines(tmp_path / "a.jsonl", {"prompt": "q", "completion": "a", "topic": "t", "id": 3}))
    assert record.unused == ("id", "topic")


def test_pairs_of_equal_answers_are_named(tmp_path):
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    path = write_lines(tmp_path / "a.jsonl", pair, pair | {"rejected": "a"}, pair | {"chosen": "b"})
    (record,) = read(path)
    assert record.notes() == [f"{path}: rows whose chosen and rejected are equal teach nothing: 2"]


def test_next_turn_continues_the_tokens_of_the_conversation(tmp_path, speaker):
    path = write_lines(
        tmp_path / "a.jsonl",
        {"messages": answers_of(("user", "u"), ("assistant", "x"), ("user", "v"), ("assistant", "y"))},
    )
    policy = speaker()
    (episode,) = play(recorded(path, {"a": policy}), [0])
    first, second = (node.answers["a"] for node in episode.nodes)
    assert text(policy, second.prompt_ids) == "<|user|>u<|end|><|assistant|>x<|end|><|user|>v<|end|><|assistant|>"
    assert text(policy, second.token_ids) == "y<|end|>" and second.policy == "p@3" and not second.logprobs.any()
    assert second.prompt_ids[: len(first.prompt_ids)].tolist() == first.prompt_ids.tolist()
    samples, figures = SFT(imitate="none", world_model_weight=1.0).build_samples([episode], "p")
    assert [text(policy, s.token_ids) for s in samples] == ["<|user|>v<|end|><|assistant|>"] and figures[
        "world_model_fraction"
    ] == 0.5


def test_text_prompts_are_formatted_as_env_observations(tmp_path, speaker):
    """The prompt, after the role or the policy's own system text."""
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "2 + 2", "completion": "4"})
    for policy, roles, system in (
        (speaker(), None, "<|system|>r<|end|>"),
        (speaker(), {}, ""),
        (speaker(system="be brief"), None, "<|system|>be brief<|end|>"),
    ):
        (episode,) = play(recorded(path, {"a": policy}, roles), [0])
        prompt = text(policy, episode.nodes[0].answers["a"].prompt_ids)
        assert prompt == f"{system}<|user|>2 + 2<|end|><|assistant|>"


def test_tables_are_read_from_json_parquet_folders_and_globs(tmp_path):
    rows = [{"prompt": str(i), "completion": "x"} for i in range(3)]
    (tmp_path / "b.json").write_text(json.dumps(rows[1:2]))
    write_lines(tmp_path / "a.jsonl", rows[0])
    pq.write_table(pa.Table.from_pylist(rows[2:]), tmp_path / "c.parquet")
    (tmp_path / "README.txt").write_text("no table")
    for path in (tmp_path, tmp_path / "*[abc].*"):
        found = [e.nodes[0].observations["a"] for record in read(path) for e in record.episodes]
        assert found == ["0", "1", "2"]


@pytest.mark.parametrize("other", ["b.csv", "c.jsonl.txt", "sub/e.jsonl"])
def test_files_of_a_folder_that_are_not_read_are_refused(tmp_path, other):
    write_lines(tmp_path / "a.jsonl", {"prompt": "q", "completion": "a"})
    (tmp_path / other).parent.mkdir(exist_ok=True)
    write_lines(tmp_path / other, {"prompt": "q", "completion": "a"})
    name = other.partition("/")[0]
    with pytest.raises(ValueError, match=f"also holds {name}, which would be left out: name the files to read"):
        read(tmp_path)


def test_a_file_that_is_named_twice_is_refused(tmp_path):
    write_lines(tmp_path / "a.jsonl", {"prompt": "q", "completion": "a"})
    entries = [DataConfig(path=str(tmp_path / "a.jsonl")), DataConfig(path=str(tmp_path / "*.jsonl"))]
    with pytest.raises(ValueError, match=r"names .*a.jsonl twice, by .*a.jsonl and by .*\*.jsonl: .* count double"):
        read_data(entries, "a")
    other_seat = DataConfig(path=str(tmp_path / "a.jsonl"), seat="b")
    assert [file.seats for file in read_data([entries[0], other_seat], "a")] == [["a"], ["b"]]


def test_rows_without_a_label_beside_labelled_ones_are_refused(tmp_path):
    rows = [{"prompt": "q", "completion": "a", "label": False}, {"prompt": "q", "completion": "b"}]
    path = write_lines(tmp_path / "a.jsonl", *rows)
    with pytest.raises(ValueError, match=r"1 of 2 rows have no label, and the others do: give each true or false"):
        read(path)
    write_lines(path, rows[0], rows[1] | {"label": None})
    with pytest.raises(ValueError, match="1 of 2 rows have no label"):
        read(path)
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}  # a label is another column there, and named as unused
    assert read(write_lines(path, pair | {"label": 1}, pair))[0].unused == ("label",)


@pytest.mark.parametrize("algorithm", [DPO(), RewardModel()])
def test_sides_of_several_answers_are_refused_where_single_ones_are_compared(tmp_path, speaker, algorithm):
    turn = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "go on"}]
    rows = [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": "q", "chosen": [*turn, turn[0]], "rejected": [{"role": "assistant", "content": "b"}]},
    ]
    source = recorded(write_lines(tmp_path / "a.jsonl", *rows), {"a": speaker()}, {})
    with pytest.raises(ValueError, match=r"row 2 compares sides of several answers, .* set algorithm.branch_at: root"):
        source.check(algorithm, {"p"})
    source.check(algorithm.model_copy(update={"branch_at": "root"}), {"p"})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"prompt": "q", "completion": "x", "completion": "y"}', "'completion' is there twice; remove"),
        ("a.json", b'[{"prompt": "q", "completion": "x", "completion": "y"}]', "'completion' is there twice"),
        ("a.jsonl", '{"prompt": "q", "completion": "x"}\n'.encode("utf-16"), "it is not UTF-8: save it as UTF-8"),
    ],
)
def test_rows_with_a_key_twice_or_of_another_encoding_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / name)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "holds no rows"),
        ([{"question": "q", "answer": "a"}], r"row 1 has columns question, answer: give prompt and completion, or"),
        ([{"prompt": "q", "completion": "a"}, {"prompt": "q"}], r"row 2 has columns prompt: give"),
        ([{"prompt": "q", "completion": None}], r"row 1 has columns prompt, completion: give"),
        ([{"messages": [{"role": "user", "content": "u"}]}], "row 1 has no assistant message to learn"),
        ([{"prompt": "q", "completion": 5}], "row 1 holds '5': give text, or a list of"),
        ([{"messages": [{"content": "u"}]}], "row 1 holds .*: give text, or a list of"),
        ([{"chosen": "a", "rejected": "b"}], "row 1 has no prompt"),
        ([{"prompt": "q", "completion": "a", "label": "false"}], "row 1 has the label 'false': give true or false"),
        ([{"prompt": "q", "completion": "a", "images": ["x.png"]}], "row 1 has images, which is not used"),
        (
            [{"prompt": "q", "completion": "a", "chat_template_kwargs": {"enable_thinking": False}}],
            "row 1 has chat_template_kwargs, which is not used: .* are the policy's",
        ),
        ([{"prompt": answers_of(("user", "q"), ("assistant", "a")), "completion": "b"}], "ends within an answer"),
        (
            [{"messages": [{"role": "user", "content": "u", "mood": "sad"}, *answers_of(("assistant", "x"))]}],
            "row 1: messages.0: a message has the field 'mood', which is not used",
        ),
        ([{"prompt": "x", "completion": "\ud800"}], "row 1: .* lone surrogate, .*, which no tokenizer encodes"),
        ([{"messages": [{"role": "assistant", "content": "\ud800"}]}], "row 1: .* lone surrogate"),
        ([{"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]}], "a message of weight 0.5"),
    ],
)
def test_unreadable_rows_are_refused_with_the_reason(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        read(write_lines(tmp_path / "a.jsonl", *rows))


def test_missing_files_are_refused_with_accepted_formats(tmp_path):
    for path in (tmp_path, tmp_path / "none.jsonl", tmp_path / "*.parquet"):
        with pytest.raises(ValueError, match=r"names no file: give a file of \.jsonl, \.json, \.parquet"):
            read(path)
    (tmp_path / "a.parquet").write_text("not parquet")
    with pytest.raises(ValueError, match=r"cannot read .*a\.parquet"):
        read(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"several seats are played: name the seat of its answers, seat: NAME"):
        read(write_lines(tmp_path / "a.jsonl", {"prompt": "q", "completion": "a"}), seat=None)


# ---- recorded episodes


def write_play(path, seats, count=4, turns=1, k=1, arena="train"):
    env = EpisodeRunner(lambda: Whisper(turns=turns), arena)
    matches = [EpisodeSpec(i, seats, i) for i in range(count)]
    played = asyncio.run(env.play_all(matches, Branching("root", k)))
    assert not any(episode.error for episode in played)
    pq.write_table(to_table(0, played), path)
    return path


def scripts():
    return {"guide": ScriptedPolicy(["1", "0"], "big@1"), "walker": ScriptedPolicy(["0"], "big@1")}


def test_answers_without_tokens_are_tokenised_for_the_learner(tmp_path, speaker):
    path = write_play(tmp_path / "a.parquet", scripts(), turns=2)
    guide, walker = speaker("guide@2", memory="conversation"), speaker("walker@0")
    source = recorded(path, {"guide": guide, "walker": walker})
    for episode in play(source, range(4)):
        assert episode.seats == {"guide": "guide@2", "walker": "walker@0"}
        seen = [next(iter(node.observations.values())) for node in episode.nodes]
        answers = [next(iter(node.answers.values())) for node in episode.nodes]
        assert [a.policy for a in answers] == ["guide@2", "walker@0"] * 2
        assert [text(guide, a.token_ids) for a in answers] == ["1<|end|>", "0<|end|>", "0<|end|>", "0<|end|>"]
        first = f"<|system|>g<|end|><|user|>{seen[0]}<|end|><|assistant|>"
        assert text(guide, answers[0].prompt_ids) == first
        assert text(guide, answers[2].prompt_ids) == f"{first}1<|end|><|user|>{seen[2]}<|end|><|assistant|>"
        assert text(walker, answers[3].prompt_ids) == f"<|system|>w<|end|><|user|>{seen[3]}<|end|><|assistant|>"


def test_recorded_tokens_are_kept_if_the_tokenizer_decodes_them(tmp_path, speaker):
    old = {"guide": speaker("guide@7", system="once"), "walker": ScriptedPolicy(["0"], "walker")}
    path = write_play(tmp_path / "a.parquet", old, k=3)
    seats = {"guide": speaker("new@1"), "walker": speaker("new@1")}
    source = recorded(path, seats)
    kept = {e.seed: e for e in play(source, range(4))}
    for before in load_episodes(path):
        for node, now in zip(before.nodes, kept[before.seed].nodes, strict=True):
            assert (node.parent, node.rewards, node.team_reward, node.info) == (
                now.parent,
                now.rewards,
                now.team_reward,
                now.info,
            )
            if "guide" in node.answers:
                was, is_ = node.answers["guide"], now.answers["guide"]
                assert is_.policy == "new@1" and (is_.text, is_.stop_reason) == (was.text, was.stop_reason)
                assert np.array_equal(was.prompt_ids, is_.prompt_ids) and np.array_equal(was.token_ids, is_.token_ids)
                assert np.array_equal(was.logprobs, is_.logprobs) and was.logprobs.any()
            else:
                assert text(seats["walker"], now.answers["walker"].token_ids) == "0<|end|>"
    anew = play(recorded(path, seats, tokens="retokenize"), [0])[0].nodes[0].answers["guide"]
    assert text(seats["guide"], anew.prompt_ids).startswith("<|system|>g<|end|>") and not anew.logprobs.any()


def test_answers_of_another_tokenizer_are_retokenised(tmp_path, speaker):
    """The tokens of `Spoken` are bytes, which this tokenizer decodes differently."""
    path = write_play(tmp_path / "a.parquet", dict.fromkeys(Whisper.seats, Spoken("p", lambda query, i: "1")))
    seats = dict.fromkeys(Whisper.seats, speaker())
    answer = play(recorded(path, seats), [0])[0].nodes[0].answers["guide"]
    assert text(seats["guide"], answer.token_ids) == "1<|end|>"


def test_answers_shared_by_siblings_stay_shared(tmp_path, speaker):
    shared = Answer("1", "big")
    episode = Episode("train", 0, {"guide": "big", "walker": "big"})
    for i in range(2):
        answers = {"guide": shared, "walker": Answer(str(i), "big")}
        episode.nodes.append(
            Node(i, None, 0, {"guide": "x", "walker": "y"}, answers, done=True, info={"success": True})
        )
    pq.write_table(to_table(0, [episode]), tmp_path / "a.parquet")
    (now,) = play(recorded(tmp_path / "a.parquet", dict.fromkeys(Whisper.seats, speaker())), [0])
    assert now.nodes[0].answers["guide"] is now.nodes[1].answers["guide"]
    assert len(SFT().build_samples([now], "p")[0]) == 3


def test_answers_of_policies_not_in_training_stay_text(tmp_path, speaker):
    path = write_play(tmp_path / "a.parquet", scripts())
    seats = {"guide": speaker(), "walker": ScriptedPolicy(["?"], "partner")}
    answer = play(recorded(path, seats), [0])[0].nodes[1].answers["walker"]
    assert (answer.text, answer.policy, len(answer.token_ids)) == ("0", "partner", 0)


def test_advantages_are_reset_between_epochs(tmp_path, speaker):
    path = write_play(tmp_path / "a.parquet", scripts())
    source = recorded(path, dict.fromkeys(Whisper.seats, speaker()))
    first = play(source, range(4))
    SFT(imitate="all").build_samples(first, "p")
    assert all(node.advantages for e in first for node in e.nodes)
    assert not any(node.advantages for e in play(source, range(4)) for node in e.nodes)


def test_failed_episodes_are_skipped_and_all_failed_is_refused(tmp_path):
    good, bad = Episode("train", 0, {}, []), Episode("train", 1, {}, [], error="lost")
    pq.write_table(to_table(0, [bad, good]), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="no episode to learn from: none was recorded, or all of them failed"):
        read(tmp_path / "a.parquet")
    write_play(tmp_path / "a.parquet", scripts())
    with pytest.raises(ValueError, match="holds episodes, which name their seats: leave out seat: guide"):
        read_data([DataConfig(path=str(tmp_path / "a.parquet"), seat="guide")], None)


def test_rebuilt_prompts_need_the_env_or_a_system_text(tmp_path, speaker):
    path = write_play(tmp_path / "a.parquet", scripts())
    with pytest.raises(ValueError, match="add env: as it was played, or the policy's system"):
        recorded(path, dict.fromkeys(Whisper.seats, speaker()), roles={})
    speakers = dict.fromkeys(Whisper.seats, speaker(system="you"))
    answer = play(recorded(path, speakers, roles={}), [0])[0].nodes[0].answers["guide"]
    assert text(speakers["guide"], answer.prompt_ids).startswith("<|system|>you<|end|>")


# ---- order


def numbered(tmp_path, speaker, seed=0, count=10):
    rows = [{"prompt": str(i), "completion": "x"} for i in range(count)]
    return recorded(write_lines(tmp_path / "a.jsonl", *rows), {"a": speaker()}, seed=seed)


def drawn(source, numbers, memory=None):
    return [int(e.nodes[0].observations["a"]) for e in play(source, numbers, memory)]


def test_each_epoch_is_a_new_permutation_of_the_episodes(tmp_path, speaker):
    source = numbered(tmp_path, speaker)
    epochs = [drawn(source, range(start, start + 10)) for start in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3 and list(range(10)) not in epochs
    assert (
        drawn(source, range(5, 28)) == [*epochs[0], *epochs[1], *epochs[2]][5:28]
    )  # whichever numbers are requested together
    assert Counter(drawn(source, range(30))) == dict.fromkeys(range(10), 3)
    assert drawn(numbered(tmp_path, speaker), range(20)) == epochs[0] + epochs[1]
    assert drawn(numbered(tmp_path, speaker, seed=1), range(10)) not in epochs


def test_a_stage_reads_whole_epochs_from_its_start(tmp_path, speaker):
    """The stage before it had 25 episodes: ten more read each of ten rows once."""
    source = numbered(tmp_path, speaker)
    assert drawn(source, range(25, 45), {STAGE_START_KEY: [5, 25]}) == drawn(source, range(20))


def test_resume_with_changed_data_is_refused(tmp_path, speaker):
    memory = {}
    play(numbered(tmp_path, speaker), range(3), memory)
    memory = json.loads(json.dumps(memory))
    play(numbered(tmp_path, speaker), range(3, 6), memory)
    with pytest.raises(ValueError, match=r"a\.jsonl have changed since the run began"):
        play(numbered(tmp_path, speaker, count=11), range(6, 9), memory)


def test_on_episode_is_called_for_recorded_episodes(tmp_path, speaker):
    received = []
    source = numbered(tmp_path, speaker)
    played = asyncio.run(source.play(range(3), Branching(), {}, received.append))
    assert received == played and source.observe(played, {}) == {}


# ---- errors before training


def test_algorithms_that_need_sampler_logprobs_refuse_data_without_them(tmp_path, speaker):
    seats = dict.fromkeys(Whisper.seats, speaker())
    for old in (scripts(), dict.fromkeys(Whisper.seats, Spoken("p", lambda query, i: "1"))):
        source = recorded(write_play(tmp_path / "a.parquet", old, k=2), seats)
        with pytest.raises(ValueError, match=r'no log-probabilities for the answers of seat "guide", which grpo needs'):
            source.check(GRPO(branch_at="root"), {"p"})
    drew = recorded(write_play(tmp_path / "a.parquet", dict.fromkeys(Whisper.seats, speaker()), k=8, count=16), seats)
    drew.check(GRPO(branch_at="root"), {"p"})


def test_data_without_learnable_answers_is_refused(tmp_path, speaker):
    path, seats = tmp_path / "a.jsonl", {"a": speaker()}
    completions = recorded(write_lines(path, *[{"prompt": "q", "completion": "x"}] * 70), seats)
    with pytest.raises(
        ValueError, match=r"dpo finds nothing to learn in .*: 70 trajectories, of which 70 succeeded, and 0 places"
    ):
        completions.check(DPO(), {"p"})
    completions.check(SFT(), {"p"})
    same = recorded(write_lines(path, {"prompt": "q", "chosen": "x", "rejected": "x"}), seats)
    with pytest.raises(ValueError, match=r"dpo finds nothing to learn in .* and 1 places where siblings have"):
        same.check(DPO(), {"p"})
    recorded(write_lines(path, {"prompt": "q", "chosen": "x", "rejected": "y"}), seats).check(DPO(), {"p"})
    play_ = write_play(tmp_path / "b.parquet", {"guide": ScriptedPolicy([""]), "walker": ScriptedPolicy(["0"])})
    lost = recorded(play_, dict.fromkeys(Whisper.seats, speaker()))
    with pytest.raises(ValueError, match=r"sft finds nothing to learn in .*: 4 trajectories, of which 0 succeeded"):
        lost.check(SFT(), {"p"})
    lost.check(SFT(imitate="all"), {"p"})


# ---- in a config


@pytest.mark.parametrize(
    ("data", "paths"),
    [
        ("a.jsonl", [("a.jsonl", None)]),
        (["a.jsonl", {"path": "b", "seat": "x"}], [("a.jsonl", None), ("b", "x")]),
        ({"path": "b", "seat": "x"}, [("b", "x")]),
    ],
)
def test_data_accepts_a_path_an_entry_or_a_list(data, paths):
    config = validate(TextConfig, {"policies": {"default": {"type": "lora"}}, "data": data})
    assert [(entry.path, entry.seat) for entry in config.data] == paths
    assert [part.data for part in config.stage_configs()] == [config.data]
    assert config.env_label == " and ".join(path for path, _ in paths)


def test_config_without_env_needs_data_and_allows_no_evaluation():
    bare = {"policies": {"default": {"type": "lora"}}}
    with pytest.raises(ValueError, match="a run plays one env or several"):
        validate(TextConfig, bare)
    with pytest.raises(ValueError, match="this config names no env, and the run needs one"):
        validate(TextConfig, bare | {"data": "a.jsonl", "evals": {"test": {}}})
    with pytest.raises(ValueError, match=r"unknown key data\[0\].sead: did you mean seat"):
        validate(TextConfig, bare | {"data": [{"path": "a.jsonl", "sead": "x"}]})
    with pytest.raises(ValueError, match="data"):
        validate(TextConfig, bare | {"data": 5})


def test_stages_have_their_own_data_or_rollouts():
    stages = [{"data": "a.jsonl"}, {"data": []}, {}]
    config = {"policies": {"default": {"type": "lora"}}, "data": "b.jsonl", "stages": stages}
    with pytest.raises(ValueError, match="a run plays one env or several"):
        validate(TextConfig, config)  # the second stage
    parts = validate(TextConfig, config | {"env": {"type": "helpers.toys:Whisper"}}).stage_configs()
    assert [[entry.path for entry in part.data] for part in parts] == [["a.jsonl"], [], ["b.jsonl"]]
    alone = {"policies": {"default": {"type": "lora"}}, "stages": stages[:1]}
    assert [part.data[0].path for part in validate(TextConfig, alone).stage_configs()] == ["a.jsonl"]
