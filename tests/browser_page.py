"""Drives the page in Chromium as a reader does, and reads what it shows."""

import json
import pathlib
from collections import Counter
from urllib.parse import quote

from node_page import Reader
from reporting_readers import poll
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.support.ui import Select

from benchmarks.browser import until_ready

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

_COLOURS = """
const canvas = document.querySelector(arguments[0]);
const { width, height } = canvas;
const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
const found = {};
for (let at = 0; at < data.length; at += 4) {
  if (data[at + 3] < 180) continue;
  const colour = [...data.slice(at, at + 3)]
    .map((byte) => byte.toString(16).padStart(2, "0")).join("");
  found[`#${colour}`] = (found[`#${colour}`] ?? 0) + 1;
}
return JSON.stringify(found);
"""


class Browser(Reader):
    """The page in a browser."""

    def __init__(self, driver):
        self.driver = driver
        driver.set_script_timeout(300)

    def open_tab(self, url, query="", **link):
        """Opens TensorBoard by a link to what is in our tab."""
        chosen = "".join(
            f"&p.mixed_precision.{key}={quote(str(value))}"
            for key, value in link.items()
        )
        return self.open(f"{url}{query}#mixed_precision{chosen}").enter()

    def open_file(self, path):
        return self.open(pathlib.Path(path).as_uri()).settle()

    def open(self, url):
        self.driver.switch_to.default_content()
        self.driver.get("about:blank")
        self.driver.get(url)
        return self

    def enter(self, frame="iframe[src*='mixed_precision']"):
        until_ready(self.driver, frame=frame)
        return self.settle()

    def leave(self):
        """Turns to what is around the frame."""
        self.driver.switch_to.default_content()

    def settle(self):
        self.driver.execute_async_script(_SETTLED)
        return self

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def shown(self, css):
        """Returns True if any of these has a place on the page."""
        return any(self.values(css, "getClientRects().length"))

    def one(self, css):
        """The first of these, scrolled into view."""
        found = self.driver.find_element("css selector", css)
        self.run("arguments[0].scrollIntoView({ block: 'center' })", found)
        return found

    def click(self, css):
        self.one(css).click()
        return self.settle()

    def click_host(self, css):
        """Clicks what is around our frame."""
        self.until(lambda: self.count(css))
        self.one(css).click()

    def press(self, *keys):
        ActionChains(self.driver, duration=0).send_keys(*keys).perform()
        return self.settle()

    def type(self, css, keys):
        self.one(css).send_keys(keys)
        return self.settle()

    def pick(self, css, value):
        Select(self.one(css)).select_by_value(value)
        return self.settle()

    def colours(self, css):
        """How many pixels of a canvas have which colour."""
        return Counter(json.loads(self.run(_COLOURS, css)))

    def requests(self):
        """The addresses of all that this document has asked for."""
        return self.run(
            "return performance.getEntriesByType('resource').map(e => e.name)"
        )

    def until(self, look, seconds=600):
        """Asserts that it becomes true what `look` sees."""
        assert poll(look, seconds), look()

    def errors(self):
        """Returns the errors that the page has logged since the last call."""
        ours = ("/mixed_precision/", "plugin_entry", "file://", "srcdoc")
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if any(place in entry["message"] for place in ours)
        ]
