"""A run's log as a running TensorBoard serves it."""

import contextlib
from collections.abc import Hashable

from tensorboard.data import provider

from keras_mixprec.formats import printable
from keras_mixprec.reporting.listed_runs import listed_run
from keras_mixprec.reporting.schema import HISTOGRAM_PLUGIN_NAME, PLUGIN_NAME
from keras_mixprec.reporting.sized_cache import SizedCache
from keras_mixprec.reporting.source import Point, points_size
from keras_mixprec.reporting.text_formats import parse_json

# The provider samples what it returns down to this. What the server keeps is
# set by the loader.
_ALL = 1 << 30


# Bytes of values to keep, of all runs together.
_KEPT = 1 << 28


def read_tags() -> SizedCache:
    """Returns a cache for the sources of all runs."""
    return SizedCache(_KEPT, points_size)


class ProviderRuns:
    """The runs of TensorBoard's data provider; see `endpoints.Runs`.

    Args:
        data_provider: TensorBoard's `DataProvider`.
        request: Dict with `ctx` and `experiment_id`, of the one who asks.
        cache: What `read_tags` returned.
    """

    def __init__(self, data_provider, request: dict, cache: SizedCache):
        self._provider = data_provider
        self._request = request
        self._cache = cache

    def listed(self) -> list[dict]:
        """Returns each run by name."""
        found = self._provider.list_tensors(
            **self._request, plugin_name=PLUGIN_NAME
        )
        return [
            listed_run(
                printable(run), _contents(tags), last_written(tags.values())
            )
            for run, tags in sorted(found.items())
        ]

    def reading(self, run: str) -> contextlib.AbstractContextManager:
        """Nothing: each request has a `ProviderSource` of its own."""
        return contextlib.nullcontext()

    def source(self, run: str) -> "ProviderSource":
        """Returns the log of a run, an empty one if there is no such run."""
        # A folder whose name is no text has another one on the page.
        if "\\" in run:
            found = self._provider.list_runs(**self._request)
            names = {
                printable(other.run_name): other.run_name for other in found
            }
            run = names.get(run, run)
        return ProviderSource(self._provider, self._request, run, self._cache)


class ProviderSource:
    """Reads a run from TensorBoard's data provider; see `Source`.

    Args:
        data_provider: TensorBoard's `DataProvider`.
        request: Dict with `ctx` and `experiment_id`, of the one who asks.
        run: String. The run's name.
        cache: What `read_tags` returned.
    """

    def __init__(self, data_provider, request: dict, run: str, cache):
        self._provider = data_provider
        self._request = request
        self._run = run
        self._cache = cache
        self._plugins = {}
        own = self._list(PLUGIN_NAME)
        self.contents = dict(zip(own, _contents(own), strict=True))
        self.written = last_written(own.values())
        self.histograms = sorted(self._list(HISTOGRAM_PLUGIN_NAME))

    @property
    def version(self) -> Hashable:
        """As in `Source`."""
        experiment = self._request["experiment_id"]
        return experiment, self._run, tuple(self._plugins.items())

    def read(self, tag: str) -> list[Point]:
        """Returns the values of a tag by rising step."""
        plugin, version = self._plugins[tag]
        key = self._request["experiment_id"], self._run, tag
        return self._cache.get(key, version, lambda: self._read(plugin, tag))

    def last(self, tag: str) -> Point | None:
        """Returns the last value of a tag."""
        found = self.read(tag)
        return found[-1] if found else None

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


def _contents(tags):
    return [parse_json(s.plugin_content, dict) for s in tags.values()]
