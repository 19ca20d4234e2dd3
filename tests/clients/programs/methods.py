"""Calls every public method of the SDK's clients once, each with sensible arguments, and prints the result of each as
JSON: "works", or the error message. A method without a call in this program is "not tried"."""

import asyncio
import datetime
import inspect
import json
import logging
import os
import warnings

import tinker
from tinker import types

BASE = "Qwen/Qwen3-0.6B"
IDS = [1, 40, 50, 60, 70, 80, 4]
WAIT = 60
CLASSES = ("TrainingClient", "SamplingClient", "RestClient", "ServiceClient")
NOT_CALLS = ("on_queue_state_change",)  # a callback


def nll(data, logprobs):
    loss = -sum(lp.sum() for lp in logprobs)
    return loss, {"nll": loss.item()}


def traced_nll(logprobs, weights):
    loss = -(logprobs * weights).sum()
    return loss, {"custom/nll:sum": loss}


def resolve(value):
    """The result of a call that returns a value, a coroutine, a future, or a coroutine of a future."""
    if inspect.iscoroutine(value):
        value = asyncio.run(asyncio.wait_for(value, WAIT))
    return value.result(WAIT) if hasattr(value, "result") else value


class Clients:
    """Clients, and weights that may be read, changed and deleted."""

    def __init__(self):
        self.ServiceClient = tinker.ServiceClient()
        self.TrainingClient = resolve(self.ServiceClient.create_lora_training_client(BASE, rank=4))
        self.run = self.TrainingClient.get_info().model_id
        self.state = self.TrainingClient.save_state("state").result().path
        self.weights = self.TrainingClient.save_weights_for_sampler("weights").result().path
        self.SamplingClient = resolve(self.ServiceClient.create_sampling_client(model_path=self.weights))
        self.RestClient = self.ServiceClient.create_rest_client()
        self.session = self.run.partition(":")[0]
        self.sampler = f"{self.session}:sample:0"
        self.names = 0

    @property
    def prompt(self):
        return types.ModelInput.from_ints(IDS)

    @property
    def data(self):
        inputs = {"target_tokens": IDS[1:], "weights": [1.0] * (len(IDS) - 1)}
        return [types.Datum(model_input=types.ModelInput.from_ints(IDS[:-1]), loss_fn_inputs=inputs)]

    def name(self):
        """A new name."""
        self.names += 1
        return f"name-{self.names}"

    def doomed(self):
        """A new path of weights, to be deleted."""
        return self.TrainingClient.save_weights_for_sampler(self.name()).result().path

    def external(self):
        return self.TrainingClient.save_weights_external(self.name()).result().path


def call(*args, **kwargs):
    return args, kwargs


def last(path):
    return path.removeprefix("tinker://").partition("/")[2]


HOW = {
    "ServiceClient": {
        "close": lambda b: call("success"),
        "copy_weights": lambda b: call(b.state),
        "create_custom_loss": lambda b: call(traced_nll, {"logprobs": 1, "weights": 1}),
        "create_lora_training_client": lambda b: call(BASE, rank=2, seed=1, train_mlp=False),
        "create_sampling_client": lambda b: call(base_model=BASE),
        "create_training_client_from_state": lambda b: call(b.state),
        "create_training_client_from_state_with_optimizer": lambda b: call(b.state),
    },
    "TrainingClient": {
        "create_sampling_client": lambda b: call(b.weights),
        "forward": lambda b: call(b.data, "cross_entropy"),
        "forward_backward": lambda b: call(b.data, "cross_entropy"),
        "forward_backward_custom": lambda b: call(b.data, nll),
        "load_state": lambda b: call(b.state),
        "load_state_with_optimizer": lambda b: call(b.state),
        "optim_step": lambda b: call(types.AdamParams(learning_rate=1e-4)),
        "save_state": lambda b: call(b.name(), ttl_seconds=3600),
        "save_weights_external": lambda b: call(b.name()),
        "save_weights_for_sampler": lambda b: call(b.name(), ttl_seconds=3600),
    },
    "SamplingClient": {
        "compute_logprobs": lambda b: call(b.prompt),
        "create": lambda b: call(b.ServiceClient.holder, base_model=BASE),
        "from_sampler_handle": lambda b: call(b.SamplingClient.get_sampler_handle()),
        "sample": lambda b: call(b.prompt, 2, types.SamplingParams(max_tokens=4, temperature=0.5, seed=1)),
    },
    "RestClient": {
        "assign_session_project": lambda b: call(b.session, "a-project"),
        "copy_weights": lambda b: call(b.state),
        "delete_checkpoint": lambda b: call(b.run, last(b.doomed())),
        "delete_checkpoint_from_tinker_path": lambda b: call(b.doomed()),
        "export_session_trace": lambda b: call(b.session),
        "get_audit_log": lambda b: call(day=datetime.date(2026, 1, 1)),
        "get_billing_usage": lambda b: call("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"),
        "get_checkpoint_archive_url": lambda b: call(b.run, "sampler_weights/weights"),
        "get_checkpoint_archive_url_from_tinker_path": lambda b: call(b.weights),
        "get_external_weights_urls": lambda b: call(b.external()),
        "get_sampler": lambda b: call(b.sampler),
        "get_session": lambda b: call(b.session),
        "get_training_run": lambda b: call(b.run),
        "get_training_run_by_tinker_path": lambda b: call(b.state),
        "get_weights_info_by_tinker_path": lambda b: call(b.state),
        "list_checkpoints": lambda b: call(b.run),
        "publish_checkpoint_from_tinker_path": lambda b: call(b.state),
        "search_sessions": lambda b: call(types.SessionSearchRequest()),
        "set_checkpoint_ttl_from_tinker_path": lambda b: call(b.doomed(), 60),
        "unpublish_checkpoint_from_tinker_path": lambda b: call(b.state),
    },
}


def arguments(bench, kind, method, function):
    known = HOW[kind].get(method.removesuffix("_async").removesuffix("_submit"))
    if known is not None:
        return known(bench)
    needed = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    return None if needed else call()


def tried(bench, kind, method):
    function = getattr(getattr(bench, kind), method)
    given = arguments(bench, kind, method, function)
    if given is None:
        return "not tried"
    try:
        resolve(function(*given[0], **given[1]))
    except Exception as error:
        return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return "works"


def methods(bench, kind):
    """The public methods of a client; closing comes last."""
    cls = type(getattr(bench, kind))
    named = [n for n in dir(cls) if not n.startswith("_") and callable(getattr(cls, n)) and n not in NOT_CALLS]
    return sorted(named, key=lambda name: (name == "close", name))


def main():
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    os.environ["TINKER_PROJECT_ID"] = "a-project"  # where copies go
    bench = Clients()
    names = [(kind, name) for kind in CLASSES for name in methods(bench, kind)]
    print(json.dumps({f"{kind}.{name}": tried(bench, kind, name) for kind, name in names}))


main()
