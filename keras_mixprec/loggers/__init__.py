"""Loggers for `MixPrecMonitor(loggers=[...])`: who gets its figures beside it.

An adapter imports its client library when it is made; anything with the four
methods of `Logger` will do instead.
"""

from keras_mixprec.loggers.logger import Logger as Logger
from keras_mixprec.loggers.mlflow_logger import MLflowLogger as MLflowLogger
from keras_mixprec.loggers.wandb_logger import WandbLogger as WandbLogger

__all__ = ["Logger", "MLflowLogger", "WandbLogger"]
