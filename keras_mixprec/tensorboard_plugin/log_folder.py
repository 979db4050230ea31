"""The runs below some folders."""

from keras_mixprec.reporting.run_files import RunFiles, find_runs


class LogFolder:
    """The runs below some folders, read again for each request.

    Args:
        folders: Dict from names to folders. An only folder may have the name
            `""`.
    """

    def __init__(self, folders: dict[str, str]):
        self._folders = folders
        # The last list, because a walk through all folders takes time.
        self._runs: dict[str, str] = {}

    def listed(self) -> list[dict]:
        """Returns `RunFiles.listed` of each run."""
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
        """Returns the tables of a run, or `None`."""
        if run not in self._runs:
            self.listed()
        try:
            return RunFiles(self._runs[run]) if run in self._runs else None
        except OSError:  # Removed in between.
            return None
