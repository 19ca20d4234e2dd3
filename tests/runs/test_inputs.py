"""Digests of the files that a config names."""

from palestra.runs.inputs import input_digests


def test_files_and_models_have_digests_and_other_texts_none(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (tmp_path / "code").mkdir()
    tree = {
        "env": {"type": "code", "path": str(rows)},
        "policies": {"a": {"base": str(model)}, "b": {"system": "x" * 5_000 + "\0"}},
        "evals": [{"folder": str(tmp_path / "code")}, "collections:Counter", "palestra.envs:make_env"],
    }
    before = input_digests(tree)
    assert list(before) == [str(rows), str(model)]
    (model / "weights").write_text("new")
    after = input_digests(tree)
    assert after[str(rows)] == before[str(rows)] and after[str(model)] != before[str(model)]


def test_a_large_file_is_read_in_blocks_to_its_end(tmp_path):
    file = tmp_path / "weights"
    size = 3_000_000
    digests = set()
    for place in (None, 0, size // 63, size - 1):
        content = bytearray(size)
        if place is not None:
            content[place] = 1
        file.write_bytes(content)
        digests.add(input_digests([str(file)])[str(file)])
    assert len(digests) == 4
