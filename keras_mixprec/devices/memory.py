"""The peak memory of training, and its parts.

The device decides who measures it, and the measures mean different things:

| `measured_by` | where | what it is |
|---|---|---|
| `"device"` | GPUs, TPUs | the peak of the backend's own allocator |
| `"compiled_program"` | XLA on a CPU | what the compiled step says it needs |
| `"process"` | CPUs | the largest part of the process in main memory |

The third includes the interpreter, all libraries and the data set.
"""

import contextlib
import pathlib
import sys
from collections.abc import Iterable

import keras
import ml_dtypes  # noqa: F401 -- NumPy knows bfloat16 by it.
import numpy as np

from keras_mixprec.backend import active
from keras_mixprec.backend.common import optimizers_of

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_PROC = pathlib.Path("/proc")
# Linux documents that this resets the peak of the process.
_RESET = "5"


def reset_peak() -> bool:
    """Resets the peak to the memory in use now.

    Returns:
        Boolean. `False` if that is impossible: on JAX's devices, and for a
        process if Linux does not allow it. Measure in a new process then.
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
        the one that used the most counts. Bytes are `None` if the system does
        not report them, as on Windows.
    """
    peak = active.memory().peak_bytes()
    if peak is not None:
        return peak, "device"
    return _peak_of_process(), "process"


def memory_record(model: keras.Model, batch: tuple | None = None) -> dict:
    """Returns the peak memory of training, and its parts.

    Args:
        model: A compiled and built `keras.Model`.
        batch: Tuple of `x`, `y` and, if there are any, weights: structures of
            arrays, as `train_step` takes them. If the devices keep no
            statistics and `fit` uses XLA, XLA compiles the step for this batch
            and reports its memory. That takes as long as any compilation.

    Returns:
        Dict of `peak_bytes`, an int or `None`; `measured_by`, `"device"`,
        `"compiled_program"` or `"process"`; `weights_bytes`, `slots_bytes`;
        and `activations_bytes`, the rest of the peak: activations, gradients,
        the batch and temporaries. It is `None` for a process, whose memory
        holds other things too.
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
        Dict. `None` without a compiler that reports it.
    """
    peak = active.memory().program_bytes(model, batch)
    return None if peak is None else _record(model, peak, "compiled_program")


def _record(model, peak, measured_by):
    weights = bytes_of(model.variables)
    # An optimizer creates its slots in the first step.
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
    """Returns the sizes that Linux reports in a file, in bytes, by name.

    For this process they include `VmHWM`, the peak in main memory, and
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
        # macOS counts bytes there, others KiB.
        peak = used if sys.platform == "darwin" else used * 1024
    return peak


def bytes_of(variables: Iterable[keras.Variable]) -> int:
    """Returns the bytes of variables, each counted once."""
    # Keras compares variables by value, so that no set holds them.
    found = {id(v): v for v in variables}.values()
    return sum(int(np.prod(v.shape)) * _size(v) for v in found)


def _size(variable):
    return np.dtype(keras.backend.standardize_dtype(variable.dtype)).itemsize
