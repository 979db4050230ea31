"""TensorFlow's setting for float32 products: its TensorFloat-32 switch."""

import contextlib
import gc

import keras
import tensorflow as tf

_PARTS = ("train", "test", "predict")


def put(name, kind):
    _switch(name != "float32")


@contextlib.contextmanager
def scope(name, kind):
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    put(name, kind)
    try:
        yield
    finally:
        _switch(before)


@contextlib.contextmanager
def local_scope(name):
    # This setter recompiles no models; that would take 50 ms.
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(name != "float32")
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)


def read(kind):
    on = tf.config.experimental.tensor_float_32_execution_enabled()
    return ("default",) * 2 if on else ("float32",) * 2


def names_of_cpu():
    return ()


def _switch(on):
    if tf.config.experimental.tensor_float_32_execution_enabled() == on:
        return
    tf.config.experimental.enable_tensor_float_32_execution(on)
    # A function that XLA has compiled keeps its precision; other operations ask
    # in every call. Finding the models takes 50 ms among a million objects.
    for model in [o for o in gc.get_objects() if _has_functions(o)]:
        if model.jit_compile:
            for part in _PARTS:
                if getattr(model, f"{part}_function") is not None:
                    getattr(model, f"make_{part}_function")(force=True)


def _has_functions(thing):
    # `isinstance` would call the `__class__` of objects that pretend.
    return issubclass(type(thing), keras.Model) and any(
        vars(thing).get(f"{part}_function") is not None for part in _PARTS
    )
