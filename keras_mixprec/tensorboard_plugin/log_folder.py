"""The runs of a folder, read from their files as they grow."""

import itertools
import os
import threading
from collections import OrderedDict, defaultdict

from keras_mixprec.reporting.event_file import event_file_paths, read_records
from keras_mixprec.reporting.file_source import (
    FileSource,
    find_runs,
    read_values,
)
from keras_mixprec.reporting.listed_runs import listed_run
from keras_mixprec.reporting.schema import IN_16_BITS, PLUGIN_NAME
from keras_mixprec.reporting.summaries import parse_event
from keras_mixprec.reporting.text_formats import parse_json

# Of so many runs it stays known where in their files which value is: a reader
# compares two. Of a million steps of 2,000 layers that is 10 MB.
_MOST_SOURCES = 8

# Records in which the table of layers comes, if a log says at all whether any
# of them computes in 16 bits: before it are the settings and lint's findings.
_BEGINNING = 64


class LogFolder:
    """The runs of a folder; see `endpoints.Runs`.

    A run is read when it is asked for, and from then on what was added to it.

    Args:
        log_dir: String. What a monitor was given, or a folder above.
    """

    def __init__(self, log_dir: str):
        self._log_dir = log_dir
        self._cache = read_values()
        # As they were last listed: to walk through all takes time.
        self._folders = {}
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
        self._folders = find_runs(self._log_dir)
        for run, folder in self._folders.items():
            paths = event_file_paths(folder)
            contents = [c for path in paths if (c := self._content(path))]
            if contents:
                written = max(map(os.path.getmtime, paths))
                listed.append(listed_run(run, contents, written))
        return listed

    def source(self, run: str) -> FileSource | None:
        """Returns the log of a run, up to now.

        Raises:
            OSError: If it is removed meanwhile.
        """
        folder = self._folders.get(run) or find_runs(self._log_dir).get(run)
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
        """What the first values of ours in a file say of themselves."""
        if path not in self._described:
            content = _first_content(path)
            if content is None:
                return None
            if IN_16_BITS not in content:  # More of it is still to come.
                return content
            self._described[path] = content
        return self._described[path]


def _first_content(path):
    found: dict | None = None
    count = 0
    try:
        for record in itertools.islice(read_records(path), _BEGINNING):
            count += 1
            for value in parse_event(record).summary.value:
                described = value.metadata.plugin_data
                if described.plugin_name == PLUGIN_NAME:
                    found = parse_json(described.content, dict) | (found or {})
            if found and IN_16_BITS in found:
                return found
    except (OSError, ValueError):  # Removed meanwhile, or damaged.
        pass
    if found and count == _BEGINNING:  # A log of before does not say it.
        found[IN_16_BITS] = None
    return found
