"""Starts the server of the page as a process, and sends requests to it."""

import contextlib
import http.client
import os
import re
import signal
import subprocess
import sys
import urllib.parse


@contextlib.contextmanager
def running(log_dir, *flags):
    """The address and the process of `keras-mixprec serve`."""
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
        yield re.match(r"http://127\.0\.0\.1:\d+/", process.said)[0], process
    finally:
        process.kill()
        process.communicate()


def ask(url, target, method="GET", host=None, body=None, **query):
    """Status, headers and body, over a new connection."""
    address = urllib.parse.urlsplit(url).netloc
    connection = http.client.HTTPConnection(address, timeout=600)
    if query:
        target = f"{target}?{urllib.parse.urlencode(query)}"
    with contextlib.closing(connection):
        headers = {"Host": host or address}
        connection.request(method, target, body, headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read()


def interrupt(process):
    """Presses Ctrl+C; returns the exit status and the output after it."""
    process.send_signal(signal.SIGINT)
    printed = process.communicate(timeout=600)
    return process.returncode, *printed
