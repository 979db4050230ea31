"""`lint`: a model is checked before it trains."""

import keras

from keras_mixprec.analysis.lint.findings import Findings
from keras_mixprec.analysis.lint.model_view import ModelView
from keras_mixprec.analysis.lint.table import RULES
from keras_mixprec.policies.layers import check_model


def lint(model: keras.Model, x=None, y=None) -> Findings:
    """Returns what will fail, or not pay, when a model trains in 16 bits.

    Args:
        model: A `keras.Model`.
        x: Samples as for `fit`, or `None`. What the data alone can show is
            checked on them.
        y: Targets, or `None`.

    Returns:
        `Findings`, most severe first.
    """
    view = ModelView(check_model(model), x, y)
    found = [finding for rule in RULES for finding in rule.findings(view)]
    return Findings(found, model)
