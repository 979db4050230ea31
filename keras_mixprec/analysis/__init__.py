"""Looking at a model before or after training: what could be better."""

from keras_mixprec.analysis.minimize_float32 import minimize_float32

__all__ = ["minimize_float32"]
