"""Measures how long a reader waits for the page to load and after a click."""

import os
import time
from typing import NamedTuple

# Performs an action and returns two times: the first frame after the action,
# and the frame in which all its data are drawn. The script does not look in
# every frame, because such frames would add to the page's computing time while
# the page waits for the server.
_TAKES = """
const [act, done] = arguments;
const at = performance.now();
const drawn = (next) => {
  requestAnimationFrame(() => setTimeout(() => next(performance.now() - at)));
};
const { dataset } = document.body;
new Function(act)();
drawn((answered) => {
  const end = () => drawn((shown) => done([answered, shown]));
  if (dataset.ready) return done([answered, answered]);
  const watch = new MutationObserver(() => {
    if (!dataset.ready) return;
    watch.disconnect();
    end();
  });
  watch.observe(document.body, { attributeFilter: ["data-ready"] });
});
"""
# Returns whether the charts and the table of layers are drawn. The table of
# runs may still be loading.
_SHOWN = """
const is_drawn = (css) => {
  const canvas = document.querySelector(`${css} canvas`);
  return canvas?.width && canvas.offsetParent;
};
const drawn = ["#timeline", "#heatmap", "#histogram"].every(is_drawn);
return drawn && document.querySelectorAll("#layers tbody tr").length > 0;
"""
_PICK = (
    "const s = document.querySelector('{0}');"
    "s.selectedIndex = (s.selectedIndex + 1) % s.options.length;"
    "s.dispatchEvent(new Event('change'))"
)
_ZOOM = (
    "const c = document.querySelector('#timeline canvas');"
    "c.dispatchEvent(new KeyboardEvent('keydown', { key: globalThis.zoomedIn ?"
    " '-' : '+', bubbles: true })); globalThis.zoomedIn = !globalThis.zoomedIn"
)
INTERACTIONS = {
    "run": _PICK.format("#run"),
    "metric": _PICK.format("#metric"),
    "layer": "const r = document.querySelectorAll('#layers tr[data-layer]');"
    "r[Math.floor(Math.random() * r.length)].click()",
    "search": "const f = document.querySelector('#layer-filter');"
    "f.value = f.value ? '' : 'layer_7'; f.dispatchEvent(new Event('input'))",
    "fold": "document.querySelector('#fold-blocks').click()",
    "problems": "document.querySelector('#only-problems').click()",
    "sort": "document.querySelector('[data-column=headroom]').click()",
    "zoom": _ZOOM,
    "scroll": "document.querySelector('#layers .table-scroll').scrollTop"
    " = 40000 * Math.random()",
    "heatmap": "document.querySelector('.heat-scroll').scrollTop"
    " = 20000 * Math.random()",
}


def opened(driver, url: str, seconds: float = 120.0) -> float:
    """Opens an address, and returns the seconds until its page is drawn."""
    driver.get("about:blank")
    driver.set_script_timeout(seconds)
    started = time.perf_counter()
    driver.get(url)
    while not driver.execute_script(_SHOWN):
        if time.perf_counter() - started > seconds:
            raise TimeoutError("The page was not drawn.")
        time.sleep(0.02)
    return time.perf_counter() - started


class Taken(NamedTuple):
    """The seconds between an action of the reader and the frames that show it.

    Attributes:
        answered: Float. Until the first frame, which shows the result or that
            it is loading.
        shown: Float. Until the whole result is shown.
        computed: Float. The time for which the page computed, including layout
            and drawing. On an idle machine, a reader waits this long.
    """

    answered: float
    shown: float
    computed: float


def taken(driver, name: str) -> Taken:
    """Returns how long a reader waits for one of the `INTERACTIONS`."""
    before = _computed(driver)
    times = driver.execute_async_script(_TAKES, INTERACTIONS[name])
    computed = _computed(driver) - before
    return Taken(*(time / 1000 for time in times), computed)


def _computed(driver):
    """Returns the CPU seconds that the page's thread has used."""
    ask = driver.execute_cdp_cmd
    ask("Performance.enable", {"timeDomain": "threadTicks"})
    metrics = ask("Performance.getMetrics", {})["metrics"]
    (seconds,) = (m["value"] for m in metrics if m["name"] == "TaskDuration")
    return seconds


def cpu_seconds(pid: int) -> float:
    """Returns a process's CPU time, which other processes do not lengthen."""
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
