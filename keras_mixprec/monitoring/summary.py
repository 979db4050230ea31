"""Summarizes a run that has ended."""

from collections import Counter

from keras_mixprec._console import listed
from keras_mixprec.policies.apply import left_in_float16
from keras_mixprec.policies.summary import precision_summary
from keras_mixprec.reporting.facts import Facts
from keras_mixprec.reporting.training_summary import (
    OptimizerSummary,
    TrainingSummary,
    closing,
)


def summarize(watch) -> TrainingSummary:
    """Returns the summary of a run.

    Args:
        watch: The `Watch`, after its last reading.
    """
    # Import the graph rewrite code lazily, because only the end of `fit` needs
    # it.
    from keras_mixprec.policies.graph_rewrite import in_force

    rows = precision_summary(watch.model).to_list()
    used = watch.counters.used()
    counts = {name: w.since_start() for name, w in used.items()}
    optimizers = {
        name: OptimizerSummary(
            steps=counts[name].attempted,
            skipped=counts[name].skipped,
            in_a_row=counts[name].in_a_row,
            first_scale=w.first_scale,
            last_scale=counts[name].scale,
            overflow_counts=w.overflow_counts(),
            nonfinite_counts=watch.counters.nonfinite_gradients(name),
        )
        for name, w in used.items()
    }
    facts = Facts(
        events=watch.log.story,
        layers=rows,
        steps=watch.taken,
        skipped={name: o.skipped for name, o in optimizers.items()},
        in_a_row=max((o.in_a_row for o in optimizers.values()), default=0),
        measured=watch.ranges.last is not None,
        fits=watch.log.fits + 1,
        first=watch.first_step + 1,
        examined=bool(watch.examiner.schedule.errors),
        flat_loss=watch.progress.flat_loss(),
    )
    return TrainingSummary(
        dtypes=dict(Counter(row["compute_dtype"] for row in rows)),
        optimizers=optimizers,
        folder=watch.log.folder,
        bad_data=str(watch.bad_data),
        nonfinite_losses=watch.counters.nonfinite_losses(),
        graph_rewrite=str(in_force() or ""),
        left_in_float16=_left_in_float16(watch.model),
        **closing(facts),
    )


def _left_in_float16(model):
    """Returns a text about layers that `apply_policy` would keep in float32."""
    found: dict = {}
    for path, reason in left_in_float16(model).items():
        found.setdefault(reason, []).append(path)
    return " ".join(
        f"Left in float16: {listed(paths)} ({reason}). "
        "`keras_mixprec.apply_policy` would keep "
        f"{'it' if len(paths) == 1 else 'them'} in float32."
        for reason, paths in found.items()
    )
