"""The callbacks: monitoring a run, and repairing it."""

from keras_mixprec.callbacks.monitor import MixPrecMonitor
from keras_mixprec.callbacks.tuner import PrecisionTuner

__all__ = ["MixPrecMonitor", "PrecisionTuner"]
