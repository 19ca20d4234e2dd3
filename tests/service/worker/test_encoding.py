"""Encoding of samples, and its translation to JSON for older clients."""

import json

import numpy as np

from palestra.engine.sampling.request import Completion
from palestra.engine.sampling.scoring import ScoreResult
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.service.wire import codec
from palestra.service.wire import wire_pb2 as pb
from palestra.service.wire.jobs import SampleJob
from palestra.service.worker.encoding import encode_sample

JOB = SampleJob(base="tiny", folder=None, tokens=[5, 6, 7], num_samples=2, sampling=SamplingConfig(), seed=0)
SCORES = ScoreResult(
    logprobs=np.array([-1.0, -2.0]),
    top_ids=np.array([[3, 4], [5, 9]]),
    top_logprobs=np.array([[-1.0, -2.0], [-0.5, np.nan]]),
    target_logprobs=np.array([[-1.0, 0.0], [0.0, -2.0]]),
    drawn_ids=np.array([[3], [4]]),
    drawn_logprobs=np.array([[-1.0], [-2.0]]),
)


def test_samples_with_prompt_scores_are_encoded() -> None:
    completions = [
        Completion(np.array([1, 2]), np.array([-0.25, -0.5]), "stop", SCORES.top_ids, SCORES.top_logprobs),
        Completion(np.array([7]), np.array([-3.0]), "length"),
    ]
    job = JOB.model_copy(update={"prompt_logprobs": True, "topk_prompt": 2, "drawn_prompt": 1})
    result = encode_sample(completions, job, SCORES)
    message = pb.SampleResponse.FromString(result)
    assert np.frombuffer(message.topk_prompt_logprobs.token_ids, np.int32).tolist() == [0, 0, 3, 4, 5, 0]
    assert np.frombuffer(message.topk_prompt_logprobs.logprobs, np.float32).tolist()[:3] == [-99999, -99999, -1]
    tree = json.loads(codec.sample_to_json(result))
    assert tree["sequences"][0] == {
        "stop_reason": "stop",
        "tokens": [1, 2],
        "logprobs": [-0.25, -0.5],
        "topk_logprobs": [[[3, -1.0], [4, -2.0]], [[5, -0.5]]],
    }
    assert tree["sequences"][1] == {"stop_reason": "length", "tokens": [7], "logprobs": [-3.0]}
    assert tree["prompt_logprobs"] == [None, -1.0, -2.0]
    assert tree["topk_prompt_logprobs"] == [None, [[3, -1.0], [4, -2.0]], [[5, -0.5]]]
    assert tree["target_prompt_logprobs"] == {"data": [-1, 0, 0, -2], "dtype": "float32", "shape": [2, 2]}
    assert tree["prompt_alt_tokens"]["tokens"] == {"data": [3, 4], "dtype": "int64", "shape": [2, 1]}
    assert tree["prompt_alt_tokens"]["logprobs"] == {"data": [-1, -2], "dtype": "float32", "shape": [2, 1]}
    assert tree["prompt_cache_hit_tokens"] == 0


def test_scores_before_the_last_n_tokens_are_left_out() -> None:
    job = JOB.model_copy(update={"prompt_logprobs": True, "last_n": 1})
    tree = json.loads(codec.sample_to_json(encode_sample([], job, SCORES)))
    assert tree["prompt_logprobs"] == [None, None, -2.0]


def test_samples_without_prompt_scores_are_encoded() -> None:
    result = encode_sample([Completion(np.array([1]), np.array([-1.0]), "stop")], JOB)
    message = pb.SampleResponse.FromString(result)
    assert [field.name for field, _ in message.ListFields()] == ["sequences"]
    tree = json.loads(codec.sample_to_json(result))
    assert (tree["type"], tree["prompt_logprobs"], tree["topk_prompt_logprobs"]) == ("sample", None, None)
