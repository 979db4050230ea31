"""A run's log as a running TensorBoard serves it."""

import threading
from collections import OrderedDict

from tensorboard.data import provider

from keras_mixprec.reporting.run_data import Point
from keras_mixprec.reporting.schema import HISTOGRAM_PLUGIN_NAME, PLUGIN_NAME
from keras_mixprec.reporting.text_formats import parse_json

# The provider samples what it returns down to this. What the server keeps is
# set by the loader.
_ALL = 1 << 30


class ReadTags:
    """Keeps what was read, while no more has been written to it.

    Args:
        size: Int. Bytes to keep, those asked for last. Defaults to 256 MiB.
    """

    def __init__(self, size: int = 1 << 28):
        self._size = size
        self._held = 0
        self._tags = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key, version, read) -> list[Point]:
        """Returns the points of a tag.

        Args:
            key: Which tag of which run.
            version: Changes when the tag does.
            read: Function that reads them.
        """
        with self._lock:
            known = self._tags.get(key)
            if known and known[0] == version:
                self._tags.move_to_end(key)
                return known[1]
        points = read()
        with self._lock:
            self._forget(key)
            self._tags[key] = version, points
            self._held += _bytes(points)
            while self._held > self._size and len(self._tags) > 1:
                self._forget(next(iter(self._tags)))
        return points

    def _forget(self, key):
        _, points = self._tags.pop(key, (None, []))
        self._held -= _bytes(points)


class ProviderSource:
    """Reads a run from TensorBoard's data provider; see `run_data.Source`.

    Args:
        data_provider: TensorBoard's `DataProvider`.
        request: Dict with `ctx` and `experiment_id`, of the one who asks.
        run: String. The run's name.
        cache: `ReadTags`.
    """

    def __init__(self, data_provider, request: dict, run: str, cache: ReadTags):
        self._provider = data_provider
        self._request = request
        self._run = run
        self._cache = cache
        self._plugins = {}
        own = self._list(PLUGIN_NAME)
        self.contents = {
            tag: parse_json(s.plugin_content, dict) for tag, s in own.items()
        }
        self.written = last_written(own.values())
        self.histograms = sorted(self._list(HISTOGRAM_PLUGIN_NAME))

    def read(self, tag: str) -> list[Point]:
        """Returns the values of a tag by rising step."""
        plugin, version = self._plugins[tag]
        key = self._request["experiment_id"], self._run, tag
        return self._cache.get(key, version, lambda: self._read(plugin, tag))

    def _list(self, plugin):
        listed = self._provider.list_tensors(
            **self._request,
            plugin_name=plugin,
            run_tag_filter=provider.RunTagFilter(runs=[self._run]),
        ).get(self._run, {})
        for tag, series in listed.items():
            version = series.max_step, series.max_wall_time
            self._plugins[tag] = plugin, version
        return listed

    def _read(self, plugin, tag):
        # A tag at a time: an answer of more than 256 MB fails.
        series = self._provider.read_tensors(
            **self._request,
            plugin_name=plugin,
            downsample=_ALL,
            run_tag_filter=provider.RunTagFilter(runs=[self._run], tags=[tag]),
        )
        found = series.get(self._run, {}).get(tag, [])
        return [Point(datum.step, datum.numpy) for datum in found]


def last_written(series) -> float:
    """Returns the time of the last value of any of these tags."""
    return max((tag.max_wall_time for tag in series), default=0.0)


def _bytes(points):
    return sum(_size(point.array) for point in points)


def _size(array):
    strings = sum(map(len, array.flat)) if array.dtype == object else 0
    return array.nbytes + strings
