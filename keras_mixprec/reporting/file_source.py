"""A run's log as its files hold it."""

import os

from tensorboard.util import tensor_util

from keras_mixprec.reporting.event_file import event_file_paths, read_records
from keras_mixprec.reporting.run_data import Point
from keras_mixprec.reporting.schema import (
    HISTOGRAM_PLUGIN_NAME,
    PLUGIN_NAME,
    is_run_folder,
)
from keras_mixprec.reporting.summaries import parse_event
from keras_mixprec.reporting.text_formats import parse_json


class FileSource:
    """Reads a run's log from its files; see `run_data.Source`.

    A file that is cut short or damaged counts up to there.

    Args:
        folder: String. The run's folder, with event files.
    """

    def __init__(self, folder: str):
        self.contents = {}
        self.histograms = []
        self.written = 0.0
        self._values = {}
        self._points = {}
        self._plugins = {}
        for path in event_file_paths(folder):
            for event in _events(path):
                self.written = max(self.written, event.wall_time)
                for value in event.summary.value:
                    self._add(event.step, value)
        self.histograms.sort()

    def read(self, tag: str) -> list[Point]:
        """Returns the values of a tag by rising step."""
        # A page asks for each metric of the same tables.
        if tag not in self._points:
            self._points[tag] = [
                Point(step, tensor_util.make_ndarray(tensor))
                for step, tensor in self._values[tag]
            ]
        return self._points[tag]

    def _add(self, step, value):
        tag = value.tag
        if tag not in self._plugins:
            described = value.metadata.plugin_data
            self._plugins[tag] = described.plugin_name
            if described.plugin_name == PLUGIN_NAME:
                self.contents[tag] = parse_json(described.content, dict)
            elif described.plugin_name == HISTOGRAM_PLUGIN_NAME:
                self.histograms.append(tag)
        if self._plugins[tag] in (PLUGIN_NAME, HISTOGRAM_PLUGIN_NAME):
            self._values.setdefault(tag, []).append((step, value.tensor))


def find_runs(log_dir: str) -> dict[str, str]:
    """Returns the folders of the runs in a folder, by name.

    Args:
        log_dir: String. What a monitor was given, a folder with several of
            those, or the run's folder itself.
    """
    log_dir = os.fspath(log_dir)
    runs = {}
    for folder, _, _ in os.walk(log_dir):
        ours = is_run_folder(os.path.basename(os.path.abspath(folder)))
        if ours and event_file_paths(folder):
            runs[os.path.relpath(folder, log_dir)] = folder
    return dict(sorted(runs.items()))


def _events(path):
    try:
        yield from map(parse_event, read_records(path))
    except ValueError:
        return
