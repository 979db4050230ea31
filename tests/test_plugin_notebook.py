"""The notebook of `examples/`, executed as a person would."""

import os
import pathlib
import re
import sys

import nbformat
from nbclient import NotebookClient

NOTEBOOK = (
    pathlib.Path(__file__).parents[1] / "examples" / "repair_loss_nan.ipynb"
)


# The server ends with the kernel, so it has to be asked from in there.
ASK = """
import json, urllib.request
from tensorboard import manager
port = manager.get_all()[-1].port
url = f"http://127.0.0.1:{port}/data/plugins_listing"
while not (found := json.load(urllib.request.urlopen(url))["mixed_precision"])[
    "enabled"
]:
    pass
print(found["tab_name"])
"""


def executed(folder, patch):
    """Returns the output of each code cell, and TensorBoard's answer."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(ASK))
    for name in "work", "registered":
        (folder / name).mkdir()
    # TensorBoards register here, so the only one is the notebook's.
    patch.setenv("TMPDIR", str(folder / "registered"))
    # `%tensorboard` runs the `tensorboard` of the path.
    patch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)
    own = {"metadata": {"path": folder / "work"}}
    NotebookClient(notebook, timeout=300, resources=own).execute()
    return [c.outputs for c in notebook.cells if c.cell_type == "code"]


def texts(outputs):
    return "".join(output.get("text", "") for output in outputs)


def test_the_notebook_of_a_loss_that_is_nan(tmp_path, monkeypatch):
    _, losses, named, tuned, (shown,), plan, tab, asked = executed(
        tmp_path, monkeypatch
    )
    assert losses[-1].data["text/plain"] == "[nan, nan, nan]"
    assert "forward_overflow in 'response_norm'" in texts(named)
    assert re.search("'response_norm'.* float32", texts(tuned))
    assert float(texts(tuned).rpartition("Accuracy:")[2].strip(" %\n")) > 80
    # The report, inline.
    assert shown.data["text/html"].startswith('<iframe sandbox="allow-scripts')
    text = shown.data["text/plain"]
    assert text.startswith("mixprec (repaired)")
    assert "response_norm" in text
    assert "image/png" in shown.data
    assert re.search(r"response_norm:? +float32", texts(plan))
    assert "<iframe" in tab[-1].data["text/html"]
    assert texts(asked) == "Mixed Precision\n"
