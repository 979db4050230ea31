"""Protocols for the devices of a backend.

`interface.py` has the other Protocols.
"""

from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol


class Device(NamedTuple):
    """A device, as a backend reports it.

    Attributes:
        name: String, such as `"NVIDIA H100 80GB HBM3"`.
        capability: Tuple of two ints. Compute capability of a CUDA device.
        architecture: String. Architecture of an AMD GPU, such as `"gfx90a"`.
        memory: Int. Memory size in bytes.
    """

    name: str
    capability: tuple[int, int] | None = None
    architecture: str = ""
    memory: int | None = None


class Devices(Protocol):
    """The devices that the active backend computes on."""

    def query(self) -> tuple[str, list[Device]]:
        """Returns the kind of the default devices, and the devices.

        The kind is `"cpu"`, `"cuda"`, `"rocm"`, `"tpu"`, `"mps"` or another
        name of the backend. On TensorFlow, `query` does not initialize the
        devices.
        """


class Memory(Protocol):
    """Reports the device memory that training uses."""

    def reset_peak(self):
        """Resets the peak memory of each device to its current memory.

        Does nothing on devices without peak statistics and on JAX. JAX counts
        peaks from the start of the process.
        """

    def peak_bytes(self) -> int | None:
        """Returns the largest peak memory of all devices, in bytes.

        Returns `None` for devices without statistics, such as CPUs.
        """

    def program_bytes(self, model, batch) -> int | None:
        """Returns the peak memory of a train step without running the step.

        The compiled program of one device reports this number in bytes. The
        number counts variables, batch, activations and temporaries. Returns
        `None` if `fit` runs no compiled program, or the program does not report
        its memory. The model must be built and compiled. The batch is a tuple
        of structures of arrays. Only their shapes and dtypes are read.
        """


class Precision(Protocol):
    """The precision of float32 matrix products and convolutions.

    `policies/matmul_precision.py` defines the names of precisions.
    `Devices.query` lists the kinds of devices.
    """

    def put(self, name, kind):
        """Sets the precision until the next call."""

    def scope(self, name, kind) -> AbstractContextManager:
        """Returns a context that sets the precision and then restores it."""

    def local_scope(self, name) -> AbstractContextManager:
        """Returns a context for code that is traced and run inside it.

        `name` is `"float32"` or `"tf32"`. The context costs less than `scope`,
        because it does not change models that are already compiled.
        """

    def read(self, kind) -> tuple[str, str]:
        """Returns the settings for matrix products and for convolutions.

        `"default"` means that the backend chooses the precision.
        """

    def names_of_cpu(self) -> tuple[str, ...]:
        """Returns the precisions that this CPU supports besides float32."""
