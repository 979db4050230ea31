"""Pictures of the "Mixed Precision" tab, light and dark, for the docs.

Trains the transformer of `examples/repair_in_training.py`, in float16 as it
is and with `PrecisionTuner`, and photographs both runs in a real TensorBoard.
Run it with `python -m benchmarks.screenshots`.
"""

import io
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

from PIL import Image
from reporting_readers import get, poll, tensorboard

from benchmarks.browser import browser, until_ready
from examples import repair_in_training as example
from keras_mixprec import MixPrecMonitor, PrecisionTuner

PICTURES = pathlib.Path(__file__).parents[1] / "docs" / "images"
RUNS = {"float16": [], "tuned": [PrecisionTuner(verbose=0)]}
CHOSEN = {
    "run": "tuned/mixprec",
    "compare": "float16/mixprec",
    "layer": "out_2",
    "step": "100",
}


def train(log_dir):
    """Logs both runs."""
    for name, callbacks in RUNS.items():
        monitor = MixPrecMonitor(
            f"{log_dir}/{name}",
            update_freq=5,
            probe_every=2,
            max_overhead=1,
            verbose=0,
        )
        example.train("mixed_float16", monitor, *callbacks)


def main():
    chosen = "".join(f"&p.mixed_precision.{k}={v}" for k, v in CHOSEN.items())
    with tempfile.TemporaryDirectory() as log_dir:
        train(log_dir)
        with tensorboard(log_dir) as url, browser(1366, 1290) as driver:
            poll(lambda: len(get(url, "runs") or ()) >= len(RUNS))
            for theme in "light", "dark":
                dark = "true" if theme == "dark" else "false"
                driver.get("about:blank")
                driver.get(f"{url}?darkMode={dark}#mixed_precision{chosen}")
                until_ready(driver)
                driver.switch_to.default_content()
                path = PICTURES / f"tab_{theme}.png"
                picture = Image.open(io.BytesIO(driver.get_screenshot_as_png()))
                picture.quantize(256).save(path, optimize=True)
                print(path)


if __name__ == "__main__":
    main()
