"""A comparison in TensorBoard: a run per arm, for its HParams tab."""

import os
import re

from keras_mixprec._files import check_local
from keras_mixprec.analysis.comparison.curves import curves
from keras_mixprec.analysis.comparison.record import Comparison
from keras_mixprec.reporting import summaries
from keras_mixprec.reporting.event_file import EventFile


def write_runs(
    log_dir: str | os.PathLike, record: Comparison, rows: list[dict]
) -> None:
    """Writes a folder per arm.

    Args:
        log_dir: String or path-like. A local folder, made if it is missing.
        record: The record of a comparison.
        rows: What `rows.rows` made of it.
    """
    log_dir = check_local(log_dir)
    losses = {curve.name: curve for curve in curves(record)}
    for number, (arm, row) in enumerate(zip(record["arms"], rows, strict=True)):
        folder = os.path.join(log_dir, f"{number}_{_folder(arm['name'])}")
        os.makedirs(folder, exist_ok=True)
        values = [summaries.settings(_settings(arm, record))]
        values += [
            summaries.scalar(f"comparison/{name}", value)
            for name, value in _metrics(row, record).items()
            if value is not None
        ]
        with EventFile(folder) as file:
            file.write(0, values)
            if arm["name"] in losses:
                _, steps, means = losses[arm["name"]]
                for step, loss in zip(steps, means, strict=True):
                    file.write(step, [summaries.scalar("loss", loss)])


def _folder(name):
    return re.sub(r"[^\w.+-]+", "_", name)


def _settings(arm, record):
    policy = arm["policy"]
    return {
        "policy": policy if isinstance(policy, str) else arm["name"],
        "settings": "+".join(arm["settings"]),
        "loss_scale": arm["loss_scale"] or "",
        "backend": record["backend"],
        "device": record["device"],
        "batch_size": record["batch_size"],
        "steps": record["steps"],
    }


def _metrics(row, record):
    estimates = {
        name: row[name] and row[name]["estimate"]
        for name in ("speed", "difference")
    }
    return {
        "speed": estimates["speed"],
        "step_seconds": row["step_seconds"],
        "samples_per_second": row["samples_per_second"],
        "memory_bytes": row["memory_bytes"],
        record["metric"]: row["metric"],
        f"{record['metric']}_difference": estimates["difference"],
        "skipped_steps": row["skipped_steps"],
    }
