"""The report of a real run: text, dict, page, picture, command line."""

import base64
import builtins
import json
import math
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from missing_programs import skip_without
from plugin_runs import train, train_both, train_growing, write_long
from reporting_readers import read_tag

import keras_mixprec as kmp
from keras_mixprec import cli
from keras_mixprec.formats import format_share
from keras_mixprec.reporting import report_picture, schema
from keras_mixprec.reporting.report_page import headroom_colours, level
from keras_mixprec.reporting.run_log import RunLog
from keras_mixprec.reporting.run_summary import gravity, summary

PALETTE = (
    pathlib.Path(kmp.__file__).parent / "tensorboard_plugin/static/palette.js"
)


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    log_dir = tmp_path_factory.mktemp("logs")
    train_both(log_dir)
    return log_dir


@pytest.fixture
def report(logs):
    return kmp.load_report(logs)


def unpacked(page):
    """What is inside a page, as its script would see it."""
    packed = re.search(r'MIXPREC_INLINE = "([^"]*)"', page)[1]
    return json.loads(zlib.decompress(base64.b64decode(packed)))


def test_the_text_says_what_happened(report):
    _, failed, tuned = str(report).split("\n\n")
    assert failed.startswith(
        "float16/mixprec (failing): overflowing overflowed (found at step 5, "
    )
    assert "Steps: 40, 40 skipped (100%)." in failed
    assert "Loss scale: 2**15 -> 2**-14" in failed
    assert "forward_overflow in overflowing. " in failed
    assert tuned.startswith(
        "tuned/mixprec (repaired): overflowing overflowed (found before the"
    )
    assert "Steps: 40, none skipped." in tuned
    since = "Demoted to float32 before the first step: overflowing, because of"
    assert since in tuned
    assert "overflowing. Repaired: it is in float32 now." in tuned
    assert "PrecisionRule('overflowing')" in failed
    assert "PrecisionRule(" not in tuned
    assert all(len(line) <= 100 for line in str(report).splitlines())
    assert len(failed.splitlines()) < 25  # A screen.


def test_the_dict_has_every_event_of_the_log(logs, report):
    for name, run in report.to_dict().items():
        with open(logs / name / "events.jsonl") as lines:
            written = [json.loads(line) for line in lines]
        key = lambda event: (event["step"], event["wall_time"])  # noqa: E731
        served = sorted(run["events"], key=key)
        for event, line in zip(served, sorted(written, key=key), strict=True):
            assert event.items() >= line.items()
            assert event.keys() - line.keys() <= {"fix", "level", "because"}


def test_the_scale_is_that_of_every_step(report):
    (course,) = report.to_dict()["float16/mixprec"]["scale"]
    at = dict(zip(course["steps"], course["scale"], strict=True))
    assert [at[step] for step in range(4)] == [2.0**15, 2**14, 2**13, 2**12]
    assert course["skipped"][-1] == 40


def test_layers_know_their_worst_step_and_why_they_were_demoted(logs, report):
    layers = {x["path"]: x for x in report.to_dict()["tuned/mixprec"]["layers"]}
    layer = layers["overflowing"]
    assert layer["compute_dtype"] == "float32"
    assert layer["demoted_at"] == 0
    assert layer["demoted_because"] == "forward overflow before the first step"
    assert layer["verdicts"] == ["forward_overflow"]
    tables = read_tag(str(logs / "tuned" / "mixprec"), "mixprec/heat/00000")
    bits = {step: table[:, 0] for step, table in tables.items()}
    row = list(layers).index("in_0")
    assert layers["in_0"]["least_headroom"] == pytest.approx(
        min(values[row] for values in bits.values()), abs=0.01
    )


def test_what_is_only_advised_is_no_demotion(tmp_path):
    train(tmp_path, kmp.PrecisionTuner(dry_run=True, verbose=0), epochs=1)
    (run,) = kmp.load_report(tmp_path).to_dict().values()
    assert "demote" in [event["kind"] for event in run["events"]]
    assert {layer["demoted_at"] for layer in run["layers"]} == {None}


def test_a_second_run_adds_its_skipped_steps(tmp_path):
    for _ in range(2):
        train(tmp_path, epochs=1)
    (run,) = kmp.load_report(tmp_path).to_dict().values()
    assert run["skipped"] == 40
    train(tmp_path, kmp.PrecisionTuner(verbose=0), epochs=1)
    text = str(kmp.load_report(tmp_path))
    assert "Steps: 60 in 3 calls of fit, 40 skipped" in text


def test_calls_and_layers_of_such_names_are_distinct(tmp_path):
    metrics = {"activation_headroom_bits": "min"}
    with RunLog(tmp_path) as log:
        paths = "a", "a#1", "b"
        log.layers(0, [{"path": p, "compute_dtype": "float16"} for p in paths])
        table = [[4.0], [3.0], [2.0], [1.0]]
        log.heat(0, table, ["a", "a#1", "b", "b#1"], metrics)
    (run,) = kmp.load_report(tmp_path).to_dict().values()
    found = {x["path"]: x["least_headroom"] for x in run["layers"]}
    assert found == {"a": 4.0, "a#1": 3.0, "b": 1.0}


def test_rows_are_in_the_order_of_the_model(tmp_path):
    table = [{"path": p, "compute_dtype": "float16"} for p in ("b", "a", "c")]
    with RunLog(tmp_path) as log:
        log.layers(0, table)
        rows = ["a", "a#1", "c", "gone", "b"]
        log.heat(1, [[4.0]] * 5, rows, {"weight_headroom_bits": "min"})
    (run,) = kmp.load_report(tmp_path).to_dict().values()
    assert run["heat"]["layers"] == ["b", "a", "a#1", "c", "gone"]


def test_a_demoted_layer_has_the_range_of_its_new_dtype(tmp_path):
    train_growing(tmp_path, kmp.PrecisionTuner(verbose=0))
    (run,) = kmp.load_report(tmp_path).to_dict().values()
    layers = {x["path"]: x for x in run["layers"]}
    demoted = layers["square"]["demoted_at"]
    assert 10 < demoted < 40
    dtypes = [[0, "float16"], [demoted, "float32"]]
    assert layers["square"]["dtypes"] == layers["norm"]["dtypes"] == dtypes
    assert layers["logits"]["dtypes"] == [[0, "float32"]]
    # It holds 65504 2**7.6 in float32; the others are sound again.
    bits = {path: x["least_headroom"] for path, x in layers.items()}
    assert bits["square"] == pytest.approx(np.log2(65504 / 4000**2), abs=0.5)
    assert min(bits["norm"], bits["logits"]) > 10


def test_a_pooled_range_does_not_cross_a_change_of_precision(tmp_path):
    metrics = {
        "activation_headroom_bits": "min",
        "activation_nonfinite": "max",
    }
    change = {"before": "mixed_float16", "after": "float32"}
    with RunLog(tmp_path) as log:
        log.layers(0, [{"path": "a", "compute_dtype": "float16"}])
        for step in range(1, 2001):
            row = [-math.inf, 1] if step < 1500 else [-3, 0]
            log.heat(step, [row], ["a"], metrics)
            if step == 1499:
                log.event(step, {"kind": "demote", "layers": {"a": change}})
        log.layers(2000, [{"path": "a", "compute_dtype": "float32"}])
    (run,) = kmp.load_report(tmp_path).to_dict().values()
    assert run["layers"][0]["least_headroom"] == -3


@pytest.mark.parametrize(
    ("bits", "nonfinite", "expected"),
    [(14.0, 2, -np.inf), (np.inf, 4, -np.inf), (np.inf, 0, np.inf), (3, 0, 3)],
)
def test_numbers_that_are_not_finite_leave_no_headroom(
    tmp_path, bits, nonfinite, expected
):
    metrics = {
        "activation_headroom_bits": "min",
        "activation_nonfinite": "max",
    }
    with RunLog(tmp_path) as log:
        log.layers(0, [{"path": "a", "compute_dtype": "float16"}])
        log.heat(1, [[bits, nonfinite]], ["a"], metrics)
    report = kmp.load_report(tmp_path)
    (run,) = report.to_dict().values()
    assert run["layers"][0]["least_headroom"] == expected
    assert ("Least headroom" in str(report)) == (expected != np.inf)
    assert ("a not finite" in str(report)) == (expected == -np.inf)


def test_events_of_other_people_are_no_hindrance(tmp_path):
    with RunLog(tmp_path) as log:
        log.event(0, {"kind": "verdict"})
        log.event(1, {"kind": "mine", "layers": 3})
        log.event(2, {"kind": "mine", "note": "hello"})
    (run,) = kmp.load_report(tmp_path).to_dict().values()
    kinds = [event["kind"] for event in run["events"]]
    assert kinds == ["unreadable", "mine", "mine"]
    assert "No verdicts" in str(kmp.load_report(tmp_path))


def test_the_gravest_run_comes_first(logs, report):
    runs = report.to_dict()
    ranks = {name: summary(run)["gravity"] for name, run in runs.items()}
    assert ranks["float16/mixprec"] < ranks["tuned/mixprec"]
    shutil.copytree(logs / "float16", logs.parent / "copies" / "z")
    shutil.copytree(logs / "tuned", logs.parent / "copies" / "a")
    _, *texts = str(kmp.load_report(logs.parent / "copies")).split("\n\n")
    assert [text.partition(":")[0] for text in texts] == [
        "z/mixprec (failing)",
        "a/mixprec (repaired)",
    ]


def test_several_runs_have_a_table(logs, report):
    title, heads, *lines = str(report).split("\n\n")[0].splitlines()
    assert title.startswith("Runs, the gravest first")
    rows = [re.split(r"\s{2,}", line) for line in lines]
    assert [row[-1] for row in rows] == ["float16/mixprec", "tuned/mixprec"]
    ends = [head.end() for head in re.finditer(r"\S+( \S+)*", heads)][1:-1]
    assert all(line[end : end + 2] == "  " for line in lines for end in ends)
    for row, run in zip(rows, [*report.to_dict().values()], strict=True):
        state, steps, skipped, scale, loss, wide, share, speed, _ = row
        assert state == run["headline"]["state"]
        assert (int(steps), int(skipped)) == (run["last_step"], run["skipped"])
        assert float(eval(scale)) == run["scale"][0]["scale"][-1]
        if run["loss"]:
            value = run["loss"]["values"][-1]
            # Of a run that fails, no loss is finite.
            wanted = pytest.approx(value, rel=1e-2, nan_ok=True)
            assert float(loss) == wanted
        assert (loss == "-") == (run["loss"] is None)
        dtypes = [layer["compute_dtype"] for layer in run["layers"]]
        assert int(wide) == dtypes.count("float32")
        assert share == format_share(run["share_of_flops"]["now"])
        figures = (run["performance"] or {"figures": []})["figures"]
        values = {figure["name"]: figure["value"] for figure in figures}
        many = values.get("measured_steps", 0) >= 20
        # Of skipped steps it is none of training.
        assert (speed != "-") == (many and run["skipped"] < run["last_step"])
    alone = str(kmp.load_report(logs / "tuned"))
    assert alone.startswith("mixprec (repaired): ")


def test_runs_are_as_grave_as_their_state_and_then_as_their_finding():
    def rank(state, level=None, repaired=False):
        finding = {"event": 0, "repaired": repaired, "level": level}
        return gravity(
            {
                "headline": {"state": state},
                "finding": level and finding,
                "events": [{"kind": "verdict"}],
            }
        )

    found = [
        rank("failing", "bad"),
        rank("severe", "bad"),
        rank("warning", "warning"),
        rank("warning"),
        rank("not_measured"),
        rank("not_compared"),
        rank("repaired", "bad", repaired=True),
        rank("healthy"),
    ]
    assert found == sorted({*found})


@pytest.mark.parametrize(
    ("kind", "level", "state"),
    [
        ("forward_overflow", "bad", "severe"),
        ("underflow", "warning", "warning"),
    ],
)
def test_a_finding_is_as_grave_wherever_it_is_shown(
    tmp_path, kind, level, state
):
    with RunLog(tmp_path) as log:
        log.layers(0, [{"path": "a", "compute_dtype": "float16"}])
        said = {"kind": "verdict", "verdict": kind, "layer": "a", "advice": ""}
        log.event(1, said | {"direction": "forward", "numbers": {}})
    report = kmp.load_report(tmp_path)
    (run,) = report.to_dict().values()
    assert [e["level"] for e in run["events"]] == [level]
    assert run["layers"][0]["verdict_levels"] == {kind: level}
    assert run["finding"]["level"] == level
    assert run["headline"]["state"] == state
    assert report.to_png()


def test_the_text_has_the_losses_and_names_layers_of_zeros(tmp_path):
    metrics = {"activation_headroom_bits": "min"}
    with RunLog(tmp_path) as log:
        names = ["sound", *(f"dead_{n}" for n in range(7))]
        log.layers(0, [{"path": p, "compute_dtype": "float16"} for p in names])
        log.heat(1, [[4.0]] + [[math.inf]] * 7, names, metrics)
        for row in ([1, 2.5], [2, 0.0625], [3, math.nan], [4, 0.25]):
            log.rows(row[0], schema.LOSS, [row], schema.LOSS_COLUMNS, 64)
    text = str(kmp.load_report(tmp_path)).replace("\n    ", " ")
    assert (
        "Loss: 0.25 over step 4; first 2.5 over step 1, least 0.0625 over "
        "step 2."
    ) in text
    assert "Least headroom of activations: sound 4.0 bits after step 1" in text
    assert (
        "Activations all zero in every reading: dead_0, dead_1, dead_2, "
        "dead_3, dead_4 and 2 more layers."
    ) in text


def test_the_page_is_whole_and_asks_nobody(report):
    page = report.to_html()
    assert "import " not in re.sub(r"<style>.*?</style>", "", page, flags=re.S)
    names = re.findall(r"https?://[^\s\"']*", page)
    # Nobody asks for what names a namespace.
    assert {*names} <= {"http://www.w3.org/2000/svg"}
    assert page.count("<script") == page.count("</script") == 1
    answers = unpacked(page)
    runs = [run["run"] for run in answers["./data/runs"]]
    assert runs == ["float16/mixprec", "tuned/mixprec"]


def test_heat_is_what_was_measured(logs, report):
    url = "./data/heat?run=tuned%2Fmixprec&metric=activation_headroom_bits"
    data = base64.b64decode(unpacked(report.to_html())[url])
    (length,) = struct.unpack_from("<I", data)
    header = json.loads(data[4 : 4 + length])
    numbers = np.frombuffer(data[4 + length :], "<f2")
    numbers = numbers.reshape(len(header["layers"]), -1)
    tables = read_tag(str(logs / "tuned" / "mixprec"), "mixprec/heat/00000")
    assert header["from"] == header["until"] == list(tables)
    wanted = np.stack([table[:, 0] for table in tables.values()], axis=1)
    assert header["dtype"] == "float16"
    np.testing.assert_array_equal(numbers, wanted.astype("f2"))


def test_a_page_of_2000_steps_of_100_layers_is_below_2_mb(tmp_path):
    random = np.random.default_rng(0)
    layers = [f"block_{n // 10}/layer_{n % 10}" for n in range(100)]
    names = [f"activation_{n}_headroom_bits" for n in range(17)]
    metrics = dict.fromkeys(names, "min")
    with RunLog(tmp_path) as log:
        log.layers(
            0,
            [
                {"path": path, "class": "Dense", "compute_dtype": "float16"}
                for path in layers
            ],
        )
        for step in range(2000):
            # No two alike: nothing that compression could live on.
            log.heat(step, random.normal(size=(100, 17)), layers, metrics)
            if step % 10 == 0:
                log.scale_rows(step, [[step, 2.0**15, step, step]])
                log.event(step, {"kind": "skipped_step", "at_step": step})
    kmp.load_report(tmp_path).save_html(tmp_path / "report.html")
    assert 100_000 < os.path.getsize(tmp_path / "report.html") < 2_000_000


def test_a_notebook_gets_page_picture_and_text(report):
    pytest.importorskip("matplotlib")
    bundle = report._repr_mimebundle_()
    assert bundle["text/plain"] == str(report)
    assert bundle["text/html"].startswith('<iframe sandbox="allow-scripts')
    assert bundle["image/png"].startswith(b"\x89PNG")
    assert bundle["text/html"].count("<") == 2  # All inside is escaped.


HEADROOMS = [np.nan, -np.inf, -4, 0, 0.5, 1.99, 2, 5, 11.3, 24, 30, np.inf]


def test_the_picture_has_the_colours_of_the_page():
    if not shutil.which("node"):
        skip_without("node", "apt-get install nodejs")
    found = np.array([HEADROOMS, HEADROOMS], "float64")
    wider = np.array([[False], [True]]) & np.ones(found.shape, bool)
    script = (
        (
            f"const {{ valueColor }} = await import('{PALETTE.as_uri()}');"
            f"const bits = {HEADROOMS};"
            "console.log(JSON.stringify([false, true].map(wider => "
            "bits.map(x => valueColor('headroom', x, wider)))));"
        )
        .replace("inf", "Infinity")
        .replace("nan", "NaN")
    )
    command = ["node", "--input-type=module", "--eval", script]
    done = subprocess.run(command, capture_output=True, text=True)
    shown = json.loads(done.stdout)
    drawn = headroom_colours(found, wider) * 255
    for page, picture in zip(sum(shown, []), drawn.reshape(-1, 4), strict=True):
        assert picture[3] == (0 if page is None else 255)
        assert page is None or abs(picture[:3] - page).max() <= 0.5


def test_the_picture_names_axes_and_dtypes(tmp_path):
    pytest.importorskip("matplotlib")
    train_growing(tmp_path, kmp.PrecisionTuner(verbose=0))
    report = kmp.load_report(tmp_path)
    upper, lower, bar = report_picture.draw(report._runs, report.to_dict()).axes
    assert (upper.get_xlabel(), upper.get_ylabel()) == ("step", "loss scale")
    assert upper.yaxis.get_major_formatter()(15, 0) == "$2^{15}$"
    assert bar.get_ylabel() == "headroom in bits"
    (mesh,) = lower.collections
    colours = np.asarray(mesh.get_array())
    assert colours[0, -1, :3] == pytest.approx(level("beyond"))
    assert level("bad").tolist() in colours[0, :, :3].tolist()
    assert level("bad").tolist() not in colours[:, -1, :3].tolist()


def test_the_picture_has_blocks_of_skips_and_a_line_for_a_fit(tmp_path):
    pytest.importorskip("matplotlib")
    write_long(tmp_path)
    report = kmp.load_report(tmp_path)
    upper = report_picture.draw(report._runs, report.to_dict()).axes[0]
    drawn = {tuple(line.get_xdata()): line for line in upper.lines}
    assert drawn[100, 900].get_linewidth() == 6
    assert drawn[500, 500].get_linestyle() == ":"
    assert [text.get_text() for text in upper.texts] == ["700 skipped"]


def test_no_label_of_a_constant_scale_is_there_twice(tmp_path):
    pytest.importorskip("matplotlib")
    train(tmp_path, kmp.PrecisionTuner(verbose=0), epochs=1)
    report = kmp.load_report(tmp_path)
    figure = report_picture.draw(report._runs, report.to_dict())
    figure.canvas.draw()
    labels = [x.get_text() for x in figure.axes[0].get_yticklabels()]
    assert "$2^{15}$" in labels
    assert len(set(labels)) == len(labels)


ACTIVATION = "activation_headroom_bits"


def test_the_dict_has_what_was_measured(logs, report):
    heat = report.to_dict()["tuned/mixprec"]["heat"]
    (metric,) = [m for m in heat["metrics"] if m["name"] == ACTIVATION]
    tables = read_tag(str(logs / "tuned" / "mixprec"), "mixprec/heat/00000")
    assert metric["steps"] == list(tables)
    column = np.stack([table[:, 0] for table in tables.values()])
    row = heat["layers"].index("in_0")
    np.testing.assert_array_equal(metric["values"]["in_0"], column[:, row])
    assert len(metric["values"]) == len(heat["layers"])


def test_without_matplotlib_there_is_no_picture(report, monkeypatch):
    imported = builtins.__import__

    def refuse(name, *args):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError("No module", name="matplotlib")
        return imported(name, *args)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert "image/png" not in report._repr_mimebundle_()
    with pytest.raises(ModuleNotFoundError):
        report.to_png()


def test_the_monitor_has_it(tmp_path):
    assert kmp.MixPrecMonitor(tmp_path).report is None
    monitor = train(tmp_path, epochs=1)
    assert "Steps: 20, 20 skipped" in str(monitor.report)
    text = str(kmp.load_report(tmp_path / "mixprec"))
    assert text.startswith(". (failing): overflow")


def test_the_command_line_prints_and_writes_it(logs, report, tmp_path, capsys):
    page, picture = tmp_path / "a.html", tmp_path / "a.png"
    pytest.importorskip("matplotlib")
    asked = ["report", str(logs), "--html", str(page), "--png", str(picture)]
    # One of the runs is failing.
    assert cli.main(asked) == 1
    assert capsys.readouterr().out.startswith(str(report))
    assert page.read_text() == report.to_html()
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["float16", "tuned"])
def test_the_exit_status_says_whether_a_run_fails(name, logs, capsys):
    assert cli.main(["report", str(logs / name)]) == (name == "float16")


@pytest.mark.parametrize("arguments", [[], ["--html", "/dev/null/a"]])
def test_the_command_line_says_what_is_wrong(logs, tmp_path, capsys, arguments):
    log_dir = logs if arguments else tmp_path
    assert cli.main(["report", str(log_dir), *arguments]) == 2
    error = capsys.readouterr().err
    assert ("'/dev/null'" if arguments else "no log of `MixPrecMon") in error


def test_the_command_line_makes_the_folders_of_its_files(
    logs, tmp_path, capsys
):
    pytest.importorskip("matplotlib")
    for name, flag in (("a/b/report.html", "--html"), ("c/r.png", "--png")):
        assert cli.main(["report", str(logs), flag, str(tmp_path / name)]) == 1
        assert (tmp_path / name).stat().st_size > 10_000
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "x.html", tmp_path / "a"):
        assert cli.main(["report", str(logs), "--html", str(path)]) == 2
        message = capsys.readouterr().err
        assert message.startswith("keras-mixprec: ")
        assert message.count("\n") == 1


def test_nobody_has_to_read_all_of_it(logs):
    command = [sys.executable, "-m", "keras_mixprec", "report", str(logs)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_no_log_is_an_error(tmp_path):
    for log_dir in tmp_path, tmp_path / "nowhere":
        with pytest.raises(FileNotFoundError, match="Received: log_dir="):
            kmp.load_report(log_dir)


def test_a_newer_log_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "keras_mixprec.reporting.summaries.SCHEMA_VERSION",
        schema.SCHEMA_VERSION + 1,
    )
    with RunLog(tmp_path) as log:
        log.event(0, {"kind": "train_end"})
    with pytest.raises(ValueError, match="newer version .* update it"):
        kmp.load_report(tmp_path)


def test_a_torn_log_counts_up_to_there(tmp_path):
    train(tmp_path, epochs=1)
    (path,) = (tmp_path / "mixprec").glob("*tfevents*")
    os.truncate(path, path.stat().st_size // 2)
    (run,) = kmp.load_report(tmp_path).to_dict().values()
    assert 0 < run["last_step"] < 20


def test_a_report_outlives_its_log(logs, tmp_path):
    folder = shutil.copytree(logs, tmp_path / "own")
    report, other = kmp.load_report(folder), kmp.load_report(folder)
    shutil.rmtree(folder)
    np.testing.assert_equal(report.to_dict(), kmp.load_report(logs).to_dict())
    assert unpacked(other.to_html())
