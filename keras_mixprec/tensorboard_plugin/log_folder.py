"""The runs of folders, read from their files whenever they are asked for."""

from keras_mixprec.reporting.run_files import RunFiles, find_runs


class LogFolder:
    """The runs below some folders.

    Args:
        folders: Dict from names, or `""` for an only one, to folders: what a
            monitor was given, or a folder above.
    """

    def __init__(self, folders: dict[str, str]):
        self._folders = folders
        # As they were last listed: to walk through all takes time.
        self._runs: dict[str, str] = {}

    def listed(self) -> list[dict]:
        """Returns each run by name, as `RunFiles.listed` does."""
        self._runs = {
            f"{name}/{run}" if name else run: path
            for name, folder in self._folders.items()
            for run, path in find_runs(folder).items()
        }
        found = []
        for run in self._runs:
            if log := self.open(run):
                found.append(log.listed(run))
        return found

    def open(self, run: str) -> RunFiles | None:
        """Returns the tables of a run, `None` if there is no such run."""
        if run not in self._runs:
            self.listed()
        try:
            return RunFiles(self._runs[run]) if run in self._runs else None
        except OSError:  # It was removed.
            return None
