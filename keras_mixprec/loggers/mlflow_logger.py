"""A logger for MLflow."""

import re
from collections.abc import Mapping
from typing import Any

from keras_mixprec import _clock
from keras_mixprec.reporting.text_formats import to_json

# The characters that MLflow forbids in names, and the maximum number of metrics
# in one call to MLflow.
_FORBIDDEN = re.compile(r"[^\w\-. :/]", re.ASCII)
_MOST = 1000

# The maximum length of a tag's value in MLflow.
_LONGEST = 5000


class MLflowLogger:
    """Logs to a run of MLflow, from `MixPrecMonitor(loggers=[...])`.

    Metrics have the tags of TensorBoard. Settings and the summary become tags
    of the run. Its artifacts are `mixprec/events.jsonl` and
    `mixprec/report.html`. Install MLflow with
    `pip install keras-mixprec[mlflow]`.

    Args:
        run_id: String. Defaults to `None`, the active run.

    Raises:
        ModuleNotFoundError: If MLflow is not installed.
        TypeError: If `run_id` is not a string.
        ValueError: If `run_id` is not given and no run is active.

    Example:
        with mlflow.start_run():
            monitor = kmp.MixPrecMonitor("logs", loggers=[MLflowLogger()])
            model.fit(x, y, callbacks=[monitor])
    """

    def __init__(self, run_id: str | None = None):
        import mlflow

        if run_id is not None and not isinstance(run_id, str):
            raise TypeError(
                "`run_id` must be a string. "
                f"Received: run_id={run_id!r} of type {type(run_id).__name__}"
            )
        if run_id is None:
            run = mlflow.active_run()
            if run is None:
                raise ValueError(
                    "`MLflowLogger` needs a run. Call `mlflow.start_run()` "
                    "first, or pass the id of a run. Received: run_id=None"
                )
            run_id = run.info.run_id
        self._run_id = run_id
        self._events = []

    def begin(self, settings: Mapping[str, str | float]) -> None:
        """Logs the settings."""
        # Log the settings as tags, because a second `fit` could not change
        # MLflow's parameters.
        for name, value in settings.items():
            self._client.set_tag(self._run_id, f"mixprec.{name}", value)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Logs points of metrics."""
        from mlflow.entities import Metric

        now = round(_clock.wall() * 1000)
        metrics = [
            Metric(_FORBIDDEN.sub("_", tag), float(value), now, step)
            for tag, value in values.items()
        ]
        for first in range(0, len(metrics), _MOST):
            part = metrics[first : first + _MOST]
            self._client.log_batch(self._run_id, part)

    def event(self, step: int, event: Mapping[str, Any]) -> None:
        """Keeps the event for the artifact."""
        self._events.append(to_json({**event, "step": step}))

    def finish(self, summary: Any, report: Any) -> None:
        """Logs the events, the summary and the report; the run stays open."""
        text = str(summary)[:_LONGEST]
        self._client.set_tag(self._run_id, "mixprec.summary", text)
        for name, content in (
            ("events.jsonl", "".join(f"{line}\n" for line in self._events)),
            ("report.html", report.to_html()),
        ):
            self._client.log_text(self._run_id, content, f"mixprec/{name}")

    @property
    def _client(self):
        import mlflow

        return mlflow.MlflowClient()
