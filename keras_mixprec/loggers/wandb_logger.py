"""Figures for Weights & Biases."""

from collections.abc import Mapping
from typing import Any

from keras_mixprec.reporting.text_formats import to_json


class WandbLogger:
    """Logs to a run of Weights & Biases, from `MixPrecMonitor(loggers=[...])`.

    Curves have the tags of TensorBoard, over `mixprec/step`, so that the steps
    of other callbacks stay theirs. What happened is the table
    `mixprec/events`, the summary and the report as a page are in the run's
    summary. `pip install keras-mixprec[wandb]` has what it needs.

    Args:
        run: A `wandb.Run`. Defaults to `None`, the one that `wandb.init` has
            started.

    Raises:
        ModuleNotFoundError: If wandb is not installed.
        ValueError: If `run` is not given and none was started.

    Example:
        wandb.init(project="digits")
        monitor = kmp.MixPrecMonitor("logs", loggers=[WandbLogger()])
    """

    def __init__(self, run: Any = None):
        import wandb

        self._wandb: Any = wandb
        self._run: Any = wandb.run if run is None else run
        if self._run is None:
            raise ValueError(
                "`WandbLogger` needs a run: call `wandb.init(...)` before, or "
                "give one. Received: run=None"
            )
        if not callable(getattr(self._run, "define_metric", None)):
            raise TypeError(
                "`run` must be what `wandb.init` returned. "
                f"Received: run={run!r} of type {type(run).__name__}"
            )
        self._events = []

    def __deepcopy__(self, memo):
        # Keras Tuner copies callbacks; the run is the same.
        return type(self)(self._run)

    def begin(self, settings: Mapping[str, str | float]) -> None:
        """Declares the step of the curves, and notes the settings."""
        self._run.define_metric("mixprec/step", hidden=True)
        self._run.define_metric("mixprec*", step_metric="mixprec/step")
        named = {f"mixprec/{name}": value for name, value in settings.items()}
        self._run.config.update(named, allow_val_change=True)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Logs points of curves."""
        self._run.log({"mixprec/step": step, **values})

    def event(self, step: int, event: Mapping[str, Any]) -> None:
        """Keeps what happened for the table."""
        self._events.append([step, event["kind"], to_json(event)])

    def finish(self, summary: Any, report: Any) -> None:
        """Logs the table, the summary and the report; the run stays open."""
        columns = ["step", "kind", "event"]
        table = self._wandb.Table(columns=columns, data=self._events)
        page = self._wandb.Html(report.to_html(), inject=False)
        self._run.log({"mixprec/events": table, "mixprec/report": page})
        self._run.summary["mixprec/summary"] = str(summary)
