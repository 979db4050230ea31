"""Asking a process of `keras-mixprec serve`."""

import contextlib
import http.client
import os
import re
import signal
import subprocess
import sys
import urllib.parse

from reporting_readers import poll


@contextlib.contextmanager
def served(log_dir, *flags):
    """The port and the process of a server on `log_dir`."""
    command = [sys.executable, "-m", "keras_mixprec", "serve", str(log_dir)]
    process = subprocess.Popen(
        [*command, "--port", "0", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A backend that there is not: it needs none.
        env=os.environ | {"KERAS_BACKEND": "none"},
    )
    try:
        process.said = process.stdout.readline()
        port = re.match(r"http://127\.0\.0\.1:(\d+)/ ", process.said)
        yield int(port[1]), process
    finally:
        process.kill()
        process.communicate()


def ask(port, target, method="GET", host=None, body=None, **query):
    """Status, headers and body, over a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    headers = {"Host": host or f"127.0.0.1:{port}"}
    if query:
        target = f"{target}?{urllib.parse.urlencode(query)}"
    with contextlib.closing(connection):
        connection.request(method, target, body, headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read()


def interrupt(process):
    """What Ctrl+C leaves: the status, and all that was printed behind."""
    process.send_signal(signal.SIGINT)
    assert poll(lambda: process.poll() is not None)
    return process.returncode, process.stdout.read(), process.stderr.read()
