"""Loggers for `MixPrecMonitor(loggers=[...])`, which export its figures.

The constructor of a logger imports its client library. Any object with the four
methods of `Logger` is a logger. `forwarded_log.py` sends the log to loggers.
"""

from keras_mixprec.loggers.logger import Logger as Logger
from keras_mixprec.loggers.mlflow_logger import MLflowLogger as MLflowLogger
from keras_mixprec.loggers.wandb_logger import WandbLogger as WandbLogger

__all__ = ["Logger", "MLflowLogger", "WandbLogger"]
