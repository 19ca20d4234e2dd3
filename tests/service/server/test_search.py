"""Sessions are found by their clients' metadata, and assigned to projects."""

from typing import Any

import pytest
from helpers.fronts import Front


def session(front: Front, of: str = "", **said: Any) -> str:
    return str(front.post("/create_session", said, of=of).json()["session_id"])


def found(front: Front, of: str = "", **asked: Any) -> list[str]:
    reply = front.post("/sessions/search", asked, of=of)
    assert reply.status_code == 200, reply.text
    return [summary["session_id"] for summary in reply.json()["sessions"]]


def test_sessions_are_found_by_name_metadata_project_and_status(front: Front) -> None:
    red = session(front, display_name="Red team, run 1", user_metadata={"game": "chess"})
    blue = session(front, display_name="Blue team, run 2", user_metadata={"game": "chess", "k": "1"}, project_id="p")
    assert found(front) == [blue, red]
    assert found(front, display_name="RUN team") == [blue, red]
    assert found(front, display_name="run red") == [red]
    assert found(front, display_name="red", session_id=blue) == [blue, red]  # one matching criterion is enough
    assert found(front, session_id=red) == [red]
    assert found(front, user_metadata={"game": "chess", "k": "1"}) == [blue]
    assert found(front, project_ids=["p"]) == [blue] and found(front, project_ids=["default"]) == [red]
    assert front.ask("PUT", f"/sessions/{red}/project", {"project_id": "p"}).status_code == 204
    assert found(front, project_ids=["p"]) == [blue, red]
    front.post(f"/sessions/{red}/finish", {"reason": {"type": "errored"}, "detail": "it broke"})
    assert found(front, statuses=[{"type": "active"}]) == [blue]
    assert found(front, statuses=[{"type": "client_finished"}]) == [red]
    assert found(front, statuses=[{"type": "client_finished", "reasons": ["success"]}, {"type": "failed"}]) == []
    (summary,) = front.post("/sessions/search", {"session_id": red}).json()["sessions"]
    assert summary["status"] == {"type": "client_finished", "reason": {"type": "errored"}, "detail": "it broke"}
    assert (summary["project_id"], summary["user_metadata"]) == ("p", {"game": "chess"})


def test_pagination_follows_the_cursor(front: Front) -> None:
    made = [session(front) for _ in range(5)]
    seen, cursor = [], None
    for size in (2, 2, 1):
        page = front.post("/sessions/search", {"limit": 2, "cursor": cursor}).json()
        assert len(page["sessions"]) == size
        seen += [summary["session_id"] for summary in page["sessions"]]
        cursor = page["next_cursor"]
    assert cursor is None and seen == made[::-1]


def test_search_and_move_are_limited_to_own_sessions(shared: Front) -> None:
    adas = session(shared, of="ada")
    assert found(shared, of="bob", owner={"type": "accessible"}) == []
    assert found(shared, of="ada", owner={"type": "user", "owner_urns": ["bob"]}) == []
    assert found(shared, of="ada", owner={"type": "user", "owner_urns": ["ada", "bob"]}) == [adas]
    assert shared.ask("PUT", f"/sessions/{adas}/project", {"project_id": "p"}, of="bob").status_code == 404


def test_session_lists_its_checkpoints_and_runs(front: Front) -> None:
    mine = session(front, project_id="p")
    front.weights(front.model(session=mine))
    front.model(session="other")
    (summary,) = front.post("/sessions/search", {"session_id": mine}).json()["sessions"]
    assert summary["checkpoints_count"] == 1 and summary["checkpoint_storage_bytes"] >= 0
    runs = front.get("/training_runs", params={"project_id": "p"}).json()
    assert [run["training_run_id"] for run in runs["training_runs"]] == [f"{mine}:train:0"]
    assert runs["cursor"]["total_count"] == 1


@pytest.mark.parametrize("wrong", [{"limit": 0}, {"statuses": []}, {"cursor": {"last_session_id": "x"}}, {"owner": 3}])
def test_invalid_searches_are_refused(front: Front, wrong: dict[str, Any]) -> None:
    assert front.post("/sessions/search", wrong).status_code == 400
