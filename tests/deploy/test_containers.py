"""The commands of the Kubernetes manifests, run here with files in place of volumes and secrets, and their probes."""

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from helpers.command_line import ROOT, palestra

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

Container = Mapping[str, Any]


def container(manifest: str) -> Container:
    found = yaml.safe_load_all((ROOT / "deploy/kubernetes" / manifest).read_text())
    (workload,) = (each for each in found if each["kind"] in ("Deployment", "StatefulSet"))
    (only,) = workload["spec"]["template"]["spec"]["containers"]
    return dict(only)


@contextmanager
def started(own: Container, places: Mapping[str, Path]) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Runs a container's command at a free port, with `places` in place of its volumes' paths; yields host and port
    once it has printed its first line. It must exit with code 0 on SIGTERM."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    args = [port if word == str(own["ports"][0]["containerPort"]) else word for word in own["args"]]
    assert {mount["mountPath"] for mount in own["volumeMounts"]} == places.keys()
    for inside, here in places.items():
        args = [re.sub(f"^{inside}(?=/|$)", str(here), word) for word in args]
    program, *words = own["command"]
    process = subprocess.Popen(
        [Path(sys.executable).parent / program, *words, *args],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout
    with process, process.stdout:
        first = process.stdout.readline()
        try:
            yield f"127.0.0.1:{port}", process
        finally:
            process.send_signal(signal.SIGTERM)
            rest, _ = process.communicate(timeout=120)
        assert process.returncode == 0, first + rest


def test_service_answers_its_probes_and_only_its_keys(tmp_path: Path) -> None:
    own = container("serve.yaml")
    key = palestra("keys", "add", "ada", "--auth", tmp_path / "keys.txt").strip()
    with started(own, {"/data": tmp_path / "data", "/keys": tmp_path}) as (address, _):
        paths = {own[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
        for path in paths:
            assert urllib.request.urlopen(f"http://{address}{path}", timeout=30).status == 200
        for given, expected in ((key, 200), ("tml-nobody", 401)):
            request = urllib.request.Request(f"http://{address}/metrics", headers={"authorization": f"Bearer {given}"})
            assert status(request) == expected


def status(request: urllib.request.Request) -> int:
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_env_server_answers_its_probes(tmp_path: Path) -> None:
    own = container("serve-envs.yaml")
    (tmp_path / "token").write_text("secret\n")
    with started(own, {"/token": tmp_path}) as (address, _), grpc.insecure_channel(address) as channel:
        assert own["startupProbe"]["grpc"] == own["livenessProbe"]["grpc"] == {"port": 50051}  # of the whole server
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=""), timeout=60)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
