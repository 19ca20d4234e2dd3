"""The calls of MinT's recipes/lora_adapter.py: a few steps of SFT, both kinds of saving, a sampler named by path and
base, a greedy answer; then training continues from the saved state in a new client."""

import json
import os

import mint
from mint import types

BASE = os.environ.get("MINT_BASE_MODEL", "Qwen/Qwen3-0.6B")
SECRET = "the stone is green"


def main():
    service = mint.ServiceClient()
    client = service.create_lora_training_client(base_model=BASE, rank=16)
    tokenizer = client.get_tokenizer()
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "say it"}], add_generation_prompt=True, tokenize=False
    )
    prompt = tokenizer.encode(text, add_special_tokens=False)
    ids = [*tokenizer.encode(SECRET, add_special_tokens=False), tokenizer.eos_token_id]
    inputs = {"target_tokens": (prompt + ids)[1:], "weights": [0.0] * (len(prompt) - 1) + [1.0] * len(ids)}
    data = [types.Datum(model_input=types.ModelInput.from_ints((prompt + ids)[:-1]), loss_fn_inputs=inputs)]
    losses = []
    for _ in range(12):
        losses.append(client.forward_backward(data, "cross_entropy").result().metrics["loss:sum"])
        client.optim_step(types.AdamParams(learning_rate=5e-3)).result()
    state = client.save_state("state").result().path
    weights = client.save_weights_for_sampler("adapter").result().path
    sampler = service.create_sampling_client(model_path=weights, base_model=BASE)
    params = types.SamplingParams(max_tokens=24, temperature=0.0)
    said = [sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result().sequences[0] for _ in range(2)]
    here = client.forward(data, "cross_entropy").result().metrics["loss:sum"]
    again = service.create_training_client_from_state_with_optimizer(state)
    there = again.forward(data, "cross_entropy").result().metrics["loss:sum"]
    report = {"losses": losses, "resumed": [here, there], "state": state, "weights": weights, "secret": SECRET}
    report["said"] = [tokenizer.decode(sequence.tokens, skip_special_tokens=True) for sequence in said]
    report["stopped"] = [sequence.stop_reason for sequence in said]
    print(json.dumps(report))


main()
