"""Peak memory of the parts of a step that hold logits, in a separate process."""

import json
import os
import subprocess
import sys

import pytest

MEASURE = """
import json
from pathlib import Path

import numpy as np
import torch

from palestra.engine.bases import model as models
from palestra.engine.training import head
from palestra.core.accel.malloc import keep_freed_memory, release_freed_memory
from palestra.engine.sampling.sampler import Request, Sampler
from palestra.engine.sampling.token_sampling import SamplingConfig, sample_tokens
from palestra.testing import tiny_lm

VOCABULARY = 2**17

def memory(name):
    return int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0]) / 1024

def peak_of(action):
    found = []
    for _ in range(3):  # code that is read from disk again counts as memory, too
        release_freed_memory()
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        action()
        found.append(memory("VmHWM") - before)
    return min(found)

def draw(logits):
    with torch.inference_mode():
        sample_tokens(logits, [SamplingConfig()] * len(logits), np.full(len(logits), 0.5))

logits = torch.randn(64, VOCABULARY, generator=torch.Generator().manual_seed(0))
found = {"drawing": peak_of(lambda: draw(logits))}
del logits

engine = tiny_lm(0, vocab_size=VOCABULARY, num_hidden_layers=1)
own_head = head.LMHead(engine, None)

def score(count):
    hidden = torch.randn(count, engine.model.config.hidden_size, requires_grad=True)
    wanted = head.ScoredTokens(torch.arange(count), torch.arange(count), None)
    head.score_tokens(own_head, hidden, wanted, entropy_grad=False)[0].sum().backward()

found["head"] = peak_of(lambda: score(256))

keep_freed_memory()
sampler = Sampler(engine)
request = Request(np.arange(5, 9, dtype=np.int32), 64, SamplingConfig(max_tokens=3, stop_at_eos=False))
models.LARGE_MODEL_BYTES = 0
sampler.sample_all([request])
before = memory("VmRSS")
sampler.sample_all([request])
found["rest"] = memory("VmRSS") - before
print(json.dumps(found))
"""


@pytest.mark.slow  # memory alone, as the one of test_head.py; the results of the same parts are fast tests
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak is read from Linux's /proc")
def test_few_copies_of_logits_exist_at_a_time():
    """64 rows of 131,072 words are 32 MiB of logits."""
    # freed blocks are returned to the system at once: the peak is that of live tensors
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["drawing"] < 48  # besides the logits; all rows at once would take 192
    assert 32 < found["head"] < 96  # the logits and their probabilities; each further copy takes 32
    assert found["rest"] < 16  # the memory of sampling, except its 32 of logits, has been returned
