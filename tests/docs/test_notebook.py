"""The notebook runs from its first cell to its last, and is kept without outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import nbclient
import nbformat
import pytest

NOTEBOOK: Final = Path(__file__).parents[2] / "runbooks" / "from-python.ipynb"
LIMIT_S: Final = 100


def text_of(cell: Any) -> str:
    """What a cell prints on standard output, and the value of its last line."""
    printed = [out.text for out in cell.outputs if out.get("name") == "stdout"]
    values = [out.data["text/plain"] for out in cell.outputs if out.output_type == "execute_result"]
    return "".join(printed + values)


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Text of each code cell after a run of the whole notebook in a kernel of its own."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    folder = tmp_path_factory.mktemp("kernel")
    run = nbclient.NotebookClient(
        notebook,
        timeout=LIMIT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    run.execute()
    return [text_of(cell) for cell in notebook.cells if cell.cell_type == "code"]


def test_every_cell_runs_and_shows_what_it_says(cells: list[str]) -> None:
    _, phase, contract, answers, report, end = cells
    assert phase == "'ready'"
    assert contract.splitlines()[:2] == ["joints (14,) float32", "imu (6,) float32"]
    assert contract.splitlines()[2] == "j1 j2 j3 j4 j5 j6 j7"
    assert "refused: None" in answers
    assert "ready" in answers
    assert "one process" in report
    assert "no gate has judged it" in " ".join(report.split())
    assert end == "(0, 'stopped')"


def test_it_is_kept_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) == 6
    assert [cell.outputs for cell in code] == [[]] * 6
    assert {cell.execution_count for cell in code} == {None}
