"""The package as a whole: what it exports, imports and can save."""

import ast
import inspect
import json
import pathlib
import re
import subprocess
import sys

import keras
import pytest

import keras_mixprec
from keras_mixprec.backend import device_interface, interface

ROOT = pathlib.Path(keras_mixprec.__file__).parent
BACKENDS = {"tensorflow", "jax", "jaxlib", "torch"}

PROTOCOLS = [
    interface.Batches,
    device_interface.Devices,
    device_interface.Memory,
    device_interface.Precision,
    interface.Probe,
    interface.Processes,
    interface.Replay,
    interface.Runtime,
    interface.Step,
    interface.Trace,
]

# Which parts each part may import, beyond itself and the plain helpers. Those
# that may import neither of these two work without Keras.
KERAS = {"_console", "keras_internals"}
MEASURING = {"backend"} | KERAS
WATCHING = {
    "devices",
    "diagnosis",
    "guards",
    "loss_scaling",
    "numerics",
    "policies",
    "reporting",
} | MEASURING
MAY_IMPORT = {
    "_console": set(),
    "keras_internals": set(),
    "backend": KERAS,
    "reporting": set(),
    "loggers": {"reporting"},
    "loss_scaling": MEASURING,
    "devices": MEASURING,
    "policies": {"devices"} | MEASURING,
    "numerics": {"policies"} | MEASURING,
    "diagnosis": {"numerics", "loss_scaling", "policies"} | MEASURING,
    "analysis": {
        "callbacks",
        "devices",
        "diagnosis",
        "loss_scaling",
        "numerics",
        "policies",
        "reporting",
    }
    | MEASURING,
    "inference": WATCHING - {"guards"},
    "guards": {"loss_scaling", "policies"} | MEASURING,
    "monitoring": WATCHING | {"loggers"},
    "tuning": WATCHING | {"monitoring"},
    "callbacks": WATCHING | {"monitoring", "tuning"},
    "tensorboard_plugin": {"reporting"},
    "cli": {
        "analysis",
        "callbacks",
        "devices",
        "inference",
        "loss_scaling",
        "policies",
        "reporting",
        "tensorboard_plugin",
    },
    "__main__": {"cli"},
}
HELPERS = {
    "_checks",
    "_clock",
    "_files",
    "_html",
    "_fit_end",
    "_patched",
    "_version",
    "flop_shares",
    "formats",
    "verdict_kinds",
    "metrics",
}

MODULES = sorted(ROOT.rglob("*.py"))
CALLABLES = [
    name
    for name in keras_mixprec.__all__
    if callable(getattr(keras_mixprec, name))
]

# One of each class that has a config, with arguments that are not defaults.
SAMPLES = {
    "DynamicLossScale": lambda: keras_mixprec.DynamicLossScale.preset(
        "paddle", growth_interval=7
    ),
    "FixedLossScale": lambda: keras_mixprec.FixedLossScale(256.0),
    "LossScaleOptimizer": lambda: keras_mixprec.LossScaleOptimizer(
        keras.optimizers.AdamW(0.25, clipnorm=2.0), 512.0, name="mine"
    ),
    "PrecisionRule": lambda: keras_mixprec.PrecisionRule(
        keras.layers.Softmax, "bfloat16", "because", sublayers=False
    ),
    "PrecisionRules": lambda: keras_mixprec.PrecisionRules(
        [keras_mixprec.PrecisionRule("*/head")]
    ),
    "RescaledPolicy": lambda: keras_mixprec.RescaledPolicy(-6, 6, True),
    "ScheduledLossScale": lambda: keras_mixprec.ScheduledLossScale(
        {0: 1024.0, 9: 2.0}
    ),
}


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {path}"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def test_importing_it_imports_no_keras_and_no_backend():
    code = "import sys, keras_mixprec; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert "keras_mixprec" in loaded
    heavy = {"keras", "numpy", "tensorboard", "ml_dtypes", *BACKENDS}
    assert not heavy & loaded


def test_nothing_is_public_by_accident():
    assert dir(keras_mixprec) == sorted(keras_mixprec.__all__)
    with pytest.raises(AttributeError, match="'nothing'"):
        keras_mixprec.nothing  # noqa: B018


@pytest.mark.parametrize("name", CALLABLES)
def test_every_public_name_is_documented_with_an_example(name):
    assert ">>> " in inspect.getdoc(getattr(keras_mixprec, name))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_the_backend_part_imports_a_backend(path):
    roots = {module.partition(".")[0] for module in imported_modules(path)}
    assert path.parent.parent.name == "backend" or not roots & BACKENDS


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_what_it_imports_of_ours_is_there(path):
    """In the other backends' folders as well, which nothing imports here."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and "keras_mixprec" in node.module:
            place = ROOT.parent.joinpath(*node.module.split("."))
            file = place.with_suffix(".py")
            file = file if file.exists() else place / "__init__.py"
            defined = file.read_text()
            for alias in node.names:
                inside = (place / alias.name).with_suffix(".py").exists()
                assert inside or re.search(rf"\b{alias.name}\b", defined)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_parts_look_one_way(path):
    part = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if part in HELPERS | {"__init__"}:
        allowed = HELPERS
    else:
        allowed = HELPERS | {part} | MAY_IMPORT[part]
    used = {
        module.split(".")[1]
        for module in imported_modules(path)
        if module.startswith("keras_mixprec.")
    }
    assert used <= allowed


@pytest.mark.parametrize(
    "name",
    [n for n in CALLABLES if hasattr(getattr(keras_mixprec, n), "get_config")],
)
def test_configs_survive_a_file(name):
    sample = SAMPLES[name]()
    saved = json.loads(json.dumps(keras.saving.serialize_keras_object(sample)))
    assert saved["registered_name"] == f"keras_mixprec>{name}"
    loaded = keras.saving.deserialize_keras_object(saved)
    assert type(loaded) is type(sample)
    config = sample.get_config()
    assert loaded.get_config() == config
    # Reading a config leaves it as it was.
    again = type(sample).from_config(config)
    assert config == again.get_config() == sample.get_config()


BACKEND_FOLDERS = [
    ROOT / "backend" / name for name in sorted(BACKENDS - {"jaxlib"})
]


@pytest.mark.parametrize("folder", BACKEND_FOLDERS, ids=lambda f: f.name)
@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda p: p.__name__)
def test_each_backend_defines_what_the_interface_says(folder, protocol):
    """Parsed, since the other backends may not be installed."""
    path = folder / f"{protocol.__name__.lower()}.py"
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found |= {t.id: node for t in node.targets}
    wanted = {n for n in vars(protocol) if not n.startswith("_")}
    wanted |= set(protocol.__annotations__)
    assert wanted <= found.keys()
    for name in wanted - set(protocol.__annotations__):
        arguments = inspect.signature(getattr(protocol, name)).parameters
        own = [a.arg for a in found[name].args.args]
        assert own == list(arguments)[1:]


def own_functions(public):
    if inspect.isfunction(public):
        yield public
    for name, value in vars(public).items() if inspect.isclass(public) else ():
        if not name.startswith("_") or name == "__init__":
            value = getattr(value, "__func__", value)
            value = value.fget if isinstance(value, property) else value
            if inspect.isfunction(value):
                yield value


@pytest.mark.parametrize("name", CALLABLES)
def test_the_public_interface_is_annotated(name):
    for function in own_functions(getattr(keras_mixprec, name)):
        signature = inspect.signature(function)
        known = [p for p in signature.parameters.values() if p.name != "self"]
        known = [p for p in known if p.name != "cls"]
        empty = inspect.Parameter.empty
        assert all(p.annotation is not empty for p in known), function
        done = function.__name__ == "__init__"
        assert done or signature.return_annotation is not empty, function


# What these modules have that tells the time.
_CLOCKS = {
    "time": "time|time_ns|monotonic|perf_counter|process_time",
    "datetime": "now|today|utcnow",
    "date": "today",
    "timeit": ".*",
}


def _read_clocks(path):
    """What in a file reads a clock other than that of the package."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            owner, names = node.module, [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            owner = getattr(node.value, "id", getattr(node.value, "attr", ""))
            names = [node.attr]
        else:
            continue
        pattern = _CLOCKS.get(owner, "$^")
        yield from (f"{path}: {n}" for n in names if re.fullmatch(pattern, n))


def test_every_clock_is_read_in_one_place():
    files = {*ROOT.rglob("*.py")} - {ROOT / "_clock.py"}
    assert [clock for path in files for clock in _read_clocks(path)] == []
    assert len([*_read_clocks(ROOT / "_clock.py")]) == 2
