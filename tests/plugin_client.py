"""Asking the plugin of a running TensorBoard."""

import urllib.error
import urllib.parse
import urllib.request
from typing import NamedTuple


class Answer(NamedTuple):
    status: int
    headers: dict
    body: bytes


def ask(url, route, method="GET", **query):
    """What TensorBoard answers for our plugin's route."""
    query = urllib.parse.urlencode(query)
    request = urllib.request.Request(
        f"{url}data/plugin/mixed_precision/{route}?{query}", method=method
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return Answer(answer.status, dict(answer.headers), answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, dict(error.headers), error.read())
