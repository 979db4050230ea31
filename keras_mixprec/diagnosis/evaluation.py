"""Finds the batch of an evaluation that is wrong, and the layer at fault."""

import itertools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras import tree

from keras_mixprec.diagnosis.batch import to_tensors
from keras_mixprec.diagnosis.call_examination import examine_prediction
from keras_mixprec.diagnosis.metric_check import metric_findings
from keras_mixprec.diagnosis.verdict import Finding
from keras_mixprec.numerics.arrays import is_float, to_array
from keras_mixprec.numerics.forward_pass import Prediction

# The maximum number of rows with non-finite outputs to list.
SHOWN = 8


def first_wrong(
    model: keras.Model, batches: Iterator, step: int | None, only_one: bool
) -> tuple[list[Finding], list, Any]:
    """Returns the faults of the first batch with a fault.

    Args:
        model: A `keras.Model`.
        batches: Iterator over the batches of an evaluation.
        step: Int, for the verdicts.
        only_one: Boolean, whether to look at the first batch only.

    Returns:
        Tuple of three:

        - List of the batch's `Finding`s.
        - List of the rows with non-finite outputs, counted over all batches.
        - The batch, or `None` if no batch has a fault.
    """
    findings, wrong, rows = [], None, []
    numbered = itertools.islice(_numbered(batches), 1 if only_one else None)
    for row, batch in numbered:
        data = to_tensors(batch, model)
        predictions = Prediction(model, data[0]).outputs()
        bad = _nonfinite_rows(predictions)
        rows += [row + i for i in bad]
        if not findings:
            if bad:
                findings = examine_prediction(model, data[0], step)
            findings = findings or metric_findings(
                model, data, predictions, step
            )
            wrong = keras.utils.pack_x_y_sample_weight(*data)
        # If rows of the wrong batch have non-finite outputs, go on to list such
        # rows of later batches.
        if findings and (not rows or len(rows) > SHOWN):
            break
    return findings, rows, wrong


def _numbered(batches) -> Iterator[tuple]:
    """Yields the index of each batch's first row, and the batch in parts."""
    row = 0
    for batch in batches:
        parts = keras.utils.unpack_x_y_sample_weight(batch)
        yield row, parts
        row += len(tree.flatten(parts[0])[0])


def _nonfinite_rows(predictions):
    rows: set = set()
    for tensor in filter(is_float, tree.flatten(predictions)):
        bad = ~np.isfinite(to_array(tensor))
        if bad.ndim:
            own = bad.reshape(len(bad), -1).any(axis=1)
            rows.update(np.flatnonzero(own).tolist())
    return sorted(rows)
