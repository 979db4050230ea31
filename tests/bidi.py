"""Drives Firefox by WebDriver BiDi, which needs no driver.

https://w3c.github.io/webdriver-bidi/
"""

import contextlib
import json
import re
import shutil
import subprocess
import tempfile
import time

import websocket
from missing_programs import skip_without

_LISTENS = re.compile(r"WebDriver BiDi listening on (ws://\S+)")
_START = 600.0


class Firefox:
    """A page in a Firefox.

    Args:
        address: String. Where it listens.

    Attributes:
        errors: List of strings, what the console and uncaught errors said.
    """

    def __init__(self, address):
        self._socket = websocket.create_connection(
            f"{address}/session", timeout=600, suppress_origin=True
        )
        self._last = 0
        self.errors = []
        self._ask("session.new", capabilities={})
        self._ask("session.subscribe", events=["log.entryAdded"])
        tree = self._ask("browsingContext.getTree")
        self._context = tree["contexts"][0]["context"]

    def close(self):
        """Ends the session."""
        self._socket.close()

    def open(self, url):
        """Opens a page, and waits until it is loaded."""
        parameters = {"url": url, "wait": "complete"}
        self._ask(
            "browsingContext.navigate", context=self._context, **parameters
        )

    def run(self, expression):
        """Returns what an expression comes to, as JSON has it."""
        answer = self._ask(
            "script.evaluate",
            expression=f"Promise.resolve({expression}).then(JSON.stringify)",
            target={"context": self._context},
            awaitPromise=True,
        )
        if answer["type"] != "success":
            raise RuntimeError(answer["exceptionDetails"]["text"])
        return json.loads(answer["result"].get("value", "null"))

    def _ask(self, method, **parameters):
        self._last += 1
        question = {"id": self._last, "method": method, "params": parameters}
        self._socket.send(json.dumps(question))
        while True:
            answer = json.loads(self._socket.recv())
            if answer.get("method") == "log.entryAdded":
                if answer["params"]["level"] in ("error", "warn"):
                    self.errors.append(answer["params"]["text"])
            elif answer.get("id") == self._last:
                if answer["type"] == "error":
                    raise RuntimeError(f"{method}: {answer['message']}")
                return answer["result"]


@contextlib.contextmanager
def firefox_or_skip():
    """A headless Firefox with an empty profile, in a dark theme."""
    program = shutil.which("firefox") or shutil.which("firefox-esr")
    if program is None:
        skip_without("Firefox", "apt-get install firefox-esr")
    with tempfile.TemporaryDirectory() as profile:
        with open(f"{profile}/user.js", "w") as settings:
            settings.write(
                'user_pref("layout.css.prefers-color-scheme.content-override",'
                " 0);\n"
            )
        flags = "--headless", "--no-remote", "--remote-debugging-port", "0"
        process = subprocess.Popen(
            [program, *flags, "--profile", profile],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        try:
            firefox = Firefox(_address(process))
            yield firefox
            firefox.close()
        finally:
            process.kill()
            process.communicate()


def _address(process):
    """Returns the address at which it says that it listens."""
    ends = time.monotonic() + _START
    for line in process.stderr:
        if found := _LISTENS.search(line):
            return found[1]
        if time.monotonic() > ends:
            break
    raise RuntimeError("Firefox does not listen.")
