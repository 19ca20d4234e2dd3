"""Compares the log-probabilities of the trainer's forward pass, of compute_logprobs of a sampler made from it, and of
samples, at temperature 1 and another. Prints the largest differences."""

import json
import warnings

import numpy as np
import tinker
import torch
from tinker import types

VOCABULARY = 512
PROMPT = [1, 40, 50, 60, 70, 80, 90, 100, 3]


def resolve(value):
    return value.result() if hasattr(value, "result") else value


def trainer_logprobs(client, ids):
    """Log-probabilities [T, V] of every token after each of `ids`, by the trainer."""
    rows, V = len(ids), VOCABULARY
    targets = torch.arange(V).repeat(rows, 1)
    inputs = {"target_tokens": types.TensorData.from_torch(targets)}
    inputs["weights"] = types.TensorData.from_torch(torch.zeros(rows, V))
    datum = types.Datum(model_input=types.ModelInput.from_ints(ids), loss_fn_inputs=inputs)
    output = client.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    return np.array(output.data, np.float64).reshape(rows, V)


def forward(client, ids):
    inputs = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
    datum = types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)
    return np.array(client.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data)


def train(client):
    """Some steps, so that the adapter is not zero."""
    ids = [*PROMPT, 200, 201, 202, 4]
    inputs = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
    datum = types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)
    for _ in range(3):
        client.forward_backward([datum], "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=2e-3)).result()


def sample_difference(client, sampler, temperature):
    """The largest difference between samples' log-probabilities and the trainer's distribution at `temperature`."""
    params = types.SamplingParams(max_tokens=12, temperature=temperature, stop=[], seed=7)
    reply = sampler.sample(types.ModelInput.from_ints(PROMPT), 4, params).result()
    worst = 0.0
    for sequence in reply.sequences:
        scaled = trainer_logprobs(client, PROMPT + sequence.tokens[:-1])[len(PROMPT) - 1 :] / temperature
        logps = scaled - np.logaddexp.reduce(scaled, -1, keepdims=True)
        drawn = logps[np.arange(len(sequence.tokens)), sequence.tokens]
        worst = max(worst, float(np.abs(drawn - np.array(sequence.logprobs)).max()))
    return worst


def main():
    warnings.simplefilter("ignore")
    client = resolve(tinker.ServiceClient().create_lora_training_client("Qwen/Qwen3-0.6B", rank=8))
    train(client)
    sampler = resolve(client.save_weights_and_get_sampling_client())
    ids = [*PROMPT, *range(200, 260)]
    scored = sampler.compute_logprobs(types.ModelInput.from_ints(ids)).result()
    report = {"first": scored[0], "scored": float(np.abs(forward(client, ids) - np.array(scored[1:])).max())}
    report |= {f"sampled at {t}": sample_difference(client, sampler, t) for t in (1.0, 0.6)}
    print(json.dumps(report))


main()
