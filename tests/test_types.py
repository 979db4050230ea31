"""Type checkers know the public API: a misspelled argument is an error."""

import pathlib
import re

import pytest
from mypy import api

import keras_mixprec

ROOT = pathlib.Path(keras_mixprec.__file__).parents[1]
STUB = (ROOT / "keras_mixprec" / "__init__.pyi").read_text()
RIGHT = [
    "kmp.MixPrecMonitor('logs', probe_every=3).verdicts[0].kind.upper()",
    "kmp.PrecisionTuner(plan='plan.json').history[0]['step']",
    "kmp.LossScaleOptimizer('adam', kmp.DynamicLossScale.preset('torch'))",
    "kmp.load_report('logs').to_dict()",
    "kmp.recommend_policy().policy.upper()",
]
WRONG = {
    "kmp.MixPrecMonitor(probe_evry=3)": "call-arg",
    "kmp.MixPrecMonitor(probe_every='often')": "arg-type",
    "kmp.PrecisionTuner(plans='plan.json')": "call-arg",
    "kmp.DynamicLossScale(growth_interval=2.5)": "arg-type",
    "kmp.recommend_policy().polcy": "attr-defined",
    "kmp.diagnos": "attr-defined",
}


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """Dict from a line of code to the code of its error."""
    folder = tmp_path_factory.mktemp("types")
    lines = ["import keras_mixprec as kmp", *RIGHT, *WRONG]
    (folder / "snippet.py").write_text("\n".join(lines))
    config = ["--config-file", str(ROOT / "pyproject.toml")]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MYPYPATH", str(ROOT))
        out, err, _ = api.run([*config, "--no-incremental", "snippet.py"])
    assert not err
    found = re.findall(r"^snippet\.py:(\d+): error: .*\[(.*)\]$", out, re.M)
    return {lines[int(line) - 1]: code for line, code in found}


def test_right_uses_pass(errors):
    assert not errors.keys() & set(RIGHT)


@pytest.mark.parametrize("line", WRONG)
def test_wrong_uses_are_errors(errors, line):
    assert errors.get(line) == WRONG[line]


@pytest.mark.parametrize("name", keras_mixprec.__all__)
def test_the_stub_has_every_public_name(name):
    assert re.search(rf"\bas {name}\b|^{name}:", STUB, re.M)
