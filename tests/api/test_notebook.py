"""docs/notebook.ipynb runs in a real Jupyter kernel, from the study to its report."""

import os
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebook.ipynb"


@pytest.mark.thorough
def test_the_notebook_runs_from_start_to_report(tmp_path, monkeypatch):
    import nbclient  # not at the top: every worker of pytest would import it
    import nbformat

    root = str(NOTEBOOK.parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")])))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = {cell["source"].splitlines()[-1]: cell["outputs"] for cell in notebook.cells if cell["cell_type"] == "code"}
    assert "Speedup(verdict=" in printed["study.speedup"][-1]["data"]["text/plain"]
    assert "baseline" in printed["study.to_pandas()"][-1]["data"]["text/html"]
    assert "<iframe" in printed["study.report()"][-1]["data"]["text/html"]
    assert "BEST = {" in printed['print(study.export("python"))'][-1]["text"]
