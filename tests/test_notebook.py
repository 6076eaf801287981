"""The notebook: what is committed has been executed, and it runs from top to bottom without a network."""
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parent.parent / "notebooks" / "speculative_decoding.ipynb"


@pytest.fixture
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def assert_executed(notebook):
    """Every cell ran once and in order, and none of them failed or warned."""
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert "error" not in [output.output_type for output in outputs]
    assert "stderr" not in [output.get("name") for output in outputs]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) >= 10


def test_the_committed_notebook_has_its_outputs(notebook):
    nbformat.validate(notebook)
    assert_executed(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert NOTEBOOK.stat().st_size < 700_000
    content = NOTEBOOK.read_text(encoding="utf-8")
    assert not [path for path in ("/home/", "/root/", "/tmp/", "/Users/", "C:\\\\") if path in content]


def test_it_runs_from_top_to_bottom_offline(notebook, monkeypatch):
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody answers: a download would fail
    for cell in code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    NotebookClient(notebook, timeout=300, kernel_name="python3", force_raise_errors=True,
                   skip_cells_with_tag="", resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    assert_executed(notebook)
