"""Whether the tests notice small faults in the rooms that only judge.

Makes 300 mutants of `MODULES`: in each, one comparison, number, `and`, `+`,
`not`, `min` or returned value is another. For each it runs the default tests
that reach the changed line, in a forked child of a process that has imported
Keras and torch, until one fails. The sample depends on the source alone, and
changes only where the source does, so that two states of the tests compare:

    KERAS_BACKEND=torch OMP_NUM_THREADS=1 \
        python benchmarks/mutants.py CHECKOUT RESULTS

CHECKOUT is copied, and stays as it is. RESULTS is a folder: a file for each
test file says which of its tests reach a mutant, and how long they take;
`mutants.jsonl` says what became of each. A run that was stopped goes on.
Tests that drive a browser or are in `ELSEWHERE` take no part. Of the others
each mutant meets at most `CPU_SECONDS`, the cheapest of each file first.
"""

import ast
import collections
import contextlib
import copy
import hashlib
import importlib
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import sys
import tempfile

import coverage
import pytest

SAMPLE, CPU_SECONDS = 300, 40
MODULES = "formats " + " ".join(
    f"{room}.{name}"
    for room, names in {
        "loss_scaling": "rules dynamic presets",
        "diagnosis": "advice compare course culprit fault_kind forecasts "
        "headroom magnified ranges scales smallest_set thresholds verdict",
        "reporting": "bad_input facts fixes flat_loss format_limits headline "
        "layer_tables lowered_scale passed_on performance run_counts "
        "run_layers run_ranges run_summary skipped_steps summaries "
        "text_formats verdict_lines what_next",
    }.items()
    for name in names.split()
)
ELSEWHERE = re.compile(
    "test_(cli|compar|diagnose_hub|doc|everyday|examples|gpu|inference|keras|"
    "largest|lint|minimize|numerics|package|policies|tuner|types)"
)
OTHERS = """Lt LtE GtE, LtE Lt Gt, Gt GtE LtE, GtE Gt Lt, Eq NotEq, NotEq Eq,
    Is IsNot, IsNot Is, In NotIn, NotIn In, And Or, Or And, Add Sub, Sub Add"""
OTHERS = {first: names for first, *names in map(str.split, OTHERS.split(","))}


def changed(node, choice):
    """Returns what of a node to replace and by what, or `None`."""
    new = copy.deepcopy(node)
    match node:
        case ast.Compare(ops=[op]) | ast.BoolOp(op=op) | ast.BinOp(op=op):
            if (names := OTHERS.get(type(op).__name__)) is None:
                return None
            new.op = getattr(ast, names[choice % len(names)])()
            new.ops = [new.op]
        case ast.Constant(value=value) if type(value) in (int, float):
            new.value = [value + 1, value - 1, value * 2 or 1][choice % 3]
        case ast.UnaryOp(op=ast.Not()):
            new = node.operand
        case ast.Return(value=ast.Compare() | ast.BoolOp() as value):
            return value, ast.UnaryOp(ast.Not(), value)
        case ast.Return(value=ast.expr() as value):
            return value, ast.Constant(None)
        case ast.Name(id="min" | "max"):
            new.id = "max" if node.id == "min" else "min"
        case _:
            return None
    return node, new


def sites(node, statement=None):
    """Yields all nodes outside f-strings, each with its statement."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.JoinedStr):
            inside = child if isinstance(child, ast.stmt) else statement
            yield child, inside
            yield from sites(child, inside)


def mutants(name):
    """Yields all mutants of a module: a dict of each, with its source."""
    path = f"keras_mixprec/{name.replace('.', '/')}.py"
    source = pathlib.Path(path).read_bytes()
    lines, seen = source.splitlines(keepends=True), collections.Counter()
    for node, statement in sites(ast.parse(source)):
        where = path, lines[statement.lineno - 1].decode().strip()
        seen[where] += 1
        key = hashlib.sha256(repr((where, seen[where])).encode()).hexdigest()
        old, new = changed(node, int(key[:8], 16)) or (None, None)
        if old and ast.unparse(old) != ast.unparse(new):
            text = f"({ast.unparse(new)})"
            before = lines[: old.lineno - 1], lines[old.lineno - 1]
            last = lines[old.end_lineno - 1][old.end_col_offset :]
            yield {
                "key": key,
                "path": path,
                "line": old.lineno,
                "lines": [statement.lineno, old.lineno, old.end_lineno],
                "old": ast.unparse(old),
                "new": text,
                "source": b"".join(before[0])
                + before[1][: old.col_offset]
                + text.encode()
                + last
                + b"".join(lines[old.end_lineno :]),
            }


class Chosen:
    """Plugin of pytest: which tests run, how long they take, which fail."""

    def __init__(self, names=None, enter=lambda name: None):
        self.names, self.enter = names, enter
        self.failed, self.seconds = [], {}

    def pytest_collection_modifyitems(self, items):
        found = {i.nodeid: i for i in items if "driver" not in i.fixturenames}
        items[:] = [found[n] for n in self.names or found if n in found]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        self.seconds[item.nodeid] = -sum(os.times()[:4])
        # What a fixture does may be for all tests of the file.
        self.enter(item.nodeid.partition("::")[0])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item):
        self.enter(item.nodeid)

    def pytest_runtest_logreport(self, report):
        self.failed += [report.nodeid] * report.failed
        if report.when == "teardown":
            self.seconds[report.nodeid] += sum(os.times()[:4])


def run(files, plugin, *arguments):
    """Runs the default tests of some files; returns the exit code."""
    options = f"-q -p no:cacheprovider --basetemp={os.getcwd()}/tmp -o addopts="
    arguments = [*options.split(), "-m", "not slow", *arguments, *files]
    return int(pytest.main(arguments, [plugin]))


def forked(work, *arguments, cpu_seconds=-1):
    """Calls a function in a child; returns its result, `None` if it died."""
    result = pathlib.Path("result.json")
    result.unlink(missing_ok=True)
    if child := os.fork():
        os.waitpid(child, 0)
        return json.loads(result.read_text()) if result.exists() else None
    signal.alarm(3600)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1), os.dup2(output, 2)
    result.write_text(json.dumps(work(*arguments)))
    os._exit(0)


def reaching(file, sample):
    """Returns the seconds of a file's tests, and who reaches which mutant."""
    measuring = coverage.Coverage(data_file=None, include="keras_mixprec/*")
    measuring.start()
    for name in MODULES.split():
        importlib.import_module(f"keras_mixprec.{name}")
    plugin = Chosen(enter=measuring.switch_context)
    run([file], plugin)
    measuring.stop()
    data, seconds = measuring.get_data(), plugin.seconds
    by_line = {p: data.contexts_by_lineno(p) for p in data.measured_files()}
    reached = {}
    for mutant in sample:
        path, lines = os.path.abspath(mutant["path"]), mutant["lines"]
        found = {t for n in lines for t in by_line[path].get(n, ())}
        if found == {""}:  # As it is imported: whoever uses the module.
            found.update(*by_line[path].values())
        if found == {""}:  # It has no functions: whoever uses the room.
            for other in by_line:
                if os.path.dirname(other) == os.path.dirname(path):
                    found.update(*by_line[other].values())
        names = seconds if file in found else found & seconds.keys()
        reached[mutant["key"]] = sorted(set(names) - set(plugin.failed))
    return {"seconds": seconds, "reached": reached}


def tests_of(mutant, reached):
    """Returns names of tests, one of each file after another."""
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


def tried(names):
    """Returns the exit code of some tests, and the first that failed."""
    plugin = Chosen(names)
    files = dict.fromkeys(name.partition("::")[0] for name in names)
    return run(files, plugin, "-x"), plugin.failed[:1]


def outcome(number, mutant, names):
    """Returns what became of a mutant, and by which test."""
    path = pathlib.Path(mutant["path"])
    original = path.read_bytes()
    path.write_bytes(mutant["source"])
    # A time of its own, by which Python knows what it has compiled.
    os.utime(path, (number, number))
    result = forked(tried, names, cpu_seconds=5 * CPU_SECONDS) if names else 0
    path.write_bytes(original)
    if not result:
        return "not reached" if result == 0 else "timeout", []
    return "killed" if result[0] else "survived", result[1]


def main(checkout, results):
    """Does what the docstring of this file says."""
    results = pathlib.Path(results).resolve()
    results.mkdir(parents=True, exist_ok=True)
    copied = tempfile.mkdtemp(prefix="mutants") + "/copy"
    shutil.copytree(checkout, copied, ignore=shutil.ignore_patterns(".?*"))
    os.chdir(copied)
    sys.path[0] = os.environ["PYTHONPATH"] = copied
    for name in ["keras", "tensorflow", "torch"]:  # What imports for long.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    every = [mutant for name in MODULES.split() for mutant in mutants(name)]
    sample = sorted(every, key=lambda mutant: mutant["key"])[:SAMPLE]
    reached = []
    for path in sorted(pathlib.Path("tests").glob("test_*.py")):
        if not ELSEWHERE.match(path.name):
            known = results / f"{path.stem}.json"
            if not known.exists():
                found = forked(reaching, str(path), sample)
                known.write_text(json.dumps(found))
            reached.append(json.loads(known.read_text()))
    table = results / "mutants.jsonl"
    table.touch()
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    for number, mutant in enumerate(sample[len(rows) :], len(rows) + 1):
        names = tests_of(mutant, reached)
        found, by = outcome(number, mutant, names)
        row = mutant | {"outcome": found, "by": by, "tests": len(names)}
        del row["source"], row["lines"]
        rows.append(row)
        with table.open("a") as file:
            file.write(json.dumps(row) + "\n")
    for path in sorted({row["path"] for row in rows}) + [""]:
        of = [row["outcome"] for row in rows if row["path"].startswith(path)]
        print(path or "all", dict(collections.Counter(of)))


if __name__ == "__main__":
    main(*sys.argv[1:])
