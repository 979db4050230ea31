"""The notebook of `examples/`, executed as a person would."""

import os
import pathlib
import re
import sys

import nbformat
import pytest
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


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """What each code cell put out, and at last what TensorBoard answered."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(ASK))
    folder = {"metadata": {"path": tmp_path_factory.mktemp("notebook")}}
    own = os.path.dirname(sys.executable)
    with pytest.MonkeyPatch.context() as patch:
        # Where TensorBoards register: the only one there is the notebook's.
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("registered")))
        # `%tensorboard` runs the `tensorboard` of the path.
        patch.setenv("PATH", own, prepend=os.pathsep)
        NotebookClient(notebook, timeout=300, resources=folder).execute()
    return [c.outputs for c in notebook.cells if c.cell_type == "code"]


def texts(outputs):
    return "".join(output.get("text", "") for output in outputs)


def test_float16_alone_gives_nan(outputs):
    assert outputs[1][-1].data["text/plain"] == "[nan, nan, nan]"


def test_the_diagnosis_names_the_layer(outputs):
    assert "forward_overflow in 'response_norm'" in texts(outputs[2])


def test_the_tuner_repairs_it(outputs):
    tuned = texts(outputs[3])
    assert "demotes 'response_norm' to float32" in tuned
    assert float(tuned.rpartition("Accuracy:")[2].strip(" %\n")) > 80


def test_the_report_is_shown_inline(outputs):
    (shown,) = outputs[4]
    assert shown.data["text/html"].startswith('<iframe sandbox="allow-scripts')
    text = shown.data["text/plain"]
    assert text.startswith("mixprec (repaired)")
    assert "response_norm" in text
    assert "image/png" in shown.data


def test_the_plan_keeps_the_repair(outputs):
    assert re.search(r"response_norm:? +float32", texts(outputs[5]))


def test_tensorboard_has_the_tab(outputs):
    assert "<iframe" in outputs[6][-1].data["text/html"]
    assert texts(outputs[7]) == "Mixed Precision\n"
