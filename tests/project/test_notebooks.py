"""The notebooks of examples/ run from the first cell to the last, and show curves, results and episodes."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = ("two_agents", "self_play", "real_model")


def read(name: str) -> Any:
    return nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)


def test_notebooks_are_stored_without_outputs_and_say_how_to_install_in_colab() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == set(NOTEBOOKS)
    for name in NOTEBOOKS:
        code = [cell for cell in read(name).cells if cell.cell_type == "code"]
        assert all(not cell.outputs and cell.execution_count is None for cell in code)
        assert "Colab" in code[0].source and "pip install" in code[0].source
        assert (EXAMPLES / f"{name}.ipynb").stat().st_size < 10_000


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_runs(name: str, tmp_path: Path) -> None:
    book = read(name)
    NotebookClient(book, timeout=560, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
    shown = "".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs)
    assert "EvalResult(" in shown and 'install "ipywidgets"' not in shown
    live = [
        output["data"]["text/html"]
        for output in outputs
        if '<div class="palestra"><style>' in output.get("data", {}).get("text/html", "")[:40]
        and "data:image/svg" in output["data"]["text/html"]
    ]
    assert live and all("held" in html or "return" in html for html in live)  # the chart that training updates
    assert any("image/png" in output.get("data", {}) for output in outputs)  # the curves
    results = [
        output["data"] for output in outputs if output.get("data", {}).get("text/plain", "")[:11] == "EvalResult("
    ]
    assert all(len(data["text/plain"]) < 200 for data in results)
    if name != "self_play":  # networks have no transcript
        assert all("<article>" in data["text/html"] for data in results)
