"""The monitoring callback, and what it sets up in a model."""

from keras_mixprec.callbacks.monitor import MixPrecMonitor

__all__ = ["MixPrecMonitor"]
