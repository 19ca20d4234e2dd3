"""Sessions are assigned to projects, by which runs are listed."""

from helpers.fronts import Front


def test_runs_are_listed_by_the_project_of_their_session(shared: Front) -> None:
    made = [shared.post("/create_session", {"project_id": "p"}, of="ada").json() for _ in range(2)]
    mine, moved = (answer["session_id"] for answer in made)
    for session in (mine, moved):
        shared.model(session=session, of="ada")
    path = f"/sessions/{moved}/project"
    assert shared.ask("PUT", path, {"project_id": "q"}, of="bob").status_code == 404
    assert shared.ask("PUT", path, {"project_id": "q"}, of="ada").status_code == 204
    for project, session in (("p", mine), ("q", moved)):
        runs = shared.get("/training_runs", of="ada", params={"project_id": project}).json()
        assert [run["training_run_id"] for run in runs["training_runs"]] == [f"{session}:train:0"]
        assert runs["cursor"]["total_count"] == 1
