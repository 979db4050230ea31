"""Drives the page of the tab in Node.js, and reads what it shows."""

import base64
import contextlib
import fcntl
import json
import pathlib
import re
import shutil
import subprocess
import threading
from urllib.parse import urlencode

import numpy as np
from missing_programs import skip_without

import keras_mixprec as kmp
from keras_mixprec.reporting.report_page import static
from keras_mixprec.tensorboard_plugin.page_server import PageServer

FOLDER = pathlib.Path(__file__).parent
CHECKS = FOLDER.parent / ".ci" / "page"
TIMELINE, HISTOGRAM = "#timeline canvas", "#histogram canvas"
HEAT = "#heatmap .heat-scroll:nth-of-type(1) canvas"
# Sizes of a chart, as in `timeline.js` and `heatmap.js`.
WIDTH, LEFT, LABELS = 1000, 66, 250


def place(steps, last):
    """Returns the place of steps on the timeline, which has margins."""
    pad = 0.5 + last * 0.004
    share = (np.asarray(steps) + pad) / (last + 2 * pad)
    return (LEFT + share * (WIDTH - 14 - LEFT)).tolist()


def colours(theme="light"):
    """The colours of the page's style by name."""
    found = {}
    blocks = re.findall(r":root([^{]*)\{([^}]*)\}", static("style.css"))
    for selector, body in blocks:
        if not selector.strip() or theme in selector:
            found |= dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", body))
    return found


def colour(name, theme="light"):
    return colours(theme)[name]


class Reader:
    """Reads a page by CSS selectors, in Node.js or a browser."""

    def run(self, script, *arguments):
        raise NotImplementedError

    def settle(self):
        raise NotImplementedError

    def values(self, css, name):
        """A property of each element, `data-x` as `dataset.x`."""
        return self.run(
            "return [...document.querySelectorAll(arguments[0])]"
            f".map((e) => e.{name})",
            css,
        )

    def texts(self, css):
        return self.values(css, "textContent")

    def text(self, css):
        return self.texts(css)[0]

    def rows(self, css):
        """The texts of the cells of each row."""
        return self.values(
            css, "children && [...e.children].map((cell) => cell.textContent)"
        )

    def count(self, css):
        return len(self.texts(css))

    def shown(self, css):
        """Returns True if any of these elements is visible."""
        return any(self.values(css, "offsetParent !== null"))

    def figures(self):
        """The key figures by name."""
        names, texts = map(self.texts, (".health .name", ".health .value"))
        return dict(zip(names, texts, strict=True))

    def layers(self):
        return self.values("#layers tr[data-layer]", "dataset.layer")

    def chosen(self):
        """Returns the selection in the bar and in the table of layers."""
        (layer,) = self.values("#layers tr.chosen", "dataset.layer") or [None]
        return self.text("#selection span"), layer

    def focused(self):
        """The focused element's id, or else its role, or else its tag."""
        return self.run(
            "const e = document.activeElement;"
            "return e.id || e.getAttribute('role') || e.tagName"
        )

    def focus(self, css):
        self.run("document.querySelector(arguments[0]).focus()", css)
        return self.settle()


class Page(Reader):
    """The page in node: see `page_in_node.mjs`."""

    def __init__(self, home):
        self.home = home
        self._process = subprocess.Popen(
            ["node", FOLDER / "page_in_node.mjs", installed()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self):
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _ask(self, *request):
        self._process.stdin.write(f"{json.dumps(request)}\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["found"]

    def open_file(self, path, **link):
        """Opens a report, by a link to what is in it."""
        path = pathlib.Path(path)
        html = path.read_text("utf-8")
        self._ask("open", html, path.as_uri(), urlencode(link))
        return self

    def open(self, url, **link):
        """Opens what a server has."""
        self._ask("open", None, url, urlencode(link))
        return self

    def see(self, name, compare=None, **link):
        """Opens the run of a canonical log, and another one to compare."""
        other = {"compare": f"{compare}/mixprec"} if compare else {}
        return self.open(self.home, run=f"{name}/mixprec", **other, **link)

    def show(self, folder, **link):
        """Opens the report on a folder of logs."""
        path = kmp.load_report(folder).save_html(folder / "report.html")
        return self.open_file(path or folder / "report.html", **link)

    def run(self, script, *arguments):
        return self._ask("run", script, *arguments)

    def settle(self):
        self._ask("rest")
        return self

    def errors(self):
        return self.run("return page.errors")

    # What a reader does.

    def click(self, css, x=None, y=0):
        """Clicks the first of these, in a canvas at a place."""
        self.run(
            "const node = document.querySelector(arguments[0]);"
            "if (!node || node.closest('[hidden]')) "
            "throw new Error(`cannot click ${arguments[0]}`);"
            "const [, clientX, clientY] = arguments;"
            "const send = (kind) => node.dispatchEvent(new MouseEvent(kind,"
            " { clientX, clientY, bubbles: true }));"
            "if (clientX !== null) send('pointerdown'), send('pointerup');"
            "else HTMLElement.prototype.click.call(node)",
            css,
            x,
            y,
        )
        return self.settle()

    def hover(self, css, x, y):
        """Moves the mouse there, and returns the tooltip."""
        self.run(
            "const [css, clientX, clientY] = arguments;"
            "document.querySelector(css).dispatchEvent("
            "new MouseEvent('pointermove', { clientX, clientY }))",
            css,
            x,
            y,
        )
        self.settle()
        return self.texts(".tooltip:not([hidden]) div")

    def press(self, *keys, css=None):
        """Presses keys where the focus is, or where it is set before."""
        if css:
            self.focus(css)
        for key in keys:
            self.run(
                "const [key] = arguments;"
                "document.activeElement.dispatchEvent(new KeyboardEvent("
                "'keydown', { key, bubbles: true, cancelable: true }))",
                key,
            )
            self.settle()
        return self

    def _set(self, css, value, kind):
        self.run(
            "const [css, value, kind] = arguments;"
            "const node = document.querySelector(css);"
            "node.value = value;"
            "if (node.value !== value) throw new Error(`no ${value}`);"
            "node.dispatchEvent(new Event(kind))",
            css,
            value,
            kind,
        )

    def pick(self, css, value):
        self._set(css, value, "change")
        return self.settle()

    def type(self, css, text):
        self._set(css, text, "input")
        return self.settle()

    def table(self, card, place=1):
        """Opens what a picture shows as a table; returns its rows."""
        details = f"#{card} details:nth-of-type({place})"
        self.click(f"{details} summary")
        return self.rows(f"{details} tbody tr")

    def download(self, card, place=1):
        """Returns the file that a table of a card is saved as."""
        before = len(self.run("return page.saved"))
        self.click(f"#{card} details:nth-of-type({place}) [data-export=csv]")
        name, text = self.run(
            "return Promise.all(page.saved.at(-1).map("
            "(part) => part.text?.() ?? part))"
        )
        assert len(self.run("return page.saved")) == before + 1
        assert name.endswith(".csv")
        return text

    def copied(self):
        """What was copied last."""
        return self.run("return page.copied.at(-1) ?? null")

    def poll(self):
        """Does what the page does from time to time."""
        self.run("page.repeated.forEach((act) => act())")
        return self.settle()

    # Marks on a canvas.

    def marks(self, css, kind=None, **wanted):
        """Returns the marks on a canvas, of one kind or one colour."""
        if "colour" in wanted:
            wanted["colour"] = colour(wanted["colour"])
        marks = self.values(css, "marks")[0]
        return [
            mark
            for mark in marks
            if kind in (None, mark["kind"])
            and all(mark.get(name) == x for name, x in wanted.items())
        ]

    def frame(self):
        """The row of the heatmap with a frame around, if any."""
        height = self.marks(HEAT, "image", of="")[0]["height"]
        rows = len(self.cells())
        frames = self.marks(HEAT, "frame", colour="cursor")
        return round(frames[0]["y"] * rows / height) if frames else None

    def brought(self):
        """The kind of the event, or the layer, brought into view last."""
        return self.run(
            "const { kind, layer } = page.broughtIntoView.at(-1).dataset;"
            "return kind ?? layer"
        )

    def cells(self, css=HEAT):
        """The colours of a heatmap's rows, RGBA: a row each, in pixels."""
        height, width, data = self.run(
            "const { width, height, data } ="
            " document.querySelector(arguments[0]).picture;"
            "return [height, width, btoa(Array.from(data, (byte) =>"
            " String.fromCharCode(byte)).join(''))]",
            css,
        )
        data = np.frombuffer(base64.b64decode(data), "uint8")
        return data.reshape(height, width, 4)


@contextlib.contextmanager
def served(folder):
    """The address of a server on a folder, in this process."""
    with PageServer(str(folder), 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            thread.join()


def installed():
    """The package with jsdom, which npm installs the first time."""
    remedy = "npm install --prefix .ci/page"
    if not shutil.which("node"):
        skip_without("node", "apt-get install nodejs")
    with open(CHECKS / "package.json") as package:
        fcntl.flock(package, fcntl.LOCK_EX)
        if not (CHECKS / "node_modules" / "jsdom").is_dir():
            command = [*remedy.split()[:2], "--silent", "--no-package-lock"]
            done = shutil.which("npm") and subprocess.run(
                command, cwd=CHECKS, check=False
            )
            if not done or done.returncode:
                skip_without("jsdom", remedy)
    return CHECKS / "package.json"
