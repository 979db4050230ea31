"""Predictions for layers in another format, and the plan from them."""

import math

import ml_dtypes
import numpy as np
import pytest
from canonical_logs import layer as row

from keras_mixprec.reporting.format_limits import CHOICES
from keras_mixprec.reporting.what_if import what_if

MOST = float(np.log2(65504))
REFUSED = {"float16": ["forward_overflow"]}


def cast_state(largest, low, dtype):
    """Returns how a format holds numbers between two powers of two."""
    numbers = np.array([2.0**low, 2.0**largest], "float64")
    with np.errstate(over="ignore"):
        # Without infinities a format has NaN there.
        cast = numbers.astype(ml_dtypes.finfo(dtype).dtype)
        spare = (4 * numbers).astype(cast.dtype)
    if not np.isfinite(cast[1].astype("float64")):
        return "overflows"
    if cast[0] == 0:
        return "vanishes"
    finite = np.isfinite(spare[1].astype("float64"))
    return "fits" if finite else "close"


def some_casts():
    for dtype in CHOICES[1:]:
        info = ml_dtypes.finfo(dtype)
        top = int(np.log2(float(info.max)))
        bottom = int(np.log2(float(info.smallest_subnormal)))
        for largest in (0, top - 3, top - 0.5, top + 1):
            # A tie at half the smallest number is rounded to 0.
            for low in (bottom - 2, bottom - 1, bottom, bottom + 1):
                yield dtype, largest, low


def layer(path, **more):
    found = {"dtypes": [[0, "float16"]], "demoted_at": None, "passed": None}
    found |= {"lost_because": None, "passed_from": None, "repaired": False}
    found |= {"least_headroom": 9.0, "worst_step": 8}
    return row(path, share=0.25) | found | more


def reading(largest, low=None):
    return {"largest": largest, "largest_step": 3, "low": low, "low_step": 3}


def asked(layers, own, dtype="float16", **more):
    """Returns the prediction for these layers from these measurements."""
    ranges = {"layers": own, "overflowing_scale": None, "needed_scale": None}
    return what_if(layers, ranges | more)["formats"][dtype]


def state(own, dtype="float16", **more):
    (found,) = asked([layer("a", **more)], {"a": own}, dtype)["layers"]
    return found["state"]


def plan(*arguments, **more):
    return asked(*arguments, **more)["plan"]


def wide(*arguments, **more):
    """The layers that a plan has in float32, each with why."""
    listed = plan(*arguments, **more)["file"]["layers"]
    return {x["path"]: x["reason"] for x in listed if "reason" in x}


@pytest.mark.parametrize(("dtype", "largest", "low"), [*some_casts()])
def test_a_range_does_in_a_format_what_ml_dtypes_casts(dtype, largest, low):
    own = {"activation": reading(largest, low)}
    assert state(own, dtype) == cast_state(largest, low, dtype)


def test_a_loss_scale_spares_the_gradients_of_weights_too():
    def highest(largest):
        own = {"gradient": reading(-3, -8), "weight_gradient": reading(largest)}
        (found,) = asked([layer("a")], {"a": own})["layers"]
        return int(found["gradients"]["text"].rpartition("2**")[2])

    assert highest(1.5) == math.floor(MOST - 2 - 1.5)
    assert highest(-9) == highest(None) == math.floor(MOST - 2 + 3)


def test_what_became_infinite_is_not_known_in_a_wider_format():
    gone = {"least_headroom": -math.inf}
    own = {"activation": reading(3)}
    assert state(own, **gone) == "lost"
    assert state(own, "bfloat16", **gone) == "unknown"
    assert state({"activation": reading(20)}, "bfloat16", **gone) == "fits"
    # If the layer is to blame.
    assert state(own, passed={"short": "b"}, **gone) == "fits"
    assert state({}, lost_because="it diverged", **gone) == "unknown"


def test_a_plan_holds_the_fewest_layers_in_float32_each_with_its_reason():
    layers = [
        layer("a"),
        layer("b", fed_by=["a"]),
        *map(layer, "cde"),
        layer("f", dtypes=[[0, "float32"]]),
    ]
    fits = {"activation": reading(1)}
    own = {
        "a": {"activation": reading(17)},
        "b": fits,
        "c": fits | {"gradient": reading(-3, -20)},
        "d": fits | {"refused": REFUSED},
        "f": fits,
    }
    found = wide(layers, own)
    assert [*found] == ["a", "b", "d", "f"]
    assert " a " in found["b"]
    assert plan(layers, own)["text"].endswith(": e.")
    assert [*wide(layers, own, "bfloat16")] == ["f"]


def test_layers_behind_one_at_fault_are_not_known_to_need_float32():
    zeros = [layer(path, least_headroom=math.inf) for path in "ab"]
    assert [*wide(zeros, {"a": {"refused": REFUSED}})] == ["a"]
    assert [*wide(zeros, {})] == []
    behind = {"passed_from": "a", "passed": {"short": "a"}}
    behind["least_headroom"] = -math.inf
    chain = [
        layer("a", least_headroom=-math.inf),
        layer("b", fed_by=["a"], **behind),
        layer("c", fed_by=["b"], **behind),
    ]
    lost = {"refused": REFUSED}
    assert "reading: b, c." in plan(chain, {"a": lost})["text"]
    for more in {}, {"in_float32": 3.6}:
        assert [*wide(chain, {"a": lost | more})] == ["a"]
    # Its float32 output is beyond float16 when the next layer casts it.
    assert [*wide(chain, {"a": lost | {"in_float32": 17}})] == ["a", "b"]


def test_a_plan_stays_below_the_loss_scales_at_which_steps_were_skipped():
    own = {"activation": reading(1, -3), "gradient": reading(-12, -20)}

    def text(scale, refused=None, repaired=False):
        first = own | {"refused": refused or {}}
        layers = [layer("a", repaired=repaired), layer("b")]
        ranges = {"a": first, "b": own}
        return plan(layers, ranges, overflowing_scale=scale)["text"]

    for skipped, bits in (None, 15), (13, 12), (12.5, 12):
        assert f"scale 2**{bits}" in text(skipped)
    # Unless a layer is to blame.
    assert "scale 2**15" in text(13, REFUSED)
    assert "scale 2**12" in text(13, REFUSED, repaired=True)
