"""Writes the fixtures of this folder: request bodies exactly as an official client sends them, one set per generation.

Run it with the Python of an environment that has the client (numpy and torch too), from anywhere:

    pip install tinker==0.15.0 torch && python tests/service/make_fixtures.py a
    pip install tinker==0.22.0 torch && python tests/service/make_fixtures.py b
    pip install tinker==0.38.0 torch && python tests/service/make_fixtures.py c

Nothing is sent anywhere. `<generation>.json` holds the JSON bodies by endpoint; `c.bin` and `c_options.bin` are the
protobuf that 0.38 sends for gradients. The data are those of `test_codec.py`.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from tinker import types
from tinker._compat import model_dump

FIXTURES = Path(__file__).parent / "fixtures"
MODEL = "s0123456789abcdef:train:0"
WHAT_IS_SENT = {
    "a": {"exclude_unset": True},
    "b": {"exclude_unset": False, "exclude_none": True},
    "c": {"exclude_unset": False, "exclude_none": True},
}


def data(generation: str) -> list[types.Datum]:
    """A supervised datum of two chunks, a datum of reinforcement learning, and one with four targets per position."""
    chunks = [types.EncodedTextChunk(tokens=[5, 6]), types.EncodedTextChunk(tokens=[7])]
    targets, weights = torch.zeros(9, 4, dtype=torch.int64), torch.zeros(9, 4)
    targets[2], weights[2] = torch.tensor([3, 1, 4, 1]), torch.tensor([0.5, 0.25, 0.125, 0.125])
    rows = [
        types.Datum(
            model_input=types.ModelInput(chunks=chunks),
            loss_fn_inputs={"target_tokens": [6, 7, 8], "weights": [0.0, 1.0, -2.5]},
        ),
        types.Datum(
            model_input=types.ModelInput.from_ints([9, 10]),
            loss_fn_inputs={
                "target_tokens": torch.tensor([10, 11]),
                "logprobs": np.array([-0.5, -1.25], np.float32),
                "advantages": types.TensorData(data=[1.5], dtype="float32"),
                "mask": torch.tensor([0, 1]),
            },
        ),
    ]
    if generation != "a":  # 0.15 flattens the matrix; later versions send it sparse
        wide = types.ModelInput.from_ints(list(range(9)))
        rows.append(types.Datum(model_input=wide, loss_fn_inputs={"target_tokens": targets, "weights": weights}))
    return rows


def bodies(generation: str) -> dict[str, object]:
    """Requests by endpoint, with only the fields that the client itself fills in."""
    prompt = types.ModelInput.from_ints([1, 2, 3])
    lora = types.LoraConfig(rank=8, seed=1, train_mlp=False) if generation != "c" else types.LoraConfig(rank=8)
    requests = {
        "create_session": types.CreateSessionRequest(tags=["t"], user_metadata=None, sdk_version="x", project_id=None),
        "session_heartbeat": types.SessionHeartbeatRequest(session_id="s0"),
        "create_model": types.CreateModelRequest(
            session_id="s0", model_seq_id=0, base_model="org/base", user_metadata=None, lora_config=lora
        ),
        "get_info": types.GetInfoRequest(model_id=MODEL),
        "retrieve_future": types.FutureRetrieveRequest(request_id="r0"),
        "optim_step": types.OptimStepRequest(
            adam_params=types.AdamParams(learning_rate=0.001), model_id=MODEL, seq_id=2
        ),
        "save_weights": types.SaveWeightsRequest(model_id=MODEL, path="step-1", seq_id=3, ttl_seconds=None),
        "save_weights_for_sampler": types.SaveWeightsForSamplerRequest(
            model_id=MODEL, path=None, seq_id=4, sampling_session_seq_id=0, ttl_seconds=None
        ),
        "load_weights": types.LoadWeightsRequest(
            model_id=MODEL, seq_id=5, path=f"tinker://{MODEL}/weights/step-1", optimizer=True
        ),
        "create_sampling_session": types.CreateSamplingSessionRequest(
            session_id="s0", sampling_session_seq_id=1, base_model="org/base", model_path=None
        ),
        "asample": types.SampleRequest(
            sampling_session_id="s0:sample:1",
            seq_id=7,
            num_samples=2,
            prompt=prompt,
            sampling_params=types.SamplingParams(max_tokens=5, stop=["\n\nUser:"], seed=3, temperature=0.5),
            prompt_logprobs=False,
            topk_prompt_logprobs=0,
        ),
    }
    return {name: model_dump(body, mode="json", **WHAT_IS_SENT[generation]) for name, body in requests.items()}


def gradients(generation: str, loss_fn_config: dict[str, object] | None) -> types.ForwardBackwardRequest:
    given = types.ForwardBackwardInput(data=data(generation), loss_fn="cross_entropy", loss_fn_config=loss_fn_config)
    return types.ForwardBackwardRequest(forward_backward_input=given, model_id=MODEL, seq_id=1)


def main(generation: str) -> None:
    FIXTURES.mkdir(exist_ok=True)
    sent = bodies(generation)
    if generation == "a":
        sent["forward_backward"] = model_dump(gradients("a", None), mode="json", **WHAT_IS_SENT["a"])
    if generation == "b":
        from tinker.lib._pydantic_conv import to_pydantic_request

        request = to_pydantic_request(gradients("b", {"clip_low_threshold": 0.9}))
        sent["forward_backward"] = model_dump(request, mode="json", **WHAT_IS_SENT["b"])
    if generation == "c":
        from tinker.proto.request_conv import forward_backward_request_to_proto

        for name, options in {"c": None, "c_options": {"clip_low_threshold": 0.9, "mode": "x"}}.items():
            message = forward_backward_request_to_proto(gradients("c", options))
            message.forward_only = options is not None
            (FIXTURES / f"{name}.bin").write_bytes(message.SerializeToString(deterministic=True))
    (FIXTURES / f"{generation}.json").write_text(json.dumps(sent, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
