"""Samplers in their own processes, as users start them."""

import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from helpers.warm_processes import start_palestra

from palestra.engine.bases.names import resolve_base

READY = "sampling at "


@contextmanager
def serving(*options: str, key: str = "") -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Address and process of `palestra serve-sampler`, which must exit with code 0 on SIGTERM."""
    environment = os.environ | {"PALESTRA_SAMPLER_KEY": key}
    process = start_palestra("serve-sampler", "--port", "0", *options, env=environment, with_stderr=False)
    try:
        line = process.stdout.readline()
        assert line.startswith(READY), line
        yield line.removeprefix(READY).split()[0], process
    finally:
        process.terminate()
        process.communicate(timeout=60)


@contextmanager
def official(base: str) -> Iterator[str]:
    """The address of `vllm serve`, started as in docs/scaling/samplers.md."""
    port = "8791"
    environment = os.environ | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "HF_HUB_OFFLINE": "1"}
    options = ["--enable-lora", "--max-lora-rank", "16", "--max-loras", "4", "--max-cpu-loras", "16"]
    shape = ["--dtype", "float32", "--max-model-len", "512", "--gpu-memory-utilization", "0.3", "--port", port]
    command = ["vllm", "serve", resolve_base(base), "--served-model-name", base, *options, *shape]
    process = subprocess.Popen(command, env=environment)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(f"{url}/health", process)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 240
    while time.monotonic() < until:
        assert process.poll() is None, "vllm serve ended"
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(1)
    raise AssertionError("vllm serve does not come up")
