"""The page shows the facts of each canonical log that a report tells."""

import math
from collections import Counter

import pytest
from canonical_logs import NAMES

from keras_mixprec.formats import format_share

# The page has no more than the rows near what is in view.
SMALL = [name for name in NAMES if name != "many_layers"]
RAISED = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
GONE = {-math.inf: "not finite", math.inf: "all zero", None: "–"}


@pytest.fixture(scope="module", params=SMALL)
def opened(shared_page, told, request):
    return shared_page.see(request.param), told[request.param]


def plain(text):
    """Without powers of two and names of code as the page has them."""
    return "".join(c for c in text.translate(RAISED) if c not in "*`")


def moment(event):
    """When it happened, not when it was noticed."""
    late = event["kind"] == "loss_scale_low"
    known = [event[x] for x in ("at_step", "first_step") if x in event]
    return event["step"] if late else [*known, event["step"]][0]


def test_what_is_told_of_the_run(opened):
    page, run = opened
    figures = page.figures()
    sentence = plain(page.text("#headline .sentence"))
    assert plain(run["headline"]["text"]) in sentence
    assert figures["steps"].split()[0] == str(run["last_step"])
    assert figures["skipped steps"].split()[0] == str(run["skipped"])
    shares = {format_share(x) for x in run["share_of_flops"].values()}
    assert {*plain(figures["FLOPs in 16 bits"]).split(" → ")} == shares
    notes = " ".join(page.texts("#headline .note"))
    for card in run["cards"]:
        assert (plain(card["sentence"]) in plain(notes)) == card["is_on_top"]
    finding = figures["main finding"]
    if run["finding"]:
        verdict = run["events"][run["finding"]["event"]]
        words = (verdict.get("verdict") or verdict["kind"]).replace("_", " ")
        assert words in finding
        assert ("repaired" in finding) == run["finding"]["repaired"]


def test_speed(opened):
    page, run = opened
    shown = dict(page.rows("#performance tbody tr"))
    known = [card for card in run["cards"] if card["name"] == "speed"]
    for figure in (figure for card in known for figure in card["figures"]):
        assert shown[figure["title"]] == figure["text"]
    if known:
        last = run["loss"]["values"][-1]
        assert float(shown["last loss"]) == pytest.approx(last, rel=5e-3)


def test_layers(opened):
    page, run = opened
    assert page.layers() == [layer["path"] for layer in run["layers"]]
    rows = page.rows("#layers tr[data-layer]")
    for row, layer in zip(rows, run["layers"], strict=True):
        _, name, dtype, headroom, verdicts, demoted, parameters, flops = row
        assert name == layer["class"]
        assert dtype == layer["compute_dtype"].replace("float", "fp")
        assert int(parameters) == layer["parameters"]
        assert plain(flops) == format_share(layer["share_of_flops"])
        for verdict in layer["verdicts"]:
            assert verdict.replace("_", " ") in verdicts
        assert str(layer["demoted_at"] or "") in demoted
        bits, wider = layer["least_headroom"], dtype == "fp32"
        if layer["passed_from"]:
            assert layer["passed_from"] in headroom
        elif bits in GONE:
            assert GONE[bits] in headroom
        elif bits > 0:
            # In its own dtype: 112 powers of two more in float32.
            own = float(headroom.removesuffix(" bits"))
            assert own == pytest.approx(bits + 112 * wider, abs=0.51)
        else:
            assert ("beyond float16" if wider else "overflow") in headroom


def test_events(opened):
    page, run = opened
    skips = [e for e in run["events"] if e["kind"] == "skipped_step"]
    counts = Counter(e["kind"] for e in run["events"])
    kinds = page.values("#events .chip", "dataset.filter")
    texts = page.texts("#events .chip")
    for kind, text in zip(kinds, texts, strict=True):
        numbers = [int(word) for word in text.split() if word.isdigit()]
        assert counts[kind] in numbers, kind
    assert {*kinds} == counts.keys()
    listed = page.values("#events li", "dataset.step")
    assert [*map(int, listed)] == sorted(map(int, listed))
    kinds = page.values("#events li", "dataset.kind")
    known = {(moment(e), e["kind"]) for e in run["events"] if e not in skips}
    assert known <= {(int(s), k) for s, k in zip(listed, kinds, strict=True)}
    assert ("skipped_step" in kinds) == bool(skips)


def test_each_run_has_a_row_the_gravest_first(page, told):
    page.see("healthy")
    while page.values("#runs", "ariaBusy") == ["true"]:
        page.settle()
    rows = page.rows("#runs tbody tr")
    found = {name.partition("/")[0]: cells for name, *cells in rows}
    assert found.keys() == told.keys()
    for name, run in told.items():
        state, _, steps, skipped, scales, loss, demoted, share, _ = found[name]
        assert run["headline"]["state"].split("_")[0] in state.lower()
        assert int(plain(steps)) == run["last_step"]
        assert int(skipped) == run["skipped"]
        now = [2 ** float(plain(x)[1:]) for x in scales.split(", ") if x != "–"]
        assert now == [line["scale"][-1] for line in run["scale"]]
        last = run["loss"]["values"][-1]
        assert float(loss) == pytest.approx(last, rel=5e-3, nan_ok=True)
        layers = run["layers"]
        assert int(demoted) == sum(x["demoted_at"] is not None for x in layers)
        assert plain(share) == format_share(run["share_of_flops"]["now"])
    order = ["Failing", "Severe", "Warning", "Not", "Repaired", "Healthy"]
    places = [order.index(cells[0].split()[1]) for cells in found.values()]
    assert places == sorted(places)
