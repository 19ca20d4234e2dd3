"""MinT's reverse-KL pass: requests that the front end accepts, and a student that learns on a running server.

The requests are those of MinT's client (mindlab-toolkit 0.2.0), which numbers them only on request.
"""

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.fronts import Front
from helpers.processes import serving

from palestra.service.wire.jobs import ReverseKLJob

PATH = "/mint/forward_backward_reverse_kl"
NAN = float("nan")


def tensor(data: Any, dtype: str = "float32") -> dict[str, Any]:
    return {"data": data, "dtype": dtype, "shape": [len(data)]}


def lesson(student: Any = (5, 6), reference: Any = (7,), answer: Any = (8, 9), weights: Any = (1.0, 0.5)) -> Any:
    prompts = {"student_input": student, "reference_input": reference}
    inputs = {name: {"chunks": [{"type": "encoded_text", "tokens": list(ids)}]} for name, ids in prompts.items()}
    return {**inputs, "target_tokens": tensor(list(answer), "int64"), "weights": tensor(list(weights))}


def call(model: str, reference: str = "tiny", *data: Any, **more: Any) -> dict[str, Any]:
    kind = "mint_forward_backward_reverse_kl"
    body = {"model_id": model, "reference_model_path": reference, "data": list(data) or [lesson()], "type": kind}
    return {**body, "temperature": 1.0, "seq_id": None, **more}


@pytest.mark.parametrize("scheme", ["tinker", "mint"])
@pytest.mark.parametrize("kind", ["training", "sampler"])
def test_reference_may_be_any_weights_of_the_base(front: Front, kind: str, scheme: str) -> None:
    model = front.model()
    path = front.weights(model, kind=kind).replace("tinker", scheme)
    assert front.post(PATH, call(model, path, temperature=0.5)).status_code == 200
    row = front.take()
    job = ReverseKLJob.model_validate_json(row.body)
    assert (row.kind, row.model, row.seq) == ("reverse_kl", model, None)
    assert job.folder is not None and job.temperature == 0.5
    (found,) = job.lessons
    assert (found.student, found.reference, found.answer, found.weights) == ([5, 6], [7], [8, 9], [1.0, 0.5])


def test_the_reference_may_be_the_bare_base(front: Front) -> None:
    assert front.post(PATH, call(front.model(), "Qwen/Qwen3-0.6B", seq_id=1)).status_code == 200
    row = front.take()
    assert row.seq == 1
    assert ReverseKLJob.model_validate_json(row.body).folder is None


def test_repeated_request_is_queued_once(front: Front) -> None:
    body = call(front.model())
    ids = {front.post(PATH, body, headers={"X-Idempotency-Key": key}).json()["request_id"] for key in ("a", "a", "b")}
    assert len(ids) == 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"student": ()}, r"data\[1\].student_input has 0 tokens"),
        ({"reference": [1] * 2048}, r"data\[1\].reference_input has 2048 tokens"),
        ({"answer": (8, 512)}, r"data\[1\].target_tokens has id 512 at index 1"),
        ({"reference": (512,)}, r"data\[1\].reference_input has id 512"),
        ({"answer": (), "weights": ()}, "at least one"),
        ({"weights": (1.0,)}, "for each of the 2 target_tokens"),
        ({"weights": (1.0, 1e39)}, "finite"),
    ],
)
def test_nonsensical_fields_are_refused_by_name(front: Front, wrong: dict[str, Any], message: str) -> None:
    reply = front.post(PATH, call(front.model(), "tiny", lesson(), lesson(**wrong)))
    assert reply.status_code == 400
    assert re.search(message, reply.json()["detail"])


@pytest.mark.parametrize(
    "more", [{"temperature": 0}, {"temperature": -1}, {"data": []}, {"reference_model_path": "no"}]
)
def test_out_of_range_values_are_refused(front: Front, more: dict[str, Any]) -> None:
    assert front.post(PATH, {**call(front.model()), **more}).status_code == 400


def test_other_owners_weights_are_refused_as_reference(shared: Front) -> None:
    theirs = shared.weights(shared.model("bobs", of="bob"), of="bob")
    assert shared.post(PATH, call(shared.model(of="ada"), theirs), of="ada").status_code == 404


@pytest.mark.slow
def test_student_converges_to_its_reference(tmp_path: Path) -> None:
    """Unnumbered passes and numbered steps alternate, as MinT's client sends them."""
    with serving(tmp_path / "data") as url, httpx.Client(base_url=f"{url}/api/v1", timeout=60) as http:

        def ask(verb: str, **body: Any) -> dict[str, Any]:
            reply = http.post(f"/{verb}", json=body)
            assert reply.status_code == 200, reply.text
            while True:
                answer = http.post("/retrieve_future", json={"request_id": reply.json()["request_id"]})
                if answer.status_code != 408:
                    assert "error" not in answer.json(), answer.text
                    return dict(answer.json())

        session = http.post("/create_session", json={}).json()["session_id"]
        student, teacher = (
            ask(
                "create_model",
                session_id=session,
                model_seq_id=i,
                base_model="tiny",
                lora_config={"rank": 8, "seed": i},
            )["model_id"]
            for i in range(2)
        )
        adam = {"learning_rate": 3e-3}
        inputs = {"target_tokens": tensor([6, 8, 9], "int64"), "weights": tensor([0.0, 1.0, 1.0])}
        datum = {"model_input": {"chunks": [{"tokens": [5, 6, 8]}]}, "loss_fn_inputs": inputs}
        taught = {"data": [datum], "loss_fn": "cross_entropy"}
        for step in range(8):
            ask("forward_backward", model_id=teacher, seq_id=2 * step + 1, forward_backward_input=taught)
            ask("optim_step", model_id=teacher, seq_id=2 * step + 2, adam_params=adam)
        path = ask("save_weights_for_sampler", model_id=teacher, seq_id=17, path="teacher")["path"]
        passes = []
        for step in range(12):
            same = lesson(reference=(5, 6), weights=(1.0, 1.0))
            passes.append(ask(PATH[1:], **call(student, path, same, lesson(reference=(5, 6), weights=(0.0, 0.0)))))
            ask("optim_step", model_id=student, seq_id=step + 1, adam_params=adam)
    first, last = passes[0], passes[-1]
    assert first["type"] == "mint_forward_backward_reverse_kl"
    losses = [output["loss"]["data"] for output in first["outputs"]]
    assert losses == [[pytest.approx(first["metrics"]["loss:sum"])], [0.0]]
    assert first["metrics"]["num_tokens:sum"] == 2 and first["metrics"]["num_samples:sum"] == 2
    assert first["metrics"]["reverse_kl:mean"] == pytest.approx(losses[0][0] / 2)
    assert last["metrics"]["reverse_kl:mean"] < 0.2 * first["metrics"]["reverse_kl:mean"]
