"""The log of a training run, written so that TensorBoard reads it, and read.

That imports no backend and no Keras: `tensorboard.summary` and its
`EventFileWriter` import the whole of TensorFlow wherever it is installed,
which costs seconds and memory in a run on JAX or PyTorch.
"""
