"""The runs of a folder, read from their files as they grow."""

import os
import threading
from collections import OrderedDict, defaultdict

from keras_mixprec.reporting.event_file import event_file_paths, read_records
from keras_mixprec.reporting.file_source import (
    FileSource,
    find_runs,
    read_values,
)
from keras_mixprec.reporting.run_data import RunData
from keras_mixprec.reporting.schema import PLUGIN_NAME
from keras_mixprec.reporting.summaries import parse_event
from keras_mixprec.reporting.text_formats import parse_json

# Of so many runs it stays known where in their files which value is: a reader
# compares two. Of a million steps of 2,000 layers that is 10 MB.
_MOST_SOURCES = 8


class LogFolder:
    """The runs of a folder; see `endpoints.Runs`.

    A run is read when it is asked for, and from then on what was added to it.

    Args:
        log_dir: String. What a monitor was given, or a folder above.
    """

    def __init__(self, log_dir: str):
        self._log_dir = log_dir
        self._cache = read_values()
        self._sources = OrderedDict()
        self._described = {}
        self._locks = defaultdict(threading.Lock)
        self._lock = threading.Lock()

    def reading(self, run: str) -> threading.Lock:
        """Returns what to hold while a run is read: others are not held up.

        Of several that read a run, each sees it as it is at one time.
        """
        with self._lock:
            return self._locks[run]

    def listed(self) -> list[dict]:
        """Returns each run by name, without reading all of any."""
        listed = []
        for run, folder in find_runs(self._log_dir).items():
            paths = event_file_paths(folder)
            contents = [c for path in paths if (c := self._content(path))]
            if contents:
                entry = {"run": run, "newer_schema": RunData.is_newer(contents)}
                written = max(map(os.path.getmtime, paths))
                listed.append(entry | {"written": written})
        return listed

    def source(self, run: str) -> FileSource | None:
        """Returns the log of a run, up to now.

        Raises:
            OSError: If it is removed meanwhile.
        """
        folder = find_runs(self._log_dir).get(run)
        if folder is None:
            return None
        with self._lock:
            source = self._sources.get(folder)
        if source:
            source.refresh()
        else:
            source = FileSource(folder, self._cache)
        with self._lock:
            self._sources[folder] = source
            self._sources.move_to_end(folder)
            if len(self._sources) > _MOST_SOURCES:
                self._sources.popitem(last=False)
        return source

    def _content(self, path):
        """What the first value of ours in a file says of itself."""
        if path not in self._described:
            content = _first_content(path)
            if content is None:
                return None
            self._described[path] = content
        return self._described[path]


def _first_content(path):
    try:
        for record in read_records(path):
            for value in parse_event(record).summary.value:
                described = value.metadata.plugin_data
                if described.plugin_name == PLUGIN_NAME:
                    return parse_json(described.content, dict)
    except (OSError, ValueError):  # Removed meanwhile, or damaged.
        pass
    return None
