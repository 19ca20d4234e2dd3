"""The calls of MinT's recipes/dpo_native.py: a Bradley-Terry loss on pairs of answers, defined by the client."""

import json
import os

import mint
import torch
from mint import types

BASE = os.environ.get("MINT_BASE_MODEL", "Qwen/Qwen3-0.6B")
PAIRS = [("hello", "hello!", "no"), ("is 3 more than 2?", "yes", "green dog"), ("count from 1 to 2", "1 2", "up")]


def datum(tokenizer, question, answer):
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    prompt = tokenizer.encode(text, add_special_tokens=False)
    ids = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    inputs = {"target_tokens": (prompt + ids)[1:], "weights": [0.0] * (len(prompt) - 1) + [1.0] * len(ids)}
    return types.Datum(model_input=types.ModelInput.from_ints((prompt + ids)[:-1]), loss_fn_inputs=inputs)


def bradley_terry(data, logprobs):
    """Chosen and rejected answers alternate."""
    sums = [torch.dot(lp, torch.tensor(d.loss_fn_inputs["weights"].data)) for d, lp in zip(data, logprobs, strict=True)]
    margins = torch.stack([good - bad for good, bad in zip(sums[::2], sums[1::2], strict=True)])
    loss = -torch.nn.functional.logsigmoid(0.5 * margins).mean()
    return loss, {"margin": margins.mean().item(), "dpo": loss.item()}


def main():
    client = mint.ServiceClient().create_lora_training_client(base_model=BASE, rank=8)
    tokenizer = client.get_tokenizer()
    data = [datum(tokenizer, question, answer) for question, *answers in PAIRS for answer in answers]
    seen = []
    for _ in range(8):
        seen.append(client.forward_backward_custom(data, bradley_terry).result().metrics)
        client.optim_step(types.AdamParams(learning_rate=2e-3)).result()
    print(json.dumps({"dpo": [m["dpo"] for m in seen], "margin": [m["margin"] for m in seen]}))


main()
