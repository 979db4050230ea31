"""The page and its data, served by `keras-mixprec serve`.

To this machine alone: it listens on the loopback address. What else could
reach it is a page of somebody else's in a browser here, under a name that leads
to that address; so a request has to name this one as its host. No other page
may read an answer, show it in a frame, or run it as a script.
"""

import errno
import os
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

from keras_mixprec._html import joined
from keras_mixprec._version import __version__
from keras_mixprec.tensorboard_plugin.endpoints import (
    Answer,
    Endpoints,
    RefusedError,
)
from keras_mixprec.tensorboard_plugin.log_folder import LogFolder

HOST = "127.0.0.1"

# TensorBoard's is 6006, which may run beside it.
PORT = 6007

# Seconds until a connection that asks for nothing is closed.
_PATIENCE = 60

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>Mixed Precision: {log_dir}</title>
</head>
<body>
<script type="module" src="./static/start.js"></script>
</body>
</html>
"""
_START = 'import { render } from "./page.js";\nrender();\n'

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:;"
    " style-src 'self' 'unsafe-inline'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

# With any port: `ssh -L` may lead here from another one.
_HOSTS = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?", re.IGNORECASE)
_ROUTE = re.compile(r"/(static|data)/([\w.]+)")


class PageServer(ThreadingHTTPServer):
    """Serves the runs of a folder, while they are written.

    Args:
        log_dir: String. A folder.
        port: Int. `0` for any that is free. Defaults to `6007`.

    Raises:
        OSError: If the port is in use.

    Attributes:
        url: String. The address of the page.
        runs: `LogFolder`.
    """

    daemon_threads = True
    # On Windows two servers may otherwise share a port.
    allow_reuse_address = os.name != "nt"

    def __init__(self, log_dir: str, port: int = PORT):
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise OSError(
                getattr(error, "errno", None) or errno.EINVAL,
                f"cannot listen on port {port} ({_reason(error)}); "
                "choose another with --port, or any that is free with --port 0",
            ) from error
        self.runs = LogFolder({"": log_dir})
        self.endpoints = Endpoints()
        self.url = f"http://{HOST}:{self.server_address[1]}/"
        title = joined(os.path.abspath(log_dir))
        page = _PAGE.format(log_dir=title).encode()
        self.pages = {
            "/": Answer(page, "text/html"),
            "/static/start.js": Answer(_START.encode(), "text/javascript"),
        }

    def answer(self, target: str) -> Answer:
        """Returns what is sent for the target of a request.

        Raises:
            RefusedError: If it is none that the page asks for.
        """
        url = urlsplit(target)
        if url.path in self.pages:
            return self.pages[url.path]
        route = _ROUTE.fullmatch(url.path)
        if not route:
            raise RefusedError(404, "No such page")
        if route[1] == "static":
            return self.endpoints.static(route[2])
        query = dict(parse_qsl(url.query))
        return self.endpoints.data(self.runs, route[2], query)

    def handle_error(self, request, client_address):
        """Prints an error, but not of who has gone or stalled meanwhile."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = f"keras-mixprec/{__version__}"
    sys_version = ""
    timeout = _PATIENCE
    server: PageServer

    def do_GET(self):
        try:
            if not _HOSTS.fullmatch(self.headers.get("Host", "")):
                raise RefusedError(403, f"Open {self.server.url} instead.")
            self._send(200, self.server.answer(self.path))
        except RefusedError as error:
            self.send_error(error.status, str(error))
        except (ConnectionError, TimeoutError):
            raise
        except Exception:
            self.send_error(500, "An error, which the terminal shows.")
            raise

    do_HEAD = do_GET

    def send_error(self, code, message=None, explain=None):
        # What it has no method for is a method that is not allowed here.
        status = 405 if code == 501 else code
        text = "Only GET and HEAD." if status == 405 else message or ""
        # What follows the headers, such as a form, is not read.
        body = f"{text}\n".encode()
        self._send(status, Answer(body, "text/plain"), Connection="close")

    def _send(self, status, answer, **more):
        self.send_response(status)
        headers = {
            "Content-Type": f"{answer.content_type}; charset=utf-8",
            "Content-Length": str(len(answer.body)),
            **_HEADERS,
            **more,
        }
        if status == 405:
            headers["Allow"] = "GET, HEAD"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def log_message(self, format, *arguments):
        """The terminal has the address, and stays as it is."""


def _reason(error):
    return getattr(error, "strerror", None) or str(error)
