"""The package as a whole: its exports, imports and configs."""

import ast
import inspect
import json
import pathlib
import re
import subprocess
import sys

import keras
import pytest

import keras_mixprec as kmp
from keras_mixprec.backend import device_interface, interface

pytestmark = pytest.mark.one_backend

ROOT = pathlib.Path(kmp.__file__).parent
FILES = {p.relative_to(ROOT).as_posix(): p for p in sorted(ROOT.rglob("*.py"))}
BACKENDS = {"tensorflow", "jax", "jaxlib", "torch"}
INTERFACES = "Batches,Processes,Replay,Runtime,Step"
DEVICE_INTERFACES = "Devices,Memory,Precision"
PROTOCOLS = [
    *(getattr(interface, name) for name in INTERFACES.split(",")),
    *(getattr(device_interface, name) for name in DEVICE_INTERFACES.split(",")),
]

# Packages that each package may import, besides the plain helpers. A package
# without `_console` and `keras_internals` works without Keras.
KERAS = "_console,keras_internals"
BASE = f"backend,{KERAS}"
WATCHING = (
    "devices,diagnosis,guards,loss_scaling,numerics,policies,reporting," + BASE
)
MAY_IMPORT = {
    "_console": "",
    "keras_internals": "",
    "reporting": "",
    "loggers": "reporting",
    "tensorboard_plugin": "reporting",
    "backend": KERAS,
    "loss_scaling": BASE,
    "devices": BASE,
    "policies": f"devices,{BASE}",
    "numerics": f"policies,{BASE}",
    "diagnosis": f"numerics,loss_scaling,policies,{BASE}",
    "guards": f"loss_scaling,policies,{BASE}",
    "inference": WATCHING.replace("guards,", ""),
    "analysis": f"callbacks,{WATCHING.replace('guards,', '')}",
    "monitoring": WATCHING,
    "tuning": f"monitoring,{WATCHING}",
    "callbacks": f"loggers,monitoring,tuning,{WATCHING}",
    "cli": "analysis,callbacks,devices,inference,loss_scaling,policies,"
    "reporting,tensorboard_plugin",
    "__main__": "cli",
}
HELPERS = (
    "_checks,_clock,_files,_html,_fit_end,_patched,_version,"
    "flop_shares,formats,metrics,verdict_kinds"
)
CALLABLES = [n for n in kmp.__all__ if callable(getattr(kmp, n))]


def imports(path):
    """Modules, and names that are imported from them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            yield node.module, [alias.name for alias in node.names]


@pytest.mark.parametrize("name", FILES)
def test_imports_run_one_way(name):
    path, room = FILES[name], name.split("/")[0].removesuffix(".py")
    helpers = {*HELPERS.split(",")}
    assert room in helpers | {"__init__", *MAY_IMPORT}
    others = MAY_IMPORT.get(room, "").split(",")
    used = set()
    for module, names in imports(path):
        root, _, inside = module.partition(".")
        if root == "keras_mixprec":
            used |= {inside.split(".")[0]} if inside else {*names}
        # Backends are imported in their own folders alone.
        assert root not in BACKENDS or path.parent.parent.name == "backend"
    assert used <= {room, *others} | helpers


def test_importing_it_imports_no_keras_and_no_backend():
    code = "import sys, keras_mixprec; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert "keras_mixprec" in loaded.split()
    heavy = {"keras", "numpy", "tensorboard", "ml_dtypes", *BACKENDS}
    assert not heavy & {*loaded.split()}


def test_nothing_is_public_by_accident():
    assert dir(kmp) == sorted(kmp.__all__)
    with pytest.raises(AttributeError, match="'nothing'"):
        kmp.nothing  # noqa: B018
    # Type checkers and editors read the stub.
    stub = (ROOT / "__init__.pyi").read_text()
    for name in kmp.__all__:
        assert re.search(rf"\bas {name}\b|^{name}:", stub, re.M)


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
def test_a_public_name_is_annotated_and_documented_with_an_example(name):
    assert ">>> " in inspect.getdoc(getattr(kmp, name))
    for function in own_functions(getattr(kmp, name)):
        signature = inspect.signature(function)
        given = {**signature.parameters}
        given.pop("self", given.pop("cls", None))
        empty = inspect.Parameter.empty
        assert all(p.annotation is not empty for p in given.values()), function
        done = function.__name__ == "__init__"
        assert done or signature.return_annotation is not empty, function


# One of each class that has a config, with arguments that are not defaults.
SAMPLES = {
    "DynamicLossScale": lambda: kmp.DynamicLossScale.preset(
        "paddle", growth_interval=7
    ),
    "FixedLossScale": lambda: kmp.FixedLossScale(256.0),
    "LossScaleOptimizer": lambda: kmp.LossScaleOptimizer(
        keras.optimizers.AdamW(0.25, clipnorm=2.0), 512.0, name="mine"
    ),
    "PrecisionRule": lambda: kmp.PrecisionRule(
        keras.layers.Softmax, "bfloat16", "because", sublayers=False
    ),
    "PrecisionRules": lambda: kmp.PrecisionRules([kmp.PrecisionRule("*/head")]),
    "RescaledPolicy": lambda: kmp.RescaledPolicy(-6, 6, True),
    "ScheduledLossScale": lambda: kmp.ScheduledLossScale({0: 1024.0, 9: 2.0}),
}


def test_configs_survive_a_file():
    with_config = {
        n for n in CALLABLES if hasattr(getattr(kmp, n), "get_config")
    }
    assert with_config == {*SAMPLES}
    for name, make in SAMPLES.items():
        sample = make()
        saved = keras.saving.serialize_keras_object(sample)
        saved = json.loads(json.dumps(saved))
        assert saved["registered_name"] == f"keras_mixprec>{name}"
        loaded = keras.saving.deserialize_keras_object(saved)
        assert type(loaded) is type(sample)
        config = sample.get_config()
        assert loaded.get_config() == config
        # Reading a config leaves it as it was.
        again = type(sample).from_config(config)
        assert config == again.get_config() == sample.get_config()


@pytest.mark.parametrize("backend", sorted(BACKENDS - {"jaxlib"}))
@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda p: p.__name__)
def test_each_backend_defines_what_the_interface_says(backend, protocol):
    """Parsed, since the other backends may not be installed."""
    path = ROOT / "backend" / backend / f"{protocol.__name__.lower()}.py"
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found |= {t.id: node for t in node.targets}
    functions = {n for n in vars(protocol) if not n.startswith("_")}
    assert functions | set(protocol.__annotations__) <= found.keys()
    for name in functions - set(protocol.__annotations__):
        arguments = inspect.signature(getattr(protocol, name)).parameters
        own = [a.arg for a in found[name].args.args]
        assert own == list(arguments)[1:]


CLOCKS = re.compile(
    r"\btime\.(time|time_ns|monotonic|perf_counter|process_time)\b|\btimeit\b"
    r"|from time import|datetime\.(now|today|utcnow)|date\.today"
)


def test_every_clock_is_read_in_one_place():
    found = {n: CLOCKS.findall(f.read_text()) for n, f in FILES.items()}
    assert len(found.pop("_clock.py")) == 2
    assert not any(found.values())
