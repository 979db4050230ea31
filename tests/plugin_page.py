"""What a reader does with the page of the tab, and what the page shows."""

import json
import pathlib
from collections import Counter
from urllib.parse import quote, urlencode

from reporting_readers import poll
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.support.ui import Select

from benchmarks.browser import until_ready

# The page's colours: see `static/style.css`.
LINE, COMPARED, CURSOR = "0072b2", "46505f", "111827"
DARK_LINE = "56b4e9"
VERMILLION = "d55e00"
SKY, BEYOND = "56b4e9", "b0b6be"

# Requests delay `ready`, and what has come is drawn in the frame after.
_SETTLED = """
const done = arguments[0];
const soon = requestAnimationFrame;
const frame = (next) => soon(() => soon(next));
const look = () => {
  const { ready, later } = document.body.dataset;
  return ready && !later ? done() : frame(look);
};
frame(look);
"""

_PIXELS = """
const canvas = document.querySelector(arguments[0]);
const { width, height } = canvas;
const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
const hex = (byte) => byte.toString(16).padStart(2, "0");
const rows = [];
for (let y = 0; y < height; y += 1) {
  const row = {};
  for (let at = y * width * 4; at < (y + 1) * width * 4; at += 4) {
    // A thin line may lie between two pixels.
    if (data[at + 3] < 180) continue;
    const colour = hex(data[at]) + hex(data[at + 1]) + hex(data[at + 2]);
    row[colour] ??= { count: 0, first: (at / 4) % width };
    row[colour].count += 1;
    row[colour].last = (at / 4) % width;
  }
  rows.push(row);
}
return JSON.stringify(rows);
"""


# What is written on a canvas is no text of the page.
_KEEP_TEXTS = """
if (!globalThis.keepsTexts) {
  globalThis.keepsTexts = true;
  const write = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
    (this.canvas.written ??= new Set()).add(text);
    return write.call(this, text, ...rest);
  };
}
"""


class Page:
    """The page in a browser; the names of what is in it are CSS selectors."""

    def __init__(self, driver):
        self.driver = driver
        driver.execute_cdp_cmd(
            "Page.addScriptToEvaluateOnNewDocument", {"source": _KEEP_TEXTS}
        )
        driver.set_script_timeout(300)

    def open_tab(self, url, query="", **link):
        """Opens TensorBoard by a link to what is in our tab."""
        self.driver.get("about:blank")
        chosen = "".join(
            f"&p.mixed_precision.{key}={quote(str(value))}"
            for key, value in link.items()
        )
        self.driver.get(f"{url}{query}#mixed_precision{chosen}")
        return self.enter()

    def open(self, url, **link):
        """Opens what TensorBoard has in its frame, without what is around."""
        self.driver.get("about:blank")
        entry = f"{url}data/plugin_entry.html?name=mixed_precision"
        self.driver.get(f"{entry}#{urlencode(link)}")
        return self.settle()

    def open_file(self, path: pathlib.Path):
        self.driver.get("about:blank")
        self.driver.get(path.as_uri())
        return self

    def enter(self, frame="iframe[src*='mixed_precision']"):
        until_ready(self.driver, frame=frame)
        return self.settle()

    def settle(self):
        self.driver.execute_async_script(_SETTLED)
        return self

    def leave(self):
        """Turns to what is around the frame."""
        self.driver.switch_to.default_content()

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def all(self, css):
        return self.driver.find_elements("css selector", css)

    def one(self, css):
        (found,) = self.all(css)
        self.run("arguments[0].scrollIntoView({ block: 'center' })", found)
        return found

    def text(self, css):
        return self.run(
            "return document.querySelector(arguments[0]).textContent", css
        )

    def texts(self, css):
        return self.values(css, "textContent")

    def values(self, css, name):
        """A property of each element, `data-x` as `dataset.x`."""
        read = (
            f"[...document.querySelectorAll(arguments[0])].map(e => e.{name})"
        )
        return self.run(f"return {read}", css)

    def shown(self, css):
        return any(found.is_displayed() for found in self.all(css))

    def written(self, css):
        """All that was ever written on a canvas."""
        read = "return [...document.querySelector(arguments[0]).written]"
        return set(self.run(read, css))

    def on_screen(self, css):
        """Whether the first of these elements is not scrolled away."""
        top, bottom, height = self.run(
            "const box = document.querySelector(arguments[0])"
            ".getBoundingClientRect();"
            "return [box.top, box.bottom, window.innerHeight]",
            css,
        )
        return top >= 0 and bottom <= height

    def in_view(self, css, scroller):
        """Whether an element is not scrolled out of its scroller."""
        inner, outer = self.run(
            "return [...arguments].map(css => {"
            "const box = document.querySelector(css).getBoundingClientRect();"
            "return [box.top, box.bottom]; })",
            css,
            scroller,
        )
        return outer[0] <= inner[0] and inner[1] <= outer[1] + 1

    def layers(self):
        return self.values("#layers tr[data-layer]", "dataset.layer")

    def chosen(self):
        """What is selected in the bar, the table and the event list."""
        (layer,) = self.values("#layers tr.chosen", "dataset.layer") or [None]
        return self.text("#selection span"), layer

    def click(self, css):
        self.one(css).click()
        return self.settle()

    def click_at(self, css, x, y):
        """Clicks in a canvas, in pixels from its upper left corner."""
        self._move(css, x, y).click().perform()
        return self.settle()

    def _move(self, css, x, y):
        found = self.one(css)
        x, y = x - found.size["width"] // 2, y - found.size["height"] // 2
        chain = ActionChains(self.driver, duration=0)
        return chain.move_to_element_with_offset(found, x, y)

    def hover(self, css, x, y):
        self._move(css, x, y).perform()
        return self.settle()

    def click_host(self, css):
        """Clicks what is around our frame."""
        self.until(lambda: self.all(css))
        self.one(css).click()

    def focus(self, css):
        """Focuses the first of these elements."""
        self.run("document.querySelector(arguments[0]).focus()", css)

    def type(self, css, keys):
        self.one(css).send_keys(keys)
        return self.settle()

    def press(self, *keys):
        """Presses keys wherever the focus is."""
        ActionChains(self.driver, duration=0).send_keys(*keys).perform()
        return self.settle()

    def pick(self, css, value):
        Select(self.one(css)).select_by_value(value)
        return self.settle()

    def focused(self):
        """The focused element's id, or else its role, or else its tag."""
        return self.run(
            "const e = document.activeElement;"
            "return e.id || e.getAttribute('role') || e.tagName"
        )

    def pixels(self, css):
        """A dict from colour to count, first, last column for each row."""
        return json.loads(self.run(_PIXELS, css))

    def colours(self, css):
        """How many pixels have which colour."""
        total = Counter()
        for row in self.pixels(css):
            total.update({colour: at["count"] for colour, at in row.items()})
        return total

    def count(self, css, colour):
        """How many pixels have about that colour."""
        near = lambda other: all(  # noqa: E731
            abs(one - two) < 3
            for one, two in zip(
                *map(bytes.fromhex, (colour, other)), strict=True
            )
        )
        return sum(n for c, n in self.colours(css).items() if near(c))

    def rows_of(self, css, colour, share=0.5):
        """Where a horizontal line of that colour spans most of the width."""
        rows = self.pixels(css)
        width = self.one(css).size["width"]
        lines = [y for y, r in enumerate(rows) if colour in r]
        return [y for y in lines if rows[y][colour]["count"] > share * width]

    def errors(self):
        """What our page has logged since the last call."""
        ours = ("/mixed_precision/", "plugin_entry", "file://", "srcdoc")
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if any(place in entry["message"] for place in ours)
        ]

    def requests(self):
        """The addresses of all that this document has asked for."""
        return self.run(
            "return performance.getEntriesByType('resource').map(e => e.name)"
        )

    def until(self, look, seconds=600):
        """Asserts that it becomes true what `look` sees."""
        assert poll(look, seconds), look()
