"""The newest official client's own names, read from its package, beside this server's: each is served, or is listed
here with the reason why it is refused or not needed."""

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from fastapi.routing import APIRoute
from pydantic import BaseModel

from palestra.service.server.app import ROUTERS
from palestra.service.wire.schemas import requests, responses, weights
from palestra.service.wire.validation import LOSS_SPECS

tinker = pytest.importorskip("tinker")

PREFIX = "/api/v1"
VERBS = {"get", "post", "put", "delete", "patch"}

REFUSED_ROUTES = {
    "GET /audit": "there is no log of accesses to checkpoints",
    "GET /billing/usage/checkpoints/current": "nothing is billed",
    "GET /billing/usage/events": "nothing is billed",
    "GET /sessions/x/trace_export": "traces go to the collector that the operator names",
    "POST /create_custom_loss": "the client runs such losses itself, as the config sent to it says",
    "POST /sessions/search": "GET /sessions lists them all",
}
OTHER_MODELS = {
    "ClientConfigRequest": "its one field, the client's version, changes nothing here",
    "CreateCustomLossRequest": REFUSED_ROUTES["POST /create_custom_loss"],
    "GetBillingUsageRequest": REFUSED_ROUTES["GET /billing/usage/events"],
    "GetCurrentCheckpointStorageUsageRequest": REFUSED_ROUTES["GET /billing/usage/checkpoints/current"],
    "GetInfoRequest": "ModelRequest here",
    "SessionSearchRequest": REFUSED_ROUTES["POST /sessions/search"],
    "TelemetrySendRequest": "telemetry is accepted and dropped unread",
    "UnloadModelRequest": "ModelRequest here",
}
OTHER_FIELDS = {
    # settings of the client's own queues, for which it has defaults
    "ClientConfigResponse": {
        "billing_exception_max_pause_duration_sec",
        "custom_loss_server_side",
        "fwdbwd_dispatch_bytes_semaphore_size",
        "inflight_response_bytes_semaphore_size",
        "sample_dispatch_bytes_semaphore_size",
        "sample_enable_stuck_detection",
        "sample_join_sampling_session",
        "sample_no_retries",
        "sample_use_retrieve_futures",
    },
    "ClientDynamicConfigResponse": {"sample_cancel_max_batch_size"},
    # of optimizers other than Adam; the client sends it instead of adam_params
    "OptimStepRequest": {"optim_params"},
}
REFUSED_LOSSES = {
    "stable_reinforce": "its formula is not public",
    "custom": REFUSED_ROUTES["POST /create_custom_loss"],
}
REFUSED_CHUNKS = {"DmelChunk": "audio", "ImageAssetPointerChunk": "images", "ImageChunk": "images"}


def paths_of_client() -> Iterator[tuple[str, str]]:
    """Yields verb and path of each request that the client's code sends; parts of a path that vary are "x"."""
    for file in Path(tinker.__file__).parent.rglob("*.py"):
        if file.stem.endswith("_test"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                verb = node.func.attr.strip("_")
                path = literal(node.args[0])
                if verb in VERBS and path.startswith(PREFIX):
                    yield verb.upper(), path.removeprefix(PREFIX)


def literal(node: ast.expr) -> str:
    """Returns a string in the code, with "x" for what is filled into it."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in node.values)
    return ""


def models_of_client(suffix: str) -> dict[str, Any]:
    return {name: kind for name, kind in vars(tinker.types).items() if name.endswith(suffix) and inspect.isclass(kind)}


def field_names(kind: Any) -> set[str]:
    if dataclasses.is_dataclass(kind):
        return {field.name for field in dataclasses.fields(kind) if not field.name.startswith("_")}
    return set(kind.model_fields)


def own_model(name: str) -> type[BaseModel] | None:
    for module in (requests, responses, weights):
        if name in vars(module):
            model: type[BaseModel] = vars(module)[name]
            return model
    return None


def test_every_route_of_the_client_is_served_or_listed() -> None:
    served = [route for router, _ in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    asked = set(paths_of_client())
    assert len(asked) > 40
    missing = set()
    for verb, path in asked:
        concrete = path.replace("/checkpoints/x", "/checkpoints/weights/1")  # an id of two parts
        if not any(verb in route.methods and route.path_regex.match(concrete) for route in served):
            missing.add(f"{verb} {path}")
    assert missing == REFUSED_ROUTES.keys()


@pytest.mark.parametrize("suffix", ["Request", "Params", "Config", "Input"])
def test_every_field_that_the_client_sends_has_a_place(suffix: str) -> None:
    others = {"AdamOptimizerConfig", "DimuonOptimizerConfig", "DimuonParams", "CustomLossInput"}
    for name, kind in models_of_client(suffix).items():
        model = own_model(name)
        if model is None:
            assert name in OTHER_MODELS or name in others, f"{name} of the client is unknown here"
            continue
        assert field_names(kind) - model.model_fields.keys() == OTHER_FIELDS.get(name, set()), name


def test_every_field_that_the_client_reads_is_answered_or_optional() -> None:
    for name, kind in models_of_client("Response").items():
        model = own_model(name)
        if model is None or dataclasses.is_dataclass(kind):
            continue
        unanswered = kind.model_fields.keys() - model.model_fields.keys()
        assert unanswered == OTHER_FIELDS.get(name, set()), name
        assert not [field for field in unanswered if kind.model_fields[field].is_required()], name


def test_every_loss_and_kind_of_input_is_served_or_listed() -> None:
    assert set(get_args(tinker.types.LossFnType)) - LOSS_SPECS.keys() == REFUSED_LOSSES.keys()
    chunks = {name for name in models_of_client("Chunk") if name != "ModelInputChunk"}
    assert chunks - {"EncodedTextChunk"} == REFUSED_CHUNKS.keys()
