"""TensorFlow's setting for float32 products: its TensorFloat-32 switch."""

import contextlib
import gc

import keras
import tensorflow as tf

_PARTS = ("train", "test", "predict")

_is_on = tf.config.experimental.tensor_float_32_execution_enabled
_set = tf.config.experimental.enable_tensor_float_32_execution


def put(name, kind):
    _switch(name != "float32")


def scope(name, kind):
    return _scope(name, _switch)


def local_scope(name):
    # Do not use `_switch`, which would compile all models again. Finding the
    # models takes 50 ms.
    return _scope(name, _set)


@contextlib.contextmanager
def _scope(name, switch):
    before = _is_on()
    switch(name != "float32")
    try:
        yield
    finally:
        switch(before)


def read(kind):
    return ("default",) * 2 if _is_on() else ("float32",) * 2


def names_of_cpu():
    return ()


def _switch(on):
    if _is_on() == on:
        return
    _set(on)
    # A function that XLA has compiled keeps its precision, so make the
    # functions of all models again. Among a million objects, finding the models
    # takes 50 ms.
    for model in [o for o in gc.get_objects() if _has_functions(o)]:
        if model.jit_compile:
            for part in _PARTS:
                if getattr(model, f"{part}_function") is not None:
                    getattr(model, f"make_{part}_function")(force=True)


def _has_functions(thing):
    # Do not use `isinstance`, which runs the code of objects that define
    # `__class__`.
    return issubclass(type(thing), keras.Model) and any(
        vars(thing).get(f"{part}_function") is not None for part in _PARTS
    )
