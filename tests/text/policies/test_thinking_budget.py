"""A budget for thoughts: the template's own marks end them, and no algorithm trains on these."""

import asyncio
import json

import numpy as np
import pytest
import torch
import yaml
from helpers.chat_templates import real_tokenizer, template_names
from helpers.samplers import serving
from helpers.tolerances import LOGPROB_ATOL
from transformers import LlamaConfig, LlamaForCausalLM

from palestra.api.agents.serve import ServedAgent
from palestra.api.agents.trained_agent import TrainedAgent
from palestra.core.chat import Chat
from palestra.core.config import dump, parse, validate
from palestra.core.http.calls import ChatCall
from palestra.core.types import Sample, is_sampled, num_sampled
from palestra.engine.bases.model import Engine
from palestra.engine.conversation.encoder import ChatEncoder
from palestra.engine.sampling.request import Request
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.engine.training.adapter_weights import AdapterWeights
from palestra.evaluation.evaluate import evaluate
from palestra.runs import Run, list_checkpoints, read_lines
from palestra.runs.episodes import load_episodes
from palestra.runs.loop import restore_checkpoint, run_training
from palestra.text.build.build import build
from palestra.text.build.engines import Engines
from palestra.text.config import TextConfig
from palestra.text.policies.base import Query
from palestra.text.policies.lm import LanguagePolicy
from palestra.text.samplers.adapter_store import AdapterStore
from palestra.text.samplers.vllm import RequestTimeouts, SamplerServer, VllmSampler

ASK = {"role": "user", "content": "hello"}
BUDGET = {"max_tokens": 40, "thinking_token_budget": 6, "stop_at_eos": False}
END = "\n</think>\n\n"  # as Qwen's template writes it
THINKS = [name for name in template_names() if ChatEncoder(real_tokenizer(name)).form.thought]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    """The folder of a tiny random base with Qwen3.5's template, whose prompts begin a thought."""
    folder, tokenizer = tmp_path_factory.mktemp("bases") / "thinker", real_tokenizer("qwen3_5_think")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=4096, initializer_range=0.2, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def policy_of(engine, **changes):
    sampling = SamplingConfig(**BUDGET | changes)
    return LanguagePolicy("p@0", Sampler(engine), ChatEncoder(engine.tokenizer), sampling)


def answers_of(policy, n=4, seed=1):
    return asyncio.run(policy.act(Query("be brief", "hello", n=n, seed=seed)))


def config_of(base, algorithm, **tree):
    speech = {"type": "lora", "base": str(base), "lr": 1e-2, "sampling": BUDGET}
    plain = {
        "name": "thinks",
        "steps": 3,
        "episodes": 2,
        "env": {"type": "helpers.toys:Whisper"},
        "policies": {"guide": speech, "walker": {"type": "scripted", "answers": ["0"]}},
        "algorithm": algorithm,
    }
    return validate(TextConfig, plain | tree)


GRPO = {"type": "grpo", "branch_at": "root", "group_size": 3, "scale": "none", "loss_aggregation": "token"}


@pytest.mark.parametrize("name", THINKS)
def test_the_end_of_a_thought_is_the_templates_own(name):
    """A thought without an end gets the tokens that the template writes after one, and is read as it writes it."""
    encoder = ChatEncoder(real_tokenizer(name))
    chat, thought = Chat((ASK,)), encoder.form.thought
    prompt = encoder.encode_conversation(chat)
    begun = encoder.tokenizer.decode(prompt).rstrip().endswith(thought.open)
    cut = encoder.encode_text(f"{'' if begun else thought.open}two and")
    if encoder.tokenizer.decode(prompt).rstrip().endswith(thought.close):
        assert begun or not len(encoder.missing_thought_end(encoder.encode_text("two and"), prompt))
    end = encoder.missing_thought_end(cut, prompt)
    assert len(end)
    whole = np.concatenate([cut, end])
    assert not len(encoder.missing_thought_end(whole, prompt))
    read = encoder.read(np.concatenate([whole, encoder.encode_text("four")]), prompt)
    assert (read.text, read.thought) == ("four", "two and")
    written = encoder.renderer.render(
        [ASK, {**ASK, "role": "assistant", "reasoning_content": "two and"}], generate=False
    )
    assert encoder.tokenizer.decode(end) in written or "two and" not in written


def test_a_thought_without_end_is_ended_and_the_answer_goes_on(thinker):
    engine, plain = Engine.load(str(thinker), threads=1), LlamaForCausalLM.from_pretrained(thinker)
    policy = policy_of(engine)
    answers = answers_of(policy)
    end = policy.encoder.encode_text(END)
    assert len({answer.token_ids.tobytes() for answer in answers}) == 4
    for answer in answers:
        assert len(answer.token_ids) == 40 and answer.stop_reason == "length"
        assert answer.token_ids[6 : 6 + len(end)].tolist() == end.tolist()
        assert np.flatnonzero(~is_sampled(answer)).tolist() == list(range(6, 6 + len(end)))
        assert num_sampled(answer) == 40 - len(end)
        assert answer.thought == engine.tokenizer.decode(answer.token_ids[:6]).strip()
        ids = torch.tensor(np.concatenate([answer.prompt_ids, answer.token_ids]).astype(np.int64))
        logp_TV = plain(ids[None]).logits[0].log_softmax(-1)[len(answer.prompt_ids) - 1 : -1]
        own = logp_TV.gather(1, ids[len(answer.prompt_ids) :, None])[:, 0].detach().numpy()
        np.testing.assert_allclose(answer.logprobs, np.where(is_sampled(answer), own, 0.0), atol=LOGPROB_ATOL)
    again = answers_of(policy_of(engine))
    assert [answer.token_ids.tolist() for answer in again] == [answer.token_ids.tolist() for answer in answers]
    first, second = answers[0].token_ids[:6], answers[0].token_ids[6 + len(end) :][:6]
    assert first.tolist() != second.tolist()  # other random numbers


def test_an_answer_that_has_ended_its_thought_goes_on_as_it_was(thinker):
    """No token is forced, and the mask of top-k is that of both parts."""
    engine = Engine.load(str(thinker), threads=1)
    policy = policy_of(engine, top_k=5, keep_sampling_mask=True)
    encoder = policy.encoder
    prompt = np.concatenate([encoder.encode_conversation(Chat((ASK,))), encoder.encode_text(f"two{END}")])
    (answer,) = asyncio.run(policy.sample(Request(prompt, 1, policy.sampling, seed=3)))
    assert len(answer.token_ids) == 40 and answer.sampling_mask.counts.tolist() == [5] * 40
    forced = answers_of(policy, n=1)[0].sampling_mask
    assert sorted(set(forced.counts.tolist())) == [-1, 5] and len(forced.rows()) == 40


@pytest.mark.slow
def test_samplers_in_other_processes_keep_the_budget(thinker):
    """A server knows of no thoughts: what is sampled there equals what is sampled here."""
    engine = Engine.load(str(thinker), threads=1)
    with serving("--base", str(thinker)) as (url, _):
        sampler = VllmSampler([SamplerServer(url)], AdapterStore(None, str(thinker)), RequestTimeouts(20.0, 1.0))
        sampler.connect()
        remote = LanguagePolicy("p@0", sampler, ChatEncoder(engine.tokenizer), SamplingConfig(**BUDGET))
        found = answers_of(remote)
        sampler.close()
    for here, there in zip(answers_of(policy_of(engine)), found, strict=True):
        assert here.token_ids.tolist() == there.token_ids.tolist()
        assert here.sampling_mask.counts.tolist() == there.sampling_mask.counts.tolist()


@pytest.mark.parametrize("surrogate", ["clipped", "gspo"])
def test_the_gradient_is_that_of_sampled_tokens(thinker, surrogate):
    """Recomputed by the model's own forward pass: the mean over sampled tokens of advantage times ratio."""
    engine, plain = Engine.load(str(thinker), threads=1), LlamaForCausalLM.from_pretrained(thinker)
    answers = answers_of(policy_of(engine))
    samples = [
        Sample(a.prompt_ids, a.token_ids, a.logprobs, np.full(40, value, np.float32), sampling_mask=a.sampling_mask)
        for a, value in zip(answers, (1.0, -2.0, 0.5, 3.0), strict=True)
    ]
    algorithm = config_of(thinker, GRPO | {"surrogate": surrogate}).algorithm
    trainer = AdapterWeights(engine, None, precision="float32")
    metrics = trainer.forward_backward(samples, algorithm.loss, **algorithm.loss_options)
    found = {name: weight.grad for name, weight in engine.model.named_parameters()}
    total = sum(map(num_sampled, answers))
    loss = torch.zeros(())
    for sample in samples:
        ids = torch.tensor(np.concatenate([sample.prompt_ids, sample.token_ids]).astype(np.int64))
        logp_TV = plain(ids[None]).logits[0].log_softmax(-1)[len(sample.prompt_ids) - 1 : -1]
        logp = logp_TV.gather(1, ids[len(sample.prompt_ids) :, None])[:, 0][torch.tensor(is_sampled(sample))]
        loss = loss - (torch.exp(logp - logp.detach()) * float(sample.advantages[0])).sum() / total
    loss.backward()
    for name, weight in plain.named_parameters():
        torch.testing.assert_close(found[name], weight.grad, atol=2e-6, rtol=2e-4)
    assert metrics["kl"] == pytest.approx(0, abs=1e-6) and metrics["clip_fraction"] == 0


ALGORITHMS = {
    "grpo": GRPO | {"kl_coef": 0.1, "entropy_coef": 0.01},
    "ppo": {"type": "ppo", "kl_coef": 0.1},
    "dpo": {"type": "dpo", "branch_at": "root", "group_size": 3},
    "kto": {"type": "kto", "branch_at": "root", "group_size": 3},
    "sft": {"type": "sft", "imitate": "all"},
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_forced_tokens_have_no_weight(thinker, name):
    """Of each algorithm's samples: a forced token's log-probability is 0 under any weights, and so is its weight."""
    setup = build(config_of(thinker, ALGORITHMS[name]))
    moment = setup.position_of(0)
    episodes = asyncio.run(
        moment.stage.source.play(moment.episode_numbers, moment.stage.algorithm.branching, setup.algorithm_state)
    )
    draws = np.random.default_rng(0)
    for node in (node for episode in episodes for node in episode.nodes):
        node.team_reward = float(draws.normal())
    learner, algorithm = setup.learners["guide"], moment.stage.algorithm
    samples, _ = algorithm.build_samples(episodes, "guide", {})
    samples, _ = asyncio.run(algorithm.finalize_samples(samples, learner, {}))
    assert samples and all(num_sampled(sample) < 40 for sample in samples)
    for sample, logps in zip(samples, asyncio.run(learner.logprobs(samples)), strict=True):
        assert not logps[~is_sampled(sample)].any() and logps[is_sampled(sample)].all()
        assert not sample.logprobs[~is_sampled(sample)].any()
    if name == "ppo":
        credit = np.concatenate([sample.advantages[is_sampled(sample)] for sample in samples])
        assert credit.mean() == pytest.approx(0, abs=1e-4) and credit.std() == pytest.approx(1, abs=1e-3)
    only_forced = [
        Sample(
            s.prompt_ids, s.token_ids, s.logprobs, (~is_sampled(s)).astype(np.float32), sampling_mask=s.sampling_mask
        )
        for s in samples
    ]
    trainer = learner.weights
    trainer.forward_backward(only_forced, config_of(thinker, GRPO).algorithm.loss)
    assert all(w.grad is None or not w.grad.any() for pair in trainer.adapter.weights.values() for w in pair)


@pytest.mark.slow
def test_training_resumes_exactly_and_the_agent_is_served(thinker, tmp_path):
    """Stored episodes know the forced tokens; a stopped run resumes byte for byte; the served agent thinks as long."""
    tree = config_of(thinker, GRPO, save_episodes_every=1, checkpoint_every=1, max_num_seqs=3)
    paths = []
    for halt in (None, 1):
        with Run.create(tmp_path, dump(tree), tree.name) as run:
            stopped = lambda run=run, halt=halt: len(read_lines(run.path / "metrics.jsonl")) == halt  # noqa: E731
            run_training(build(tree), run, should_stop=stopped)
            paths.append(run.path)
    with Run.open(paths[1]) as run:
        setup = build(validate(TextConfig, parse(run.config)))
        restore_checkpoint(setup, run)
        assert run_training(setup, run)
    folders = [list_checkpoints(path)[-1].path / "guide" for path in paths]
    one, other = ((folder / "adapter_model.safetensors").read_bytes() for folder in folders)
    assert one == other
    stored = [episode for file in sorted((paths[0] / "episodes").rglob("*.parquet")) for episode in load_episodes(file)]
    said = [node.answers["guide"] for episode in stored for node in episode.nodes if "guide" in node.answers]
    assert len(said) >= 18 and sum(num_sampled(answer) < len(answer.token_ids) for answer in said) >= 12
    agent = TrainedAgent("guide", 3, folders[0], "adapter", {"base": str(thinker), "sampling": BUDGET})
    desk = ServedAgent(agent, Engines("cpu", 8))
    reply = asyncio.run(desk.answer(ChatCall("guide", Chat((ASK,)), {"seed": 5})))
    assert reply.thought and len(reply.text) > 6 and reply.token_counts[1] == 40
    short = asyncio.run(desk.answer(ChatCall("guide", Chat((ASK,)), {"seed": 5, "max_tokens": 4})))
    assert short.text == "" and short.token_counts[1] == 4


def test_a_budget_that_cannot_be_kept_is_refused_at_the_start(thinker, base):
    with pytest.raises(ValueError, match="thinking_token_budget: 6 ends thoughts, and the base's chat template shows"):
        build(config_of(base, GRPO))
    tight = {"max_tokens": 12, "thinking_token_budget": 8}
    guide = {"type": "lora", "base": str(thinker), "sampling": tight}
    with pytest.raises(ValueError, match=r"leave no token of max_tokens: 12 to the answer: set max_tokens to"):
        build(config_of(thinker, GRPO, policies={"guide": guide, "walker": {"type": "scripted", "answers": ["0"]}}))
    with pytest.raises(ValueError, match=r"leave no token of max_tokens: 5 to the answer"):
        build(config_of(thinker, GRPO, eval_sampling={"max_tokens": 5}))
    client = pytest.importorskip("palestra.text.tinker.client")
    tree = config_of(thinker, GRPO)
    with pytest.raises(ValueError, match=r"guide.sampling.thinking_token_budget: the protocol of servers has no field"):
        client.RemoteEngines(None).check_supported(tree.algorithm.loss, tree.algorithm.loss_options, tree.policies)


def pay(row, answers):
    return 0.0


TALKS = {
    "chain": {"prompts": {"writer": "Write about {topic}.", "editor": "Mend: {transcript}"}},
    "debate": {"source": "drills", "rounds": 2, "judge": "seat"},
    "math_relay": {"parts": 3},
    "math_review": {},
    "math_judge": {"commits_first": True},
    "code": {"max_turns": 2, "unsafe": True},
    "describe_guess": {},
}


@pytest.mark.parametrize("env", TALKS)
def test_no_seat_judge_or_opponent_sees_the_thought_of_another(thinker, env, tmp_path):
    """Each message of a team, a debater or a coder reaches the others without the thought before it."""
    tree = {
        "steps": 1,
        "env": {"type": env, **TALKS[env]},
        "policies": {"default": {"type": "frozen", "base": str(thinker), "sampling": BUDGET}},
    }
    if env == "chain":
        tree["env"]["rows"] = str(tmp_path / "rows.jsonl")
        tree["env"]["reward"] = f"{__name__}:pay"
        rows = [{"topic": topic} for topic in ("tea", "rain", "snow", "wind", "salt", "iron")]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "talk.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    passed = 0
    for episode in evaluate(tmp_path / "talk.yaml", episodes=2, in_process=True).episodes:
        said = []  # seat, thought and text so far
        for node in episode.nodes:
            for seat, observation in node.observations.items():
                shown = str(observation)
                assert not any(thought in shown for other, thought, _ in said if other != seat)
                passed += sum(text in shown for other, _, text in said if other != seat and text)
            said += [(seat, answer.thought, answer.text) for seat, answer in node.answers.items()]
        assert said and all(thought for _, thought, _ in said)
    assert passed or env in ("code", "describe_guess")  # whose messages are invalid here: a program, a word
