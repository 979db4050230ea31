"""Measures whether the tests notice small faults in the code.

The script makes 300 mutants of `MODULES`. Each mutant changes one comparison,
number, `and`, `+`, `not`, `min` or returned value. A forked child of a process
that has imported Keras and torch runs the default tests that reach the changed
line, until one fails. The sample depends only on the source, so two states of
the tests can be compared:
tests can be compared:

    KERAS_BACKEND=torch OMP_NUM_THREADS=1 \
        python benchmarks/mutants.py CHECKOUT RESULTS

The script copies CHECKOUT and does not change it. RESULTS is a folder. It has
one file per test file, with the mutants that its tests reach and their times,
and `mutants.jsonl` with the result of each mutant. A run that was stopped
continues. Tests that drive a browser or are in `ELSEWHERE` do not run. For each
mutant, tests run for at most `CPU_SECONDS`, the fastest tests of each file
first.
"""

import ast
import collections
import copy
import hashlib
import importlib
import json
import os
import pathlib
import resource
import shutil
import sys
import tempfile

import coverage
import pytest
from keras.src.utils.module_utils import tensorflow

SAMPLE, CPU_SECONDS = 300, 40
MODULES = """formats
    loss_scaling.rules
    diagnosis.advice diagnosis.criterion diagnosis.culprit diagnosis.cause
    diagnosis.causes monitoring.forecasts diagnosis.examination
    monitoring.ranges diagnosis.scales
    diagnosis.search diagnosis.thresholds diagnosis.verdict
    reporting.bad_input reporting.cards reporting.facts
    reporting.flat_loss reporting.format_limits reporting.headline
    reporting.layer_tables reporting.layers reporting.performance
    reporting.run reporting.runs reporting.summaries reporting.text_formats
    reporting.what_if reporting.what_next"""
ELSEWHERE = """cli compar compiler damaged doc everyday examples gpu inference
    keras largest lint memory minimize numerics package policies resume sixteen
    tuner types"""
OTHERS = """Lt LtE GtE, LtE Lt Gt, Gt GtE LtE, GtE Gt Lt, Eq NotEq, NotEq Eq,
    Is IsNot, IsNot Is, In NotIn, NotIn In, And Or, Or And, Add Sub, Sub Add"""
OTHERS = {first: names for first, *names in map(str.split, OTHERS.split(","))}


def changed(node, choice):
    """Returns the part of a node to replace and its replacement, or `None`."""
    new = copy.deepcopy(node)
    match node:
        case ast.Compare(ops=[op]) | ast.BoolOp(op=op) | ast.BinOp(op=op):
            if names := OTHERS.get(type(op).__name__):
                new.op = getattr(ast, names[choice % len(names)])()
                new.ops = [new.op]
        case ast.Constant(value=value) if type(value) in (int, float):
            new.value = [value + 1, value - 1, value * 2 or 1][choice % 3]
        case ast.UnaryOp(op=ast.Not()):
            new = node.operand
        case ast.Return(value=ast.Compare() | ast.BoolOp()):
            node, new = node.value, ast.UnaryOp(ast.Not(), node.value)
        case ast.Return(value=ast.expr()):
            node, new = node.value, ast.Constant(None)
        case ast.Name(id="min" | "max"):
            new.id = "max" if node.id == "min" else "min"
    return None if ast.unparse(node) == ast.unparse(new) else (node, new)


def sites(node, statement=None):
    """Yields all nodes outside f-strings, each with its statement."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.JoinedStr):
            inside = child if isinstance(child, ast.stmt) else statement
            yield child, inside
            yield from sites(child, inside)


def mutants(name):
    """Yields a dict that describes each mutant of a module."""
    path = f"keras_mixprec/{name.replace('.', '/')}.py"
    source = pathlib.Path(path).read_bytes()
    lines, seen = source.splitlines(keepends=True), collections.Counter()
    starts = [sum(map(len, lines[:n])) for n in range(len(lines))]
    for node, statement in sites(ast.parse(source)):
        where = path, lines[statement.lineno - 1].decode().strip()
        seen[where] += 1
        key = hashlib.sha256(repr((where, seen[where])).encode()).hexdigest()
        if found := changed(node, int(key[:8], 16)):
            old, new = found
            begin = starts[old.lineno - 1] + old.col_offset
            end = starts[old.end_lineno - 1] + old.end_col_offset
            text = f"({ast.unparse(new)})"
            yield {
                "key": key,
                "path": path,
                "lines": [old.lineno, old.end_lineno, statement.lineno],
                "change": f"{ast.unparse(old)} -> {text}",
                "source": source[:begin] + text.encode() + source[end:],
            }


class Chosen:
    """A pytest plugin that selects tests, times them, and records failures."""

    def __init__(self, names=None, enter=lambda name: None):
        self.names, self.enter = names, enter
        self.failed, self.seconds = [], {}

    def pytest_collection_modifyitems(self, items):
        found = {i.nodeid: i for i in items if "driver" not in i.fixturenames}
        items[:] = [found[n] for n in self.names or found if n in found]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        # A fixture may serve all tests of a file, so the code that it runs
        # counts for the whole file.
        self.enter(item.nodeid.partition("::")[0])
        begun = sum(os.times()[:4])
        yield
        self.seconds[item.nodeid] = sum(os.times()[:4]) - begun

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item):
        self.enter(item.nodeid)

    def pytest_runtest_logreport(self, report):
        self.failed += [report.nodeid] * report.failed


def run(files, plugin, *arguments):
    """Runs the default tests of some files, and returns the exit code."""
    options = f"-q -p no:cacheprovider --basetemp={os.getcwd()}/tmp -o addopts="
    arguments = [*options.split(), "-m", "not slow", *arguments, *files]
    return int(pytest.main(arguments, [plugin]))


def forked(work, *arguments, cpu_seconds=3600):
    """Returns a function's result in a child process, `None` if it died."""
    result = pathlib.Path("result.json")
    result.unlink(missing_ok=True)
    if child := os.fork():
        os.waitpid(child, 0)
        return json.loads(result.read_text()) if result.exists() else None
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    os.dup2(os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    result.write_text(json.dumps(work(*arguments)))
    return os._exit(0)


def reaching(file, sample):
    """Returns the seconds of a file's tests, and the mutants they reach."""
    measuring = coverage.Coverage(data_file=None, include="keras_mixprec/*")
    measuring.start()
    for name in MODULES.split():
        importlib.import_module(f"keras_mixprec.{name}")
    plugin = Chosen(enter=measuring.switch_context)
    run([file], plugin)
    measuring.stop()
    data, reached = measuring.get_data(), {}
    by_line = {p: data.contexts_by_lineno(p) for p in data.measured_files()}
    for mutant in sample:
        path = os.path.abspath(mutant["path"])
        found = {t for n in mutant["lines"] for t in by_line[path].get(n, ())}
        # Code that runs on import counts as reached by the tests that use its
        # module. If no test does, the tests that use its package count.
        for others in [path], by_line:
            for other in others:
                if found == {""} and os.path.dirname(path) in other:
                    found = found.union(*by_line[other].values())
        names = plugin.seconds if file in found else found & {*plugin.seconds}
        reached[mutant["key"]] = sorted(set(names) - {*plugin.failed})
    return {"seconds": plugin.seconds, "reached": reached}


def tests_of(mutant, reached):
    """Returns the names of tests to run, taking one from each file in turn."""
    rounds = []
    for file in reached:
        seconds = file["seconds"]
        names = sorted(file["reached"][mutant["key"]], key=seconds.get)
        rounds += [(n, seconds[name], name) for n, name in enumerate(names)]
    names, left = [], CPU_SECONDS
    for _, seconds, name in sorted(rounds):
        left -= seconds
        names += [name] * (left > 0)
    return names


def outcome(names):
    """Returns the exit code of some tests, and the first test that failed."""
    plugin = Chosen(names)
    files = dict.fromkeys(name.partition("::")[0] for name in names)
    return run(files, plugin, "-x"), plugin.failed[:1]


def tried(number, mutant, names):
    """Returns the result of a mutant, and the test that failed."""
    path = pathlib.Path(mutant["path"])
    original = path.read_bytes()
    path.write_bytes(mutant["source"])
    # Python compiles a module again if the file's modification time changed.
    os.utime(path, (number, number))
    result = forked(outcome, names, cpu_seconds=5 * CPU_SECONDS)
    path.write_bytes(original)
    code, by = result or ("timeout", [])
    return {0: "survived", "timeout": "timeout"}.get(code, "killed"), by


def main(checkout, results):
    """Runs the benchmark that the docstring of this file describes."""
    tensorflow.available  # noqa: B018  # Imports TensorFlow, as `fit` would.
    results = pathlib.Path(results).resolve()
    results.mkdir(parents=True, exist_ok=True)
    copied = tempfile.mkdtemp(prefix="mutants") + "/copy"
    shutil.copytree(checkout, copied, ignore=shutil.ignore_patterns(".[!c]*"))
    os.chdir(copied)
    sys.path[0] = os.environ["PYTHONPATH"] = copied
    every = [mutant for name in MODULES.split() for mutant in mutants(name)]
    sample = sorted(every, key=lambda mutant: mutant["key"])[:SAMPLE]
    reached = []
    for path in sorted(pathlib.Path("tests").glob("test_*.py")):
        known = results / f"{path.stem}.json"
        if not path.stem.startswith(
            tuple(f"test_{e}" for e in ELSEWHERE.split())
        ):
            if not known.exists():
                found = forked(reaching, str(path), sample)
                known.write_text(json.dumps(found))
            reached.append(json.loads(known.read_text()))
    table = results / "mutants.jsonl"
    table.touch()
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    for number, mutant in enumerate(sample[len(rows) :], len(rows) + 1):
        names = tests_of(mutant, reached)
        found = tried(number, mutant, names) if names else ("not reached", [])
        del mutant["source"]
        rows.append(mutant | {"outcome": found[0], "by": found[1]})
        with table.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    for path in ["", *sorted({row["path"] for row in rows})]:
        of = [row["outcome"] for row in rows if row["path"].startswith(path)]
        print(path or "all", dict(collections.Counter(of)))


if __name__ == "__main__":
    main(*sys.argv[1:])
