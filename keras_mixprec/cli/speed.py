"""How much faster bfloat16 trains the demo's network on a CPU."""

import statistics

from keras_mixprec import _clock
from keras_mixprec.cli.demo import build_model, load_images
from keras_mixprec.devices.native_formats import formats_of

_POLICIES = ("float32", "mixed_bfloat16")


def speed_sentence(found: dict) -> str:
    """Returns what bfloat16 gains on a device, measured where it has units.

    Args:
        found: Dict, as `find_devices` returns it.
    """
    if found["kind"] != "cpu":
        return "--speed measures CPUs. For this device: keras-mixprec doctor"
    support = formats_of("cpu", instructions=found["instructions"])["bfloat16"]
    if support.status == "unknown":
        return (
            "This system does not report whether the CPU has bfloat16 units, "
            "so nothing is measured."
        )
    if support.status != "native":
        return (
            "bfloat16 is emulated on this CPU "
            f"({support.note}), so nothing is measured."
        )
    exact, low = median_seconds().values()
    return (
        f"Larger network on {found['devices'][0]} ({support.note}): "
        f"float32 {1e3 * exact:.0f} ms a step, mixed_bfloat16 "
        f"{1e3 * low:.0f} ms, {exact / low:.2f}x as fast."
    )


def median_seconds(scale: int = 8, steps: int = 15) -> dict[str, float]:
    """Returns the median time of a step per policy, measured in turns.

    Args:
        scale: Int. Times as many channels as in the demo. Defaults to `8`.
        steps: Int. Steps of each policy. Defaults to `15`.
    """
    (images, labels), _ = load_images()
    batch = images[:256], labels[:256]
    models = {name: build_model(name, scale) for name in _POLICIES}
    times: dict = {name: [] for name in _POLICIES}
    for _ in range(steps + 2):
        for name, model in models.items():
            start = _clock.now()
            model.train_on_batch(*batch)
            times[name].append(_clock.now() - start)
    # The first two steps compile.
    return {name: statistics.median(own[2:]) for name, own in times.items()}
