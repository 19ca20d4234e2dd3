"""A short training run by the official Tinker client: `python same_numbers_client.py URL BASE` prints numbers as
JSON."""

import json
import sys

import tinker
from tinker import types

url, base = sys.argv[1:]
service = tinker.ServiceClient(base_url=url, api_key="tml-any")
training = service.create_lora_training_client(base, rank=4, seed=3)
ids = [1, 40, 50, 60, 70, 80, 4]
inputs = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
datum = types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)
for _ in range(3):
    result = training.forward_backward([datum, datum], "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    print(json.dumps([output["logprobs"].tolist() for output in result.loss_fn_outputs]))
sampler = training.save_weights_and_get_sampling_client("numbers")
params = types.SamplingParams(max_tokens=12, temperature=1.0, seed=5)
answer = sampler.sample(types.ModelInput.from_ints(ids), num_samples=4, sampling_params=params).result()
for sequence in answer.sequences:
    print(json.dumps([sequence.tokens, sequence.logprobs]))
