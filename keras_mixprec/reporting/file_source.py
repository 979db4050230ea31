"""A run's log as its files hold it."""

import os
from collections.abc import Iterator

from tensorboard.util import tensor_util

from keras_mixprec.formats import printable
from keras_mixprec.reporting.event_file import event_file_paths
from keras_mixprec.reporting.record_index import read_record, scan
from keras_mixprec.reporting.schema import (
    HISTOGRAM_PLUGIN_NAME,
    PLUGIN_NAME,
    is_run_folder,
)
from keras_mixprec.reporting.sized_cache import SizedCache
from keras_mixprec.reporting.source import Point, points_size
from keras_mixprec.reporting.summaries import parse_event
from keras_mixprec.reporting.text_formats import parse_json

# Bytes of values to keep, of all runs together.
_KEPT = 1 << 27

# The plugins whose values are asked for.
_OURS = (PLUGIN_NAME, HISTOGRAM_PLUGIN_NAME)


def read_values() -> SizedCache:
    """Returns a cache for `FileSource`, which several may share."""
    return SizedCache(_KEPT, points_size)


class FileSource:
    """Reads a run's log from its files; see `Source`.

    Keeps where in the files each value is, and reads those that are asked for:
    a log may be larger than the memory. A file that is cut short counts up to
    there, and without the values that are damaged.

    Args:
        folder: String. The run's folder, with event files.
        cache: What `read_values` returned. Defaults to one of its own.
    """

    def __init__(self, folder: str, cache: SizedCache | None = None):
        self._folder = folder
        self._cache = read_values() if cache is None else cache
        self.contents = {}
        self.histograms = []
        self.written = 0.0
        self._places = {}
        self._plugins = {}
        self._ends = {}
        self.refresh()

    @property
    def version(self) -> tuple:
        """As in `Source`: how far each file was read."""
        return tuple(self._ends.items())

    def refresh(self) -> None:
        """Reads on, what was written since the last time.

        Raises:
            OSError: If the folder was removed.
        """
        paths = event_file_paths(self._folder)
        sizes = {path: os.path.getsize(path) for path in paths}
        # Removed, or written again under its name.
        if any(sizes.get(path, 0) < end for path, end in self._ends.items()):
            self._forget()
        for path, size in sizes.items():
            if size > self._ends.get(path, 0):
                self._read_on(path)
        self.histograms.sort()

    def read(self, tag: str) -> list[Point]:
        """Returns the values of a tag by rising step.

        Raises:
            OSError: If the files were removed meanwhile.
        """
        # A page asks for each metric of the same tables.
        places = self._places[tag]
        key = self._folder, tag
        version = places[0], len(places)
        return self._cache.get(key, version, lambda: self._read(tag, places))

    def last(self, tag: str) -> Point | None:
        """Returns the last value of a tag, as in `Source`.

        Raises:
            OSError: If the files were removed meanwhile.
        """
        place = self._places[tag][-1]
        found = self._cache.get(
            (self._folder, tag, "last"),
            place,
            # One that is damaged repeats most of the one before.
            lambda: self._read(tag, [place]) or self.read(tag)[-1:],
        )
        return found[-1] if found else None

    def load(self) -> None:
        """Reads all there is, and does without the files from then on."""
        self._cache = SizedCache(1 << 62, points_size)
        for tag in self._places:
            self.read(tag)

    def _forget(self):
        self.written = 0.0
        for known in self.contents, self._places, self._plugins, self._ends:
            known.clear()
        self.histograms.clear()

    def _read_on(self, path):
        start = self._ends.get(path, 0)
        place = None
        with open(path, "rb") as file:
            for place, end, tag, alone in scan(path, start):
                self._ends[path] = end
                plugin = self._plugins.get(tag)
                ours = plugin in _OURS
                # Values of TensorBoard's own curves are written apart.
                if ours and alone:
                    self._places[tag].append((path, place))
                elif (plugin is None or ours) and (
                    event := _event(file, place)
                ):
                    for value in event.summary.value:
                        self._add((path, place), value)
            if place is not None and (event := _event(file, place)):
                self.written = max(self.written, event.wall_time)

    def _add(self, place, value):
        tag = value.tag
        if tag not in self._plugins:
            described = value.metadata.plugin_data
            self._plugins[tag] = described.plugin_name
            if described.plugin_name == PLUGIN_NAME:
                self.contents[tag] = parse_json(described.content, dict)
            elif described.plugin_name == HISTOGRAM_PLUGIN_NAME:
                self.histograms.append(tag)
        if self._plugins[tag] in _OURS:
            self._places.setdefault(tag, []).append(place)

    def _read(self, tag, places):
        points = []
        for event in _events(places):
            points += [
                Point(event.step, tensor_util.make_ndarray(value.tensor))
                for value in event.summary.value
                if value.tag == tag
            ]
        return points


def find_runs(log_dir: str) -> dict[str, str]:
    """Returns the folders of the runs in a folder, by name.

    A name is text that can be shown, whatever bytes the folder's has.

    Args:
        log_dir: String. What a monitor was given, a folder with several of
            those, or the run's folder itself.
    """
    log_dir = os.fspath(log_dir)
    runs = {}
    for folder, inside, _ in os.walk(log_dir):
        ours = is_run_folder(os.path.basename(os.path.abspath(folder)))
        if ours and event_file_paths(folder):
            runs[printable(os.path.relpath(folder, log_dir))] = folder
            inside.clear()  # A run has none within.
    return dict(sorted(runs.items()))


def _events(places) -> Iterator:
    """The events at these places, each file opened once."""
    path, file = None, None
    try:
        for other, place in places:
            if other != path:
                if file:
                    file.close()
                path, file = other, open(other, "rb")  # noqa: SIM115
            if event := _event(file, place):
                yield event
    finally:
        if file:
            file.close()


def _event(file, place):
    """The event in a record, `None` if it is damaged."""
    record = read_record(file, place)
    try:
        return None if record is None else parse_event(record)
    except ValueError:
        return None
