"""Trains a shipped base model from scratch: tokenizer, data, training, and a README with the number of examples.

    python scripts/make_tiny.py tiny       boards: Plan-Path and Sokoban, sums, small talk
    python scripts/make_tiny.py boards     begun from tiny: the boards at full size, and how to walk to a cell
    python scripts/make_tiny.py deep       boards with twice the layers, trained further; not shipped: give --out
    python scripts/make_tiny.py tasks      every other task, in its shortest form

Runs on one thread in fp32 with a fixed seed: the same machine and library versions give the same bytes. There is no
validation set, no checkpoint and no early stopping; `scripts/tiny_measure.py` measures the result.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import task_data
import tiny_data
import torch
from float32_muon import Float32Muon
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from palestra.core.accel.malloc import keep_freed_memory
from palestra.core.losses import cross_entropy_loss
from palestra.core.types import Sample
from palestra.engine.bases.model import Engine
from palestra.engine.bases.pretrained import load_model, load_tokenizer
from palestra.engine.training.adapter_weights import AdapterWeights


@dataclass(frozen=True)
class Recipe:
    """How to make a base: `runs(seed)` yields its training data, in runs of examples that share a prompt; `roles` are
    the roles of the chat template `template`; `steps` are training steps. Each of `words` is one token, with and
    without a space before it, and each of `marks` is one token. `said` are further figures for the README. Training
    begins with the base `start`, each layer of which is followed by a new one if `is_doubled`."""

    runs: Callable[[int], Iterator[list[Any]]]
    words: list[str]
    roles: tuple[str, ...]
    template: str
    steps: int
    marks: tuple[str, ...] = ()
    said: dict[str, float] = field(default_factory=dict)
    start: str = ""
    is_doubled: bool = False
    muon: Callable[..., torch.optim.Optimizer] = torch.optim.Muon
    rates: tuple[float, float] = (2e-2, 4e-3)

    @property
    def specials(self) -> list[str]:
        return ["<|pad|>", *(f"<|{role}|>" for role in self.roles), "<|end|>"]


TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Writes a message like `palestra.core.chat.render_message`: text, then calls, each on its own line. Tools are not
# described.
TOOLS_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{% if message['content'] or not loop.first %}{{ '\n' }}{% endif %}"
    "<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
BOARD_WORDS = (  # noqa: SIM905
    "up down left right size you box goal walls plan none moves end stand line legal sokoban path planner executor "
    "agent first second calculator assistant yes no"
).split()
COORDINATES = [f"{letter}{number}" for letter in "rc" for number in range(16)]
TINY = Recipe(
    tiny_data.runs,
    [*BOARD_WORDS, *COORDINATES, *"0123456789"],
    ("system", "user", "assistant"),
    TEMPLATE,
    4200,
    said={"random": tiny_data.RANDOM, "noise": tiny_data.NOISE, "give_up": tiny_data.GIVE_UP},
)
BOARDS = replace(
    TINY,
    runs=partial(tiny_data.runs, mix=tiny_data.BOARDS),
    steps=4500,
    start="tiny",
    muon=Float32Muon,
    rates=(1e-2, 2e-3),
)
RECIPES = {
    "tiny": TINY,
    "boards": BOARDS,
    "deep": replace(BOARDS, steps=3200, start="boards", is_doubled=True),
    "tasks": Recipe(
        task_data.runs,
        [*COORDINATES, *"0123456789"],
        ("system", "user", "assistant", "tool"),
        TOOLS_TEMPLATE,
        8000,
        marks=("<tool_call>", "</tool_call>"),
        said={"blind": task_data.BLIND, "slip": task_data.SLIP},
    ),
}
# Separates letters, digits and cells, so that "r1" is one token, "12" is two, and no token spans two words.
PIECES = r" ?[rc]1?[0-9](?![0-9a-zA-Z])| ?[a-zA-Z]+| ?[0-9]|[^\sa-zA-Z0-9]+|\s+"
VOCABULARY = 512
BASES = Path("palestra/data/bases")

TOKENS_PER_STEP, WINDOW, WARM_UP = 1500, 2000, 100
CLIP = 1.0


def make_tokenizer(recipe: Recipe, texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: it encodes any text, and texts of the games with one token for each word."""
    bpe = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), "isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(recipe.marks),
        special_tokens=recipe.specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Frequent words are merged first: repeated this often, these words come before all others of the texts.
    words = [*recipe.words, *(f" {word}" for word in recipe.words)]
    bpe.train_from_iterator(words * len(texts) + texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=[s for s in recipe.specials if s not in ("<|pad|>", "<|end|>")],
        chat_template=recipe.template,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens(list(recipe.marks))
    return tokenizer


def make_model(vocabulary: int, pad: int, end: int) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=128,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=pad,
        eos_token_id=end,
        bos_token_id=None,
        dtype="float32",
        attn_implementation="palestra",
    )
    return Qwen3ForCausalLM(config)


def begin(recipe: Recipe, seed: int, number: int) -> tuple[PreTrainedTokenizerFast, Qwen3ForCausalLM]:
    """Returns the tokenizer and the model that training begins with; a new tokenizer reads `number` runs."""
    if recipe.start:
        folder = str(BASES / recipe.start)
        how = {"attn_implementation": "palestra", "dtype": "float32"}
        model = load_model(Qwen3ForCausalLM, folder, **how)
        return load_tokenizer(folder), with_double_layers(model) if recipe.is_doubled else model
    texts = [f"{e.question} {e.answer}" for run in islice(recipe.runs(seed), number) for e in run]
    tokenizer = make_tokenizer(recipe, texts)
    return tokenizer, make_model(len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id)


def with_double_layers(model: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """Returns a model that computes the same with twice the layers: each is followed by a copy that adds nothing yet,
    since its output projections are 0."""
    layers = 2 * model.config.num_hidden_layers
    tree = model.config.to_dict() | {"num_hidden_layers": layers, "layer_types": None}
    config = Qwen3Config.from_dict(tree)
    config._attn_implementation = "palestra"
    deeper = Qwen3ForCausalLM(config).float()
    weights = {}
    for name, weight in model.state_dict().items():
        before, _, after = name.partition(".layers.")
        if not after:
            weights[name] = weight
            continue
        number, _, rest = after.partition(".")
        is_output = rest.startswith(("self_attn.o_proj", "mlp.down_proj"))
        weights[f"{before}.layers.{2 * int(number)}.{rest}"] = weight
        weights[f"{before}.layers.{2 * int(number) + 1}.{rest}"] = weight * (not is_output)
    deeper.load_state_dict(weights)
    return deeper


class Reader:
    """Makes batches of samples of about TOKENS_PER_STEP distinct tokens, and counts the examples of each kind.

    Runs are shuffled within windows, so that a batch has many boards. A run stays together, since the trainer computes
    the prompt that its examples share only once.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, source: Iterator[list[Any]], seed: int) -> None:
        self.tokenizer, self.rng, self.source = tokenizer, Random(seed), source
        self.window: list[list[Any]] = []
        self.counts: Counter[str] = Counter()

    def batch(self) -> list[Sample]:
        samples: list[Sample] = []
        size = 0
        while size < TOKENS_PER_STEP:
            run = self._next()
            new = [self._sample(example) for example in run]
            samples += new
            size += len(new[0].prompt_ids) + sum(len(s.token_ids) for s in new)
            self.counts.update(example.kind for example in run)
        return samples

    def _next(self) -> list[Any]:
        if not self.window:
            self.window = [next(self.source) for _ in range(WINDOW)]
            self.rng.shuffle(self.window)
        return self.window.pop()

    def _sample(self, example: Any) -> Sample:
        prompt, answer = self._ids(example.prompt), self._ids(example.answer + "<|end|>")
        return Sample(prompt, answer, np.zeros(len(answer), np.float32), np.ones(len(answer), np.float32))

    def _ids(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer.encode(text, add_special_tokens=False), np.int32)


def train(recipe: Recipe, engine: Engine, reader: Reader, steps: int) -> None:
    """Trains the model: with Muon for the matrices of the layers, which needs a third of AdamW's steps here, and with
    AdamW for the rest."""
    trainer = AdapterWeights(engine, None, pack_tokens=10**9)
    named = list(engine.model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in named if p.ndim != 2 or "embed" in name]
    muon_rate, adam_rate = recipe.rates
    muon = recipe.muon(matrices, lr=muon_rate, momentum=0.95, weight_decay=0.1)
    adam = torch.optim.AdamW(rest, lr=adam_rate, betas=(0.9, 0.98), weight_decay=0.01)
    started, recent = time.process_time(), 0.0
    for step in range(steps):
        loss = trainer.forward_backward(reader.batch(), cross_entropy_loss)["loss"]
        torch.nn.utils.clip_grad_norm_(engine.model.parameters(), CLIP)
        for optimizer, rate in ((muon, muon_rate), (adam, adam_rate)):
            optimizer.param_groups[0]["lr"] = rate * schedule(step, steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        recent = loss if step == 0 else 0.99 * recent + 0.01 * loss
        if (step + 1) % 200 == 0 or step + 1 == steps:
            seconds = time.process_time() - started
            print(f"step {step + 1}/{steps}  loss {recent:.3f}  {seconds:.0f} CPU-s", flush=True)


def schedule(step: int, steps: int) -> float:
    """The factor of the learning rates at a step: linear warm-up, then half a cosine down to a fiftieth."""
    return min(1.0, (step + 1) / WARM_UP) * (0.02 + 0.49 * (1 + math.cos(math.pi * step / steps)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", choices=RECIPES, nargs="?", default="tiny", help="default: tiny")
    parser.add_argument("--quick", action="store_true", help="a smoke test: two steps, in runs/make_tiny")
    parser.add_argument("--out", type=Path, help="default: palestra/data/bases/BASE")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=1, help="default: 1; deep wants another than boards had")
    options = parser.parse_args()
    recipe, out = RECIPES[options.base], options.out or BASES / options.base
    if options.quick:
        options.steps, out = 2, Path("runs/make_tiny") / options.base
    torch.set_num_threads(1)
    keep_freed_memory()
    torch.manual_seed(options.seed)
    tokenizer, model = begin(recipe, options.seed, 50 if options.quick else 2000)
    reader = Reader(tokenizer, recipe.runs(options.seed), options.seed)
    print(f"{model.num_parameters()} parameters", flush=True)
    train(recipe, Engine(model, tokenizer, options.base), reader, options.steps or recipe.steps)
    save(out, model, tokenizer)
    text = card(options.base, recipe, reader.counts, options.seed, model.num_parameters())
    (out / "README.md").write_text(text)


def card(name: str, recipe: Recipe, counts: Counter[str], seed: int, parameters: int) -> str:
    """The text of the model's README, with the number of examples of each kind."""
    lines = ["| kind | examples |", "|---|---:|", *(f"| {kind} | {n:,} |" for kind, n in sorted(counts.items()))]
    template = (Path(__file__).parent / f"{name}_card.md").read_text()
    return template.format(
        parameters=parameters,
        vocabulary=VOCABULARY,
        seed=seed,
        examples=counts.total(),
        table="\n".join(lines),
        **recipe.said,
    )


def save(out: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out, save_jinja_files=False)


if __name__ == "__main__":
    main()
