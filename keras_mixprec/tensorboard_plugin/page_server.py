"""Serves the page and its data for `keras-mixprec serve`.

The server listens on the loopback address only. A foreign page in a browser
could still reach the server under a different host name, so requests must name
this host. The headers stop other pages from reading, framing or running an
answer.
"""

import errno
import http
import os
import re
import socketserver
import sys
from urllib.parse import parse_qsl
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from keras_mixprec._html import joined
from keras_mixprec.tensorboard_plugin.endpoints import (
    Answer,
    Endpoints,
    RefusedError,
    check_method,
)

HOST = "127.0.0.1"

# The default port. TensorBoard uses 6006 and may run at the same time.
PORT = 6007

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

# Host names in requests may have any port, because `ssh -L` may forward a
# different port.
_HOSTS = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?", re.IGNORECASE)
_ROUTE = re.compile(r"/(static|data)/([\w.]+)")


class PageServer(socketserver.ThreadingMixIn, WSGIServer):
    """Serves the runs of a folder while they are written.

    Args:
        log_dir: String. A folder.
        port: Int. `0` for any free port. Defaults to `6007`.

    Raises:
        OSError: If the port is in use.

    Attributes:
        url: String. The address of the page.
        endpoints: `Endpoints`.
    """

    daemon_threads = True
    # On Windows, two servers could share a port if addresses were reused.
    allow_reuse_address = os.name != "nt"

    def __init__(self, log_dir: str, port: int = PORT):
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise OSError(
                getattr(error, "errno", None) or errno.EINVAL,
                f"cannot listen on port {port} ({reason}); "
                "choose another with --port, or use --port 0 for any free port",
            ) from error
        self.set_app(self._respond)
        self.endpoints = Endpoints({"": log_dir})
        self.url = f"http://{HOST}:{self.server_address[1]}/"
        page = _PAGE.format(log_dir=joined(os.path.abspath(log_dir)))
        self._pages = {
            "/": Answer(page.encode(), "text/html"),
            "/static/start.js": Answer(_START.encode(), "text/javascript"),
        }

    def handle_error(self, request, client_address):
        """Prints an error, unless the client has gone or stalled."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)

    def _respond(self, environ, start_response):
        """The WSGI application."""
        status, method = http.HTTPStatus.OK, environ["REQUEST_METHOD"]
        try:
            check_method(method)
            answer = self._answer(environ)
        except RefusedError as error:
            status = http.HTTPStatus(error.status)
            answer = Answer(f"{error}\n".encode(), "text/plain")
        headers = {
            "Content-Type": f"{answer.content_type}; charset=utf-8",
            "Content-Length": str(len(answer.body)),
            "Allow": "GET, HEAD",
            **_HEADERS,
        }
        start_response(f"{status:d} {status.phrase}", [*headers.items()])
        return [] if method == "HEAD" else [answer.body]

    def _answer(self, environ):
        if not _HOSTS.fullmatch(environ.get("HTTP_HOST", "")):
            raise RefusedError(403, f"Open {self.url} instead.")
        path = environ["PATH_INFO"]
        if path in self._pages:
            return self._pages[path]
        route = _ROUTE.fullmatch(path)
        if not route:
            raise RefusedError(404, "No such page")
        if route[1] == "static":
            return self.endpoints.static(route[2])
        query = dict(parse_qsl(environ["QUERY_STRING"]))
        return self.endpoints.data(route[2], query)


class _Handler(WSGIRequestHandler):
    # The number of seconds after which the server closes an idle connection.
    timeout = 60

    def log_message(self, format, *arguments):
        """Keeps the terminal quiet."""
