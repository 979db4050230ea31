"""Judging: which layer cannot bear its precision, why, and what to do."""

from keras_mixprec.diagnosis.failing_batch import FailingBatch
from keras_mixprec.diagnosis.on_demand import diagnose
from keras_mixprec.diagnosis.verdict import Verdict

__all__ = ["FailingBatch", "Verdict", "diagnose"]
