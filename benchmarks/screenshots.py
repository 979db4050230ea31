"""Takes the pictures of the "Mixed Precision" tab for the docs, light and dark.

The script trains the transformer of `examples/repair_in_training.py` in
float16, with `PrecisionTuner`, and in float32. It photographs the first two
runs in a real TensorBoard, the panel about other formats, and the panel that
compares the speed of the last two runs. Then it runs the demo and photographs
its report.

    python -m benchmarks.screenshots
"""

import contextlib
import io
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

from PIL import Image
from reporting_readers import get, poll, tensorboard

from benchmarks.browser import browser, until_ready, until_runs_read
from examples import repair_in_training as example
from keras_mixprec import MixPrecMonitor, PrecisionTuner
from keras_mixprec.cli.demo import run_demo

PICTURES = pathlib.Path(__file__).parents[1] / "docs" / "images"
# Without bfloat16, the tuner makes the same changes on every machine.
TUNER = PrecisionTuner(verbose=0, bfloat16=False)
RUNS = {
    "float16": ("mixed_float16", []),
    "tuned": ("mixed_float16", [TUNER]),
    "float32": ("float32", []),
}
READY = "return document.body.dataset.ready"
FAILED = {"run": "tuned/mixprec", "compare": "float16/mixprec"}
CHOSEN = FAILED | {"layer": "out_2", "step": "100"}
SPEED = {"run": "tuned/mixprec", "compare": "float32/mixprec"}


def train(log_dir, **arguments):
    """Trains the model and logs the run."""
    for name, (policy, callbacks) in RUNS.items():
        monitor = MixPrecMonitor(f"{log_dir}/{name}", verbose=0, **arguments)
        example.train(policy, monitor, *callbacks)


def open_tab(driver, url, theme, chosen):
    """Opens the tab in a theme, with the given selections."""
    dark = "true" if theme == "dark" else "false"
    link = "".join(f"&p.mixed_precision.{k}={v}" for k, v in chosen.items())
    driver.get("about:blank")
    driver.get(f"{url}?darkMode={dark}#mixed_precision{link}")
    until_ready(driver)
    until_runs_read(driver)


def save(name, screenshot):
    """Writes a picture, reduced to a few colors."""
    path = PICTURES / name
    Image.open(io.BytesIO(screenshot)).quantize(256).save(path, optimize=True)
    print(path)


def save_panel(name, driver, panel):
    """Writes a picture of one card, which is drawn when it comes into view."""
    card = driver.find_element("id", panel)
    driver.execute_script("arguments[0].scrollIntoView()", card)
    until_ready(driver)
    card = driver.find_element("id", panel)
    save(name, card.screenshot_as_png)


@contextlib.contextmanager
def shown(log_dir):
    """Serves the runs of a folder, and yields a browser for them."""
    with tensorboard(log_dir) as url, browser(1366, 1290) as driver:
        poll(lambda: len(get(url, "runs") or ()) >= len(RUNS))
        yield url, driver


def photograph_demo():
    """Takes the README's picture, which shows a run on TensorFlow."""
    with tempfile.TemporaryDirectory() as folder:
        run_demo(log_dir=folder)
        with browser(1200, 580) as driver:
            driver.get(f"file://{folder}/report.html")
            poll(lambda: driver.execute_script(READY))
            save("demo.png", driver.get_screenshot_as_png())


def main():
    with tempfile.TemporaryDirectory() as log_dir:
        train(log_dir, update_freq=5, probe_every=10, max_overhead=1)
        with shown(log_dir) as (url, driver):
            for theme in "light", "dark":
                open_tab(driver, url, theme, CHOSEN)
                driver.switch_to.default_content()
                save(f"tab_{theme}.png", driver.get_screenshot_as_png())
            open_tab(driver, url, "light", FAILED)
            save_panel("tab_what_if.png", driver, "what-if")
            open_tab(driver, url, "light", SPEED)
            save_panel("tab_speed.png", driver, "performance")
    photograph_demo()


if __name__ == "__main__":
    main()
