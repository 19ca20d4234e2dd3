"""The search of checkpoints, as the documentation of Tinker's SDK 0.39 describes its requests."""

import time
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import pytest
from helpers.fronts import Front
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from palestra.service.storage.tables import checkpoints
from palestra.service.wire.schemas.weights import CheckpointSearchRequest


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class DocumentedOwner(Strict):
    type: Literal["own"] = "own"


class DocumentedCursor(BaseModel):
    last_created_at: AwareDatetime
    last_checkpoint_uuid: str


class DocumentedSearch(Strict):
    """The fields of CheckpointSearchRequest in the public documentation."""

    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = {}
    checkpoint_type: Literal["training", "sampler", "external"] | None = None
    owner: DocumentedOwner = DocumentedOwner()
    base_models: list[str] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: DocumentedCursor | None = None


class DocumentedCheckpoint(BaseModel):
    """What a client reads of a checkpoint."""

    checkpoint_id: str
    tinker_path: str
    base_model: str | None = None


class DocumentedPage(BaseModel):
    checkpoints: list[DocumentedCheckpoint]
    next_cursor: DocumentedCursor | None = None


def search(front: Front, *, of: str = "", **fields: Any) -> DocumentedPage:
    """A page, asked for as a client does: without the fields that are null."""
    body = DocumentedSearch(**fields).model_dump(mode="json", exclude_none=True)
    reply = front.post("/checkpoints/search", body, of=of)
    assert reply.status_code == 200, reply.text
    return DocumentedPage.model_validate(reply.json())


def names(front: Front, **fields: Any) -> list[str]:
    return [found.checkpoint_id for found in search(front, **fields).checkpoints]


def all_pages(front: Front, **fields: Any) -> list[list[str]]:
    pages, cursor = [], None
    while True:
        page = search(front, cursor=cursor, **fields)
        pages.append([found.checkpoint_id for found in page.checkpoints])
        cursor = page.next_cursor
        if cursor is None:
            return pages
        assert len(pages) < 20


def change(front: Front, path: str, **values: Any) -> None:
    front.context.store.update(checkpoints, path, **values)


def test_bodies_of_the_documented_fields_are_read_as_they_are() -> None:
    cursor = DocumentedCursor(last_created_at=datetime(2026, 11, 6, tzinfo=UTC), last_checkpoint_uuid="x")
    fields = {"project_ids": ["p"], "user_metadata": {"a": "b"}, "checkpoint_type": "external", "base_models": []}
    for sent in (DocumentedSearch(), DocumentedSearch(**fields, limit=200, cursor=cursor)):
        for left_out in (False, True):
            read = CheckpointSearchRequest.model_validate_json(sent.model_dump_json(exclude_none=left_out))
            assert read.model_dump(exclude={"owner"}) == sent.model_dump(exclude={"owner"})
            assert read.owner.type == sent.owner.type


def test_each_filter_selects(front: Front) -> None:
    first, second = front.model("one"), front.model("two")
    trained = front.weights(first)
    sampled = front.weights(second, "two", "sampler")
    exported = front.weights(second, "three", "external")
    change(front, trained, created=1.0, info={"user_metadata": {"größe": 'a"b', "x": "1"}})
    change(front, sampled, created=2.0, info={"user_metadata": {"x": "1"}, "base_model": "an old alias"})
    change(front, exported, created=3.0, base="gone")
    assert front.ask("PUT", "/sessions/two/project", {"project_id": "p"}).status_code == 204
    ids = ["external_weights/three", "sampler_weights/two", "weights/one"]
    assert names(front) == ids
    assert names(front, checkpoint_type="sampler") == ids[1:2]
    assert names(front, project_ids=["p", "other"]) == ids[:2]
    assert names(front, project_ids=["other"]) == names(front, project_ids=[]) == []
    assert names(front, user_metadata={"x": "1"}) == ids[1:]
    assert names(front, user_metadata={"x": "1", "größe": 'a"b'}) == ids[2:]
    assert names(front, user_metadata={"größe": "a"}) == names(front, user_metadata={'"': ""}) == []
    assert names(front, base_models=["Qwen/Qwen3-0.6B"]) == names(front, base_models=["tiny", "none"]) == ids[1:]
    assert names(front, base_models=["an old alias"]) == ids[1:2]
    assert names(front, base_models=["gone"]) == ids[:1]
    assert names(front, base_models=[]) == names(front, base_models=["none"]) == []
    assert names(front, base_models=["tiny"], user_metadata={"x": "1"}, project_ids=["p"]) == ids[1:2]
    change(front, trained, expires=time.time() - 1)
    assert names(front) == ids[:2]


@pytest.mark.parametrize("times", [[1.0] * 5, [1.8e9 + i * 2.5e-7 for i in range(5)], [5.0, 1.0, 4.0, 2.0, 3.0]])
def test_pages_hold_every_checkpoint_once(front: Front, times: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of one time, and of times that differ by less than a cursor can say."""
    monkeypatch.setattr("palestra.service.server.routes.checkpoints.SEARCH_BLOCK", 2)
    model = front.model()
    paths = [front.weights(model, f"n{i}") for i in range(5)]
    for path, created in zip(paths, times, strict=True):
        change(front, path, created=created, info={"user_metadata": {"x": "1"}})
    expected = [f"weights/n{i}" for _, i in sorted(((created, i) for i, created in enumerate(times)), reverse=True)]
    for fields in ({}, {"user_metadata": {"x": "1"}}):
        pages = all_pages(front, limit=2, **fields)
        assert [len(page) for page in pages] == [2, 2, 1]
        assert [name for page in pages for name in page] == expected
    assert [len(page) for page in all_pages(front, limit=5)] == [5]


def test_a_deleted_or_replaced_last_checkpoint_does_not_move_the_next_page(front: Front) -> None:
    model = front.model()
    for i in range(4):
        change(front, front.weights(model, f"n{i}"), created=1.7e9 + i)
    cursor = search(front, limit=2).next_cursor
    change(front, f"tinker://{model}/weights/n2", created=1.7e9 + 9)
    assert names(front, cursor=cursor) == ["weights/n1", "weights/n0"]
    assert front.ask("DELETE", f"/training_runs/{model}/checkpoints/weights/n2").status_code == 204
    assert names(front, cursor=cursor) == ["weights/n1", "weights/n0"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 201}, "limit"),
        ({"cursor": "next"}, "cursor"),
        ({"cursor": {"last_created_at": "2026-11-06T00:00:00"}}, "timezone"),
        ({"cursor": {"last_created_at": "yesterday", "last_checkpoint_uuid": "x"}}, "cursor.last_created_at"),
        ({"cursor": {"last_created_at": "2026-11-06T00:00:00Z"}}, "cursor.last_checkpoint_uuid"),
        ({"checkpoint_type": "weights"}, "checkpoint_type"),
        ({"user_metadata": {"x": 1}}, "user_metadata.x"),
        ({"base_models": "tiny"}, "base_models"),
        ({"owner": {"type": "user", "owner_urns": ["urn:user:ada"]}}, 'send {"type": "own"}'),
        ({"owner": {"type": "nobody"}}, "owner.type"),
        ({"display_name": "x"}, "display_name: not used here"),
    ],
)
def test_other_requests_are_refused_by_name(front: Front, body: dict[str, Any], reason: str) -> None:
    reply = front.post("/checkpoints/search", body)
    assert reply.status_code == 400 and reason in reply.json()["detail"]
    assert "\n" not in reply.json()["detail"]


@pytest.mark.parametrize("when", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59.999999-14:00"])
def test_cursors_of_any_time_are_answered(front: Front, when: str) -> None:
    front.weights(front.model())
    cursor = {"last_created_at": when, "last_checkpoint_uuid": "x"}
    reply = front.post("/checkpoints/search", {"cursor": cursor})
    assert len(reply.json()["checkpoints"]) == when.startswith("9999")


def test_a_key_finds_its_own_checkpoints_only(shared: Front) -> None:
    path = shared.weights(model := shared.model("hers", of="ada"), of="ada")
    mine = shared.weights(shared.model("his", of="bob"), "mine", of="bob")
    assert shared.post(f"/training_runs/{model}/checkpoints/weights/one/publish", of="ada").status_code == 204
    for owner in ("own", "accessible"):
        found = shared.post("/checkpoints/search", {"owner": {"type": owner}}, of="bob").json()["checkpoints"]
        assert [row["tinker_path"] for row in found] == [mine]
    cursor = {"last_created_at": "2026-11-06T00:00:00Z", "last_checkpoint_uuid": path}
    found = shared.post("/checkpoints/search", {"cursor": cursor}, of="bob").json()["checkpoints"]
    assert [row["tinker_path"] for row in found] == [mine]


def test_a_copy_is_in_the_project_that_was_asked_for(front: Front) -> None:
    path = front.weights(front.model())
    first = front.post("/copy_weights", {"source_path": path, "destination_project_id": "p"}).json()["tinker_path"]
    front.post("/copy_weights", {"source_path": first})
    assert [found.tinker_path for found in search(front, project_ids=["p"]).checkpoints] == [first]


def test_every_reply_with_a_checkpoint_names_its_base(front: Front) -> None:
    model = front.model()
    front.weights(model)
    front.weights(model, "two", "sampler")
    run = front.get(f"/training_runs/{model}").json()
    lists = [front.get(f"{where}/checkpoints").json()["checkpoints"] for where in ("", f"/training_runs/{model}")]
    assert {found["base_model"] for found in lists[0] + lists[1]} == {"Qwen/Qwen3-0.6B"}
    assert run["last_checkpoint"]["base_model"] == run["last_sampler_checkpoint"]["base_model"] == "Qwen/Qwen3-0.6B"
