"""The log of a training run, written so that TensorBoard reads it, and read.

That imports no backend and no Keras: `tensorboard.summary` and its
`EventFileWriter` import the whole of TensorFlow wherever it is installed,
which costs seconds and memory in a run on JAX or PyTorch.
"""

from keras_mixprec.reporting.no_log import NoLog
from keras_mixprec.reporting.report import MixPrecReport, load_report
from keras_mixprec.reporting.run_log import RunLog

__all__ = ["MixPrecReport", "NoLog", "RunLog", "load_report"]
