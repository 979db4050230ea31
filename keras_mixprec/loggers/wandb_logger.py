"""A logger for Weights & Biases."""

from collections.abc import Mapping
from typing import Any

from keras_mixprec.reporting.text_formats import to_json


class WandbLogger:
    """Logs to a run of Weights & Biases, from `MixPrecMonitor(loggers=[...])`.

    Curves have the tags of TensorBoard. Their x axis is `mixprec/step`, so they
    do not disturb the steps of other callbacks. Events become the table
    `mixprec/events`. The run also gets the summary and the report as a page.
    Install wandb with `pip install keras-mixprec[wandb]`.

    Args:
        run: A `wandb.Run`. Defaults to `None`, the active run.

    Raises:
        ModuleNotFoundError: If wandb is not installed.
        ValueError: If `run` is not given and no run is active.

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
                "`WandbLogger` needs a run. Call `wandb.init(...)` first, or "
                "pass a run. Received: run=None"
            )
        if not callable(getattr(self._run, "define_metric", None)):
            raise TypeError(
                "`run` must be the result of `wandb.init`. "
                f"Received: run={run!r} of type {type(run).__name__}"
            )
        self._events = []

    def __deepcopy__(self, memo):
        # Keras Tuner copies callbacks, and all copies should share the run.
        return type(self)(self._run)

    def begin(self, settings: Mapping[str, str | float]) -> None:
        """Declares the x axis of the curves, and logs the settings."""
        self._run.define_metric("mixprec/step", hidden=True)
        self._run.define_metric("mixprec*", step_metric="mixprec/step")
        named = {f"mixprec/{name}": value for name, value in settings.items()}
        self._run.config.update(named, allow_val_change=True)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Logs points of curves."""
        self._run.log({"mixprec/step": step, **values})

    def event(self, step: int, event: Mapping[str, Any]) -> None:
        """Keeps the event for the table."""
        self._events.append([step, event["kind"], to_json(event)])

    def finish(self, summary: Any, report: Any) -> None:
        """Logs the table, the summary and the report; the run stays open."""
        columns = ["step", "kind", "event"]
        table = self._wandb.Table(columns=columns, data=self._events)
        page = self._wandb.Html(report.to_html(), inject=False)
        self._run.log({"mixprec/events": table, "mixprec/report": page})
        self._run.summary["mixprec/summary"] = str(summary)
