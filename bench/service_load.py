"""Load on a server with API keys: a small client beside a heavy one, a burst of extreme sizes, the worker's memory."""

from __future__ import annotations

import asyncio
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

PROMPT = {"chunks": [{"tokens": list(range(20, 52))}]}


class Client:
    """A client with an API key that samples from the base without an adapter."""

    def __init__(self, url: str, key: str) -> None:
        self.http = httpx.AsyncClient(base_url=f"{url}/api/v1", headers={"X-API-Key": key}, timeout=600.0)

    async def ask(self, samples: int, tokens: int, **fields: Any) -> httpx.Response:
        given = {"base_model": "tiny", "prompt": PROMPT, "num_samples": samples, **fields}
        return await self.http.post("asample", json={**given, "sampling_params": {"max_tokens": tokens, "stop": []}})

    async def sample(self, samples: int, tokens: int, **fields: Any) -> float:
        """Seconds until the answer has arrived."""
        start = time.perf_counter()
        said = await self.ask(samples, tokens, **fields)
        said.raise_for_status()
        request = {"request_id": said.json()["request_id"]}
        while (reply := await self.http.post("retrieve_future", json=request)).status_code == 408:
            pass
        reply.raise_for_status()
        assert "error" not in reply.json(), reply.text[:300]
        return time.perf_counter() - start


async def beside_heavy(url: str, keys: dict[str, str], requests: int, heavy_requests: int) -> dict[str, float]:
    """The 99th percentile of a small request's seconds, alone and while another key has `heavy_requests` of 64
    answers of 120 tokens in the queue, which is full the whole time."""
    small, heavy = Client(url, keys["small"]), Client(url, keys["heavy"])
    for _ in range(5):
        await small.sample(1, 5)
    alone = [await small.sample(1, 5) for _ in range(requests)]
    load = [asyncio.create_task(heavy.sample(64, 120)) for _ in range(heavy_requests)]
    await asyncio.sleep(2.0)
    beside: list[float] = []
    while len(beside) < requests and not all(task.done() for task in load):
        beside.append(await small.sample(1, 5))
    await asyncio.gather(*load)
    return {"alone": p99(alone), "beside": p99(beside), "requests": len(beside)}


def p99(seconds: list[float]) -> float:
    return float(np.percentile(seconds, 99))


async def memory_after_burst(url: str, keys: dict[str, str], worker: int, sizes: tuple[int, int]) -> dict[str, float]:
    """The worker's resident memory in MiB before a burst, at its peak, and after it. The burst: a request of many
    answers, then many requests of one answer (`sizes` has both numbers), then both, long answers with top
    log-probabilities, and a request that is refused."""
    client = Client(url, keys["heavy"])
    for _ in range(3):
        await asyncio.gather(*(client.sample(8, 16) for _ in range(8)))
    before = await settled(worker)
    peak = [before]
    watch = asyncio.create_task(sample_memory(worker, peak))
    answers, requests = sizes
    await client.sample(answers, 256)
    await asyncio.gather(*(client.sample(1, 8) for _ in range(requests)))
    await asyncio.gather(client.sample(answers, 64), *(client.sample(1, 8) for _ in range(requests)))
    await asyncio.gather(*(client.sample(4, 400, topk_sample_logprobs=256) for _ in range(4)))
    refused = await client.ask(4096, 2000, topk_sample_logprobs=256)
    assert refused.status_code == 400, refused.status_code
    watch.cancel()
    return {"before": before, "peak": max(peak), "after": await settled(worker)}


async def sample_memory(worker: int, seen: list[float]) -> None:
    while True:
        seen.append(resident(worker))
        await asyncio.sleep(0.05)


async def settled(worker: int) -> float:
    """Resident memory in MiB after four idle seconds."""
    await asyncio.sleep(4.0)
    return resident(worker)


def resident(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"process {pid} is gone")


def worker_of(server: int) -> int:
    """The id of the process with the server's engine: a child of the server, or of its fork server."""
    parents = {server} | {pid for pid, line in children_of(server).items() if "forkserver" in line}
    found = {pid: line for parent in parents for pid, line in children_of(parent).items()}
    return next(pid for pid, line in found.items() if pid not in parents and "resource_tracker" not in line)


def children_of(parent: int) -> dict[int, str]:
    """The command lines of a process's children, by their ids."""
    command = ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(parent)]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    return {int(line.split()[0]): line for line in lines}
