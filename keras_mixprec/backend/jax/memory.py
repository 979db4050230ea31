"""Memory of JAX's devices and programs; see `device_interface.py`."""

import jax

from keras_mixprec.backend.common import shape_in_fit
from keras_mixprec.backend.jax.state import values_of, variables_of


def reset_peak():
    pass  # JAX cannot reset the peak memory of a device.


def peak_bytes():
    known = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [k["peak_bytes_in_use"] for k in known if "peak_bytes_in_use" in k]
    return max(peaks, default=None)


def program_bytes(model, batch):
    if model.run_eagerly or not model.jit_compile:
        return None
    # Compile the step in the same way as Keras' `make_train_function`.
    step = jax.jit(model.train_step, donate_argnums=0)
    batch = jax.tree.map(_abstract, batch)
    program = step.lower(values_of(*variables_of(model)), batch).compile()
    found = program.memory_analysis()
    if found is None:
        return None
    # Do not use `peak_memory_in_bytes`, which leaves out temporaries on CPUs.
    return (
        found.argument_size_in_bytes
        + found.output_size_in_bytes
        - found.alias_size_in_bytes
        + found.temp_size_in_bytes
    )


def _abstract(array):
    shape, dtype = shape_in_fit(array)
    # Convert 64-bit dtypes to 32-bit dtypes, as JAX does by default.
    return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(dtype))
