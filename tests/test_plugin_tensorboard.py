"""TensorBoard shows a log and the tab, with both of its loaders."""

import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from collections import Counter
from typing import NamedTuple

import pytest
from browser_page import Browser
from node_page import HEAT, TIMELINE, colour
from page_server import ask as ask_server
from plugin_runs import write
from reporting_readers import get, poll, tensorboard
from selenium.webdriver.common.keys import Keys

import keras_mixprec as kmp
from keras_mixprec.reporting import schema
from keras_mixprec.reporting.cards import overview
from keras_mixprec.reporting.run import Run
from keras_mixprec.reporting.run_files import RunFiles
from keras_mixprec.reporting.run_log import RunLog
from keras_mixprec.reporting.text_formats import to_json

PACKAGE = pathlib.Path(kmp.__file__).parent
FAILED, TUNED = "float16/mixprec", "tuned/mixprec"
RUNS = [FAILED, TUNED]
OWN = "data/plugin/mixed_precision/"
# Cards on a page of a group.
PAGE = 12


class Answer(NamedTuple):
    status: int
    headers: dict
    body: bytes


def ask(url, route, method="GET", **query):
    """Returns TensorBoard's answer for our plugin's route."""
    target = f"{urllib.parse.urlsplit(url).path}{OWN}{route}"
    return Answer(*ask_server(url, target, method, **query))


def listed(url):
    return json.loads(ask(url, "data/runs").body or "[]")


@pytest.fixture(scope="module")
def logs(trained, tmp_path_factory):
    """Two trained runs, and one that would do harm."""
    folder = tmp_path_factory.mktemp("own") / "logs"
    shutil.copytree(trained, folder)
    return folder


def start(logs, loader):
    flags = f"--load_fast={loader}", "--path_prefix=/deep/down"
    return tensorboard(str(logs), *flags)


@pytest.fixture(scope="module")
def fast(logs):
    if not importlib.util.find_spec("tensorboard_data_server"):
        pytest.skip("no fast loader for this platform")
    with start(logs, "true") as url:
        assert poll(lambda: len(listed(url)) >= 2)
        yield url


@pytest.fixture(scope="module")
def slow(logs):
    with start(logs, "false") as url:
        assert poll(lambda: len(listed(url)) >= 2)
        yield url


@pytest.fixture(params=["fast", "slow"])
def url(request):
    return request.getfixturevalue(request.param)


# Our data.


def test_the_tab_is_there_and_active(url):
    found = get(url, "plugins_listing")["mixed_precision"]
    assert found["enabled"]
    assert found["tab_name"] == "Mixed Precision"


@pytest.mark.parametrize("run", RUNS)
def test_a_run_is_what_its_files_say(url, logs, run):
    served = json.loads(ask(url, "data/run", run=run).body)
    data = Run(run, RunFiles(logs / run))
    assert served == json.loads(to_json(overview(data)))


def test_a_run_is_served_while_it_goes_on(url, logs, request):
    run = f"live_{request.node.callspec.id}"

    def served():
        answer = ask(url, "data/run", run=f"{run}/mixprec")
        return json.loads(answer.body) if answer.status == 200 else {}

    with RunLog(logs / run) as log:
        for step in range(3):
            log.event(step, {"kind": "skipped_step", "at_step": step})
            assert poll(lambda step=step: served().get("last_step") == step)
            assert len(served()["events"]) == step + 1
        for step in range(3, 1000):
            log.event(step * 1000, {"kind": "skipped_step", "n": step})
    assert poll(lambda: len(served()["events"]) == 1000)
    found = [event["n"] for event in served()["events"][3:]]
    assert found == list(range(3, 1000))


# What is refused.


def test_every_answer_says_what_it_is(url):
    for route in "data/runs", "data/no", "static/page.js", "data/run":
        headers = ask(url, route).headers
        assert headers["X-Content-Type-Options"] == "nosniff", route
        assert "text/html" not in headers["Content-Type"], route
    script = ask(url, "static/page.js").headers["Content-Type"]
    assert script.startswith("text/javascript")


@pytest.mark.parametrize("method", ["POST", "DELETE"])
@pytest.mark.parametrize("route", ["data/runs", "static/page.js"])
def test_nothing_but_get_is_allowed(url, method, route):
    assert ask(url, route, method).status == 405


# TensorBoard's own dashboards.


def groups(url):
    """How many curves each group of the Scalars tab has, as it sorts them."""
    tags = {t for run in get(url, "plugin/scalars/tags").values() for t in run}
    return Counter(tag.split("/")[0] for tag in tags), tags


def test_the_first_group_has_the_loss_scale_and_the_counters(fast):
    assert poll(lambda: {*RUNS} <= get(fast, "plugin/scalars/tags").keys())
    found, tags = groups(fast)
    assert sorted(found) == [
        "mixprec",
        "mixprec_gradient_norm_by_variable",
        "mixprec_overflow_count",
        "mixprec_ranges",
    ]
    assert found["mixprec"] <= PAGE
    assert {"mixprec/loss_scale", "mixprec/skipped_steps"} <= tags


def test_every_chart_of_the_layout_has_a_curve(fast):
    (category,) = get(fast, "plugin/custom_scalars/layout")["category"]
    titles = [chart["title"] for chart in category["chart"]]
    assert "loss scale (log2)" in titles
    for chart in category["chart"]:
        for tag in chart["multiline"]["tag"]:
            asked = {"tag": tag, "run": TUNED}
            found = get(fast, "plugin/custom_scalars/scalars", **asked)
            # All steps are measured here, so none is timed.
            timed = tag.startswith("mixprec_performance/")
            assert found["tag_to_events"] or timed, chart["title"]


def ask_hparams(url, route, **asked):
    request = urllib.request.Request(
        f"{url}data/plugin/hparams/{route}",
        json.dumps(asked).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def test_hparams_has_a_trial_for_each_run_with_eight_metrics(fast):
    asked = {"experimentName": "", "includeMetrics": True}
    found = ask_hparams(fast, "experiment", **asked)
    assert len(found["metricInfos"]) == 8
    statuses = ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_RUNNING"]
    asked |= {"allowedStatuses": statuses, "startIndex": 0, "sliceSize": 99}
    answer = ask_hparams(fast, "session_groups", **asked, colParams=[])
    trials = {group["name"]: group for group in answer["sessionGroups"]}
    assert {*RUNS} <= trials.keys()
    for trial in (trials[run] for run in RUNS):
        assert trial["hparams"]["policy"] == "mixed_float16"
    skipped = "mixprec/skipped_steps"
    values = trials[FAILED]["metricValues"]
    assert [m["value"] for m in values if m["name"]["tag"] == skipped] == [20]


# TensorBoard starts even if the plugin or a log is broken.


# As users start it, but without TensorFlow, which would itself not come up
# with a broken `KERAS_BACKEND`; asked without a server around.
LISTING = """
import sys, types
sys.modules["tensorboard.compat.notf"] = types.ModuleType("notf")
from tensorboard import default, program
from werkzeug.test import Client
def ask(app, flags):
    print(Client(app).get("/data/plugins_listing").text)
    sys.stdout.flush()
    import os
    os._exit(0)
server = program.TensorBoard(default.get_plugins(), server_class=ask)
server.configure(["tensorboard", "--load_fast=false", "--logdir", sys.argv[1]])
server.main()
"""


@pytest.mark.parametrize(
    "broken",
    ["formats.py", "tensorboard_plugin/plugin.py", "tensorboard_plugin/static"],
)
def test_a_package_half_removed_costs_the_tab_alone(tmp_path, broken):
    copy = tmp_path / "path" / "keras_mixprec"
    shutil.copytree(PACKAGE, copy)
    if (copy / broken).is_dir():
        shutil.rmtree(copy / broken)
    else:
        # Not removed: it would be found where the package is installed.
        (copy / broken).write_text("raise ImportError('half removed')")
    done = subprocess.run(
        [sys.executable, "-P", "-c", LISTING, tmp_path],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "path")},
    )
    found = json.loads(done.stdout)
    assert "scalars" in found
    assert "mixed_precision" not in found


def test_loading_the_loader_imports_nothing_else():
    code = (
        "import sys, keras_mixprec.tensorboard_plugin.loader\n"
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    heavy = {"keras", "tensorflow", "jax", "torch", "ml_dtypes"}
    assert not heavy & set(done.stdout.split())


def damage_file(folder):
    for path in pathlib.Path(folder, "mixprec").iterdir():
        with open(path, "r+b") as file:
            file.seek(path.stat().st_size // 2)
            file.write(b"\xff" * 64)


def test_no_log_keeps_it_from_showing_the_others(tmp_path, monkeypatch):
    events = [{"kind": "train_end", "step": 1}]
    later = schema.SCHEMA_VERSION + 1
    for name, place, value in (
        ("line", "run_log.to_json", lambda _: "{no"),
        ("newer", "schema.SCHEMA_VERSION", later),
        ("file", None, None),
        ("good", None, None),
    ):
        with monkeypatch.context() as patch:
            if place:
                patch.setattr(f"keras_mixprec.reporting.{place}", value)
            write(tmp_path / name, ["dense"], *events)
    damage_file(tmp_path / "file")
    # The tab needs no Keras and no backend.
    with tensorboard(str(tmp_path), KERAS_BACKEND="nonsense") as url:
        known = lambda: {run["run"]: run for run in listed(url)}  # noqa: E731
        assert poll(lambda: {"good/mixprec", "newer/mixprec"} <= known().keys())
        answer = ask(url, "data/run", run="good/mixprec")
        (layer,) = json.loads(answer.body)["layers"]
        assert layer["path"] == "dense"
        for name in "line", "file":
            answer = ask(url, "data/run", run=f"{name}/mixprec")
            assert answer.status in (200, 404), name
        assert known()["newer/mixprec"]["newer_schema"]
        answer = ask(url, "data/run", run="newer/mixprec")
        assert answer.status == 400
        assert b"newer version" in answer.body


# The tab in a browser.


@pytest.fixture
def page(driver):
    """The page, on which a test leaves no error."""
    browser = Browser(driver)
    browser.errors()
    yield browser
    assert browser.errors() == []
    browser.open("about:blank")


def our_tab(page):
    tabs = page.driver.find_elements("css selector", "app-header [role=tab]")
    return next((x for x in tabs if x.text.lower() == "mixed precision"), None)


def test_a_click_on_the_active_tab_opens_it(page, url):
    page.open(f"{url}#text")
    page.until(lambda: our_tab(page))
    assert our_tab(page).get_attribute("aria-disabled") == "false"
    our_tab(page).click()
    page.enter()
    assert {*RUNS} <= {*page.values("#run option", "value")}
    page.pick("#run", TUNED)
    assert len(page.layers()) == 15
    assert len(page.colours(HEAT)) > 5


def test_a_copied_link_opens_what_it_was_copied_at(page, fast):
    page.open_tab(fast, run=TUNED, layer="embed", step=3)
    assert page.chosen() == ("Selected: embed · step 3", "embed")
    copy = "header .bar-top button.quiet"
    page.click(copy)
    page.until(lambda: page.text(copy) == "Copied")
    page.type("#layer-filter", Keys.CONTROL + "v")
    (copied,) = page.values("#layer-filter", "value")
    assert copied.startswith(f"{fast}#mixed_precision&")
    page.open(copied).enter()
    assert page.values("#run", "value") == [TUNED]
    assert page.chosen() == ("Selected: embed · step 3", "embed")


def test_it_is_as_dark_as_tensorboard(page, fast):
    page.open_tab(fast, "?darkMode=true", run=TUNED)
    shown = "return getComputedStyle(document.body).backgroundColor"
    for theme, other in ("dark", "light"), ("light", "dark"), ("dark", ""):
        line = colour("line-1", theme)
        page.until(lambda line=line: page.colours(TIMELINE)[line] > 100)
        ground = ", ".join(map(str, bytes.fromhex(colour("page", theme)[1:])))
        assert page.run(shown) == f"rgb({ground})"
        if other:
            page.leave()
            page.click_host("app-header-dark-mode-toggle button")
            page.click_host(f"button[title^='Force {other}']")
            page.enter()
