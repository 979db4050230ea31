"""Ten questions of a reader, each answered by the page in two clicks."""

import keras
import numpy as np
import pytest
from plugin_runs import tiny_transformer, train

import keras_mixprec as kmp

TUNED, ROWS = "tuned/mixprec", "rows/mixprec"
HEALTHY, WIDE = "healthy/mixprec", "wide/mixprec"


def sound(log_dir, policy="mixed_float16", bad_rows=()):
    """Trains a model that float16 bears, for 80 steps."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8,))
    hidden = keras.layers.Dense(16, "relu", name="embed")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(3, name="logits")(hidden))
    if policy:
        kmp.apply_policy(model, policy)
    optimizer = keras.optimizers.Adam(1e-3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    scaled = kmp.LossScaleOptimizer(optimizer) if policy else optimizer
    model.compile(scaled, loss, jit_compile=False)
    x = np.random.default_rng(0).normal(size=(320, 8)).astype("float32")
    x[[*bad_rows]] = np.nan
    monitor = kmp.MixPrecMonitor(log_dir, 4, 0, 1, verbose=0)
    model.fit(x, np.arange(320) % 3, 4, verbose=0, callbacks=[monitor])


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    tuner = kmp.PrecisionTuner(verbose=0)
    train(folder / "tuned", tuner, epochs=1, build=tiny_transformer)
    sound(folder / "rows", bad_rows=[5, 77])
    sound(folder / "healthy")
    sound(folder / "wide", policy=None)
    kmp.load_report(folder).save_html(folder / "report.html")
    return folder / "report.html"


SENTENCE, FIGURES = "#headline .sentence", "header .figures"
FINDING = "#headline button.sentence"
CHOSEN = "#events li.chosen"
CODE = f"{CHOSEN} .fix:first-of-type details summary"
AGAINST = f"#runs tr[data-run='{WIDE}'] button.quiet"
WITH_TUNED = f"#runs tr[data-run='{TUNED}'] button.quiet"
SPEED = "#performance tr[data-figure=step_time]"

QUESTIONS = [
    ("did anything go wrong", TUNED, [], SENTENCE, ["Repaired"]),
    (
        "did anything go wrong",
        ROWS,
        [],
        SENTENCE,
        ["Severe finding", "Bad data: samples 5, 77 of x"],
    ),
    (
        "did anything go wrong",
        HEALTHY,
        [],
        "#runs",
        ["Repaired", "Severe finding"],
    ),
    (
        "which layer",
        TUNED,
        [],
        SENTENCE,
        ["overflowing overflowed (found before the first step)"],
    ),
    (
        "which rows",
        ROWS,
        [],
        SENTENCE,
        ["samples 5, 77 of x are not finite (in 2 batches"],
    ),
    (
        "why",
        TUNED,
        [FINDING],
        CHOSEN,
        ["forward", "largest number that it received:"],
    ),
    (
        "why",
        ROWS,
        [FINDING],
        CHOSEN,
        ["bad data", "x, counted from 0 in the whole array: 5, 77"],
    ),
    ("what to do", TUNED, [FINDING, CODE], CHOSEN, ["PrecisionRule('overfl"]),
    ("what to do", ROWS, [FINDING, CODE], CHOSEN, ["keep = np.isfinite(x)"]),
    ("what did the tuner do", TUNED, [], SENTENCE, ["demoted to float32"]),
    (
        "was it worth it",
        HEALTHY,
        [AGAINST],
        SENTENCE,
        ["in speed from float32|than in float32, at"],
    ),
    (
        "was it worth it",
        HEALTHY,
        [AGAINST],
        "#performance",
        [" against wide: | than wide, at "],
    ),
    (
        "was it worth it",
        HEALTHY,
        ["#performance .float32-help button"],
        "#headline",
        ["wide\n80 steps|wide 80 steps"],
    ),
    (
        "what did the tuner do",
        TUNED,
        [],
        "#headline",
        [
            "The tuner demoted 1 layer to float32|bfloat16 before the first "
            "step."
        ],
    ),
    (
        "what is left to do",
        TUNED,
        [],
        "#headline",
        ["Give the next run a plan, or it starts without the repair"],
    ),
    (
        "what is left to do",
        ROWS,
        [],
        "#headline",
        ["What to do: Drop or repair these rows"],
    ),
    (
        "was it worth it",
        HEALTHY,
        [AGAINST],
        "#performance",
        ["Was it worth it? "],
    ),
    ("share in 16 bits", TUNED, [], FIGURES, ["FLOPs in 16 bits"]),
    ("share in 16 bits", HEALTHY, [], SENTENCE, ["of FLOPs in 16 bits"]),
    ("speed", HEALTHY, [], SPEED, ["ms|µs"]),
    (
        "how close",
        TUNED,
        ["#layers [data-column=headroom]"],
        "#layers",
        ["bits"],
    ),
    (
        "what changed",
        HEALTHY,
        [WITH_TUNED],
        "#difference",
        ["differ. Each cell"],
    ),
]


@pytest.mark.parametrize(
    ("run", "clicks", "place", "answer"),
    [question[1:] for question in QUESTIONS],
    ids=[
        f"{question}-{run.partition('/')[0]}" for question, run, *_ in QUESTIONS
    ],
)
def test_two_clicks_answer(page, run, clicks, place, answer):
    # The run is what a reader has in view: it is the one that was trained.
    page.pick("#run", run)
    assert len(clicks) <= 2
    for css in clicks:
        page.click(css)
    text = page.values(place, "innerText")[0]
    for part in answer:
        assert any(each in text for each in part.split("|")), (part, text)
    # What was measured may be more than the list has room for.
    assert place != CHOSEN or page.on_screen(f"{CHOSEN} .badge")


def test_a_lone_run_says_how_to_make_one_in_float32(
    page, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    sound("logs/low")
    kmp.load_report("logs").save_html("report.html")
    page.open_file(tmp_path / "report.html").settle()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    names = {"model": model, "keras_mixprec": kmp}
    exec(page.text(".float32-help code"), names)
    model.compile("sgd", "mse", jit_compile=False)
    one = np.ones((2, 1))
    model.fit(one, one, verbose=0, callbacks=[names["monitor"]])
    made = kmp.load_report("logs").to_dict()["float32/mixprec"]
    assert [x["compute_dtype"] for x in made["layers"]] == ["float32"]


def train_a_little(model, *callbacks):
    """Too short a run for a monitor that is given nothing."""
    x = np.random.default_rng(0).normal(size=(640, 8)).astype("float32")
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(x, x[:, :1], 4, verbose=0, callbacks=[*callbacks])


def test_the_run_that_the_page_asks_for_can_be_compared(
    page, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)

    def build():
        # The last layer stays in float32.
        layers = keras.layers.Dense(16), keras.layers.Dense(1)
        return keras.Sequential([keras.Input((8,)), *layers])

    model = build()
    kmp.apply_policy(model, "mixed_bfloat16")
    train_a_little(model, kmp.MixPrecMonitor("logs/low", verbose=0))
    kmp.load_report("logs").save_html("report.html")
    page.open_file(tmp_path / "report.html").settle()
    said = page.text(".float32-help .hint")
    assert "Its speed could not be compared with that of any other" in said
    assert ". Train it again first, with MixPrecMonitor(..., update" in said
    names = {"model": build(), "keras_mixprec": kmp}
    exec(page.text(".float32-help code"), names)
    train_a_little(names["model"], names["monitor"])
    runs = kmp.load_report("logs").to_dict()
    speeds = {name: run["performance"]["speed"] for name, run in runs.items()}
    assert speeds["low/mixprec"]["lacks"]["what"] == "readings"
    assert speeds["float32/mixprec"]["lacks"] is None


def test_the_page_opens_on_a_run_in_16_bits(page):
    # That in float32 was trained last.
    assert page.values("#run", "value") == [HEALTHY]


def test_the_line_on_top_says_of_speed_what_its_card_says(page):
    page.pick("#run", HEALTHY)
    page.until(lambda: page.texts("#headline .note"))
    top = page.texts("#headline .note")[0].split("; ")[0]
    page.pick("#compare", WIDE)
    card = page.text("#performance .against")
    assert card.startswith(f"Was it worth it? {top}; ")


def test_what_was_set_otherwise_is_said_once_and_on_top(page):
    page.pick("#run", HEALTHY)
    page.pick("#compare", WIDE)
    (said,) = page.texts("#headline .setup")
    assert said.startswith(
        "Set otherwise in healthy | wide, which need not be why their results "
        "differ: policy mixed_flo"
    )
    # Right below the sentence of the first run.
    order = page.values("#headline > *", "className")
    assert order[1] == "note setup"
    assert "Set otherwise" not in page.text("main")


def test_a_run_that_comes_to_be_shown_is_said(page):
    page.pick("#run", WIDE)
    button = "#performance .float32-help button"
    page.until(lambda: page.all(button))
    name = page.text(button)
    found = name.removeprefix("Show ").removesuffix(", compared with this run")
    page.click(button)
    assert page.values("#run", "value") == [found]
    own = found.partition("/")[0]
    said = f"Shown now: {own}, which computes in 16 bits; wide, shown before"
    assert page.texts("#headline .setup")[0].startswith(said)
    page.pick("#compare", "")
    assert not page.texts("#headline .setup")
