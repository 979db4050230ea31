"""The peak memory of training, and its parts.

The device decides how the peak is measured, and the measures differ in meaning:

| `measured_by` | where | meaning of the peak |
|---|---|---|
| `"device"` | GPUs, TPUs | the peak of the backend's own allocator |
| `"compiled_program"` | XLA on a CPU | the memory of the step, from XLA |
| `"process"` | CPUs | the peak resident memory of the process |

The memory of a process includes the interpreter, all libraries and the data
set.
"""

import contextlib
import pathlib
import sys
from collections.abc import Iterable

import keras
import ml_dtypes  # noqa: F401 -- It adds bfloat16 to NumPy.
import numpy as np

from keras_mixprec.backend import active
from keras_mixprec.backend.common import optimizers_of

try:
    import resource
except ImportError:  # Windows has no `resource`.
    resource = None  # type: ignore[assignment]

_PROC = pathlib.Path("/proc")
# Linux resets the peak memory of a process when this value is written to its
# `clear_refs` file.
_RESET = "5"


def reset_peak() -> bool:
    """Resets the peak to the memory in use now.

    Returns:
        Boolean. `False` if the peak cannot be reset, as on JAX's devices and on
        systems other than Linux. Then measure in a new process.
    """
    memory = active.memory()
    memory.reset_peak()
    if memory.peak_bytes() is not None:
        return keras.backend.backend() != "jax"
    try:
        (_PROC / "self/clear_refs").write_text(_RESET)
    except OSError:
        return False
    return True


def peak_bytes() -> tuple[int | None, str]:
    """Returns the peak since the last reset, and how it was measured.

    Returns:
        Pair of the bytes and `"device"` or `"process"`. With several devices,
        the largest peak counts. The bytes are `None` if the system does not
        report them, as on Windows.
    """
    peak = active.memory().peak_bytes()
    if peak is not None:
        return peak, "device"
    return _peak_of_process(), "process"


def memory_record(model: keras.Model, batch: tuple | None = None) -> dict:
    """Returns the peak memory of training, and its parts.

    Args:
        model: A compiled and built `keras.Model`.
        batch: Tuple of `x`, `y` and, optionally, sample weights, as
            `train_step` takes them. If the devices report no memory and `fit`
            uses XLA, XLA compiles the step for this batch and reports its
            memory. This takes as long as any compilation.

    Returns:
        Dict of `peak_bytes`, an int or `None`; `measured_by`, `"device"`,
        `"compiled_program"` or `"process"`; `weights_bytes`, `slots_bytes`; and
        `activations_bytes`, the rest of the peak: activations, gradients, the
        batch and temporaries. `activations_bytes` is `None` for a process,
        whose memory also holds libraries and data.
    """
    peak, measured_by = peak_bytes()
    compiled = None
    if measured_by == "process" and batch is not None:
        compiled = program_record(model, batch)
    return compiled or _record(model, peak, measured_by)


def program_record(model: keras.Model, batch: tuple) -> dict | None:
    """Returns a `memory_record` of the memory that the compiler reports.

    Args:
        model: A compiled and built `keras.Model`.
        batch: Tuple, as for `memory_record`.

    Returns:
        Dict, or `None` if no compiler reports memory.
    """
    peak = active.memory().program_bytes(model, batch)
    return None if peak is None else _record(model, peak, "compiled_program")


def _record(model, peak, measured_by):
    weights = bytes_of(model.variables)
    # Optimizers create their slots in the first step, so this function must be
    # called after the first step.
    optimizers = optimizers_of(model).values()
    slots = bytes_of(v for o in optimizers for v in o.variables)
    known = peak is not None and measured_by != "process"
    return {
        "peak_bytes": peak,
        "measured_by": measured_by,
        "weights_bytes": weights,
        "slots_bytes": slots,
        "activations_bytes": peak - weights - slots if known else None,
    }


def sizes_in_proc(path: str = "self/status") -> dict[str, int]:
    """Returns the sizes in a file of Linux' `/proc`, in bytes, by name.

    For this process they include `VmHWM`, the peak resident memory, and
    `VmData`, which `RLIMIT_DATA` limits.

    Args:
        path: String, below `/proc`. Defaults to the status of this process.

    Returns:
        Dict of ints. It is empty on other systems.
    """
    found = {}
    with contextlib.suppress(OSError):
        for line in (_PROC / path).read_text().splitlines():
            name, _, value = line.partition(":")
            if value.endswith(" kB"):
                found[name] = int(value.split()[0]) * 1024
    return found


def _peak_of_process():
    peak = sizes_in_proc().get("VmHWM")
    if peak is None and resource is not None:
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        # `ru_maxrss` is in bytes on macOS, and in KiB on other systems.
        peak = used if sys.platform == "darwin" else used * 1024
    return peak


def bytes_of(variables: Iterable[keras.Variable]) -> int:
    """Returns the total bytes of variables, and counts each only once."""
    # A set cannot hold variables, because Keras compares them by value.
    found = {id(v): v for v in variables}.values()
    return sum(int(np.prod(v.shape)) * _size(v) for v in found)


def _size(variable):
    return np.dtype(keras.backend.standardize_dtype(variable.dtype)).itemsize
