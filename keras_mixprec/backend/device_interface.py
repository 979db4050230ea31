"""Protocols for a backend's devices; `interface.py` has the others."""

from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol


class Device(NamedTuple):
    """A device, as a backend reports it.

    Attributes:
        name: String, such as `"NVIDIA H100 80GB HBM3"`.
        capability: Tuple of two ints, a CUDA device's compute capability.
        architecture: String, such as `"gfx90a"`: an AMD GPU has it instead.
        memory: Int, bytes.
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
        name of the backend. Only JAX initializes devices for it.
        """


class Memory(Protocol):
    """The devices' memory that training takes, as the backend counts it."""

    def reset_peak(self):
        """Lets the peaks of the devices start over from what is in use now.

        Does nothing where devices keep no peaks, or on JAX, which cannot: its
        peaks are those since the process started.
        """

    def peak_bytes(self) -> int | None:
        """Returns the largest number of bytes that was in use on one device.

        It is the device that has used the most. `None` where devices keep no
        statistics, as CPUs do.
        """

    def program_bytes(self, model, batch) -> int | None:
        """Returns what a train step takes at its peak, without running it.

        The compiled program of one device reports it: variables, batch,
        activations and temporaries. `None` where `fit` runs no such program,
        or the program reports nothing. The model is built and compiled. The
        batch is a tuple of structures of arrays, of which only shapes and
        dtypes are read.
        """


class Precision(Protocol):
    """The precision of float32 matrix products and convolutions.

    Names are those of `policies/matmul_precision.py`, kinds those of
    `Devices.query`.
    """

    def put(self, name, kind):
        """Sets it, until it is set to something else."""

    def scope(self, name, kind) -> AbstractContextManager:
        """Returns a context that sets it, and restores the earlier one."""

    def local_scope(self, name) -> AbstractContextManager:
        """As `scope`, but only for code that is traced and computed within.

        `"float32"` or `"tf32"`. Cheap: models compiled before stay as they are.
        """

    def read(self, kind) -> tuple[str, str]:
        """Returns the settings of products and of convolutions.

        `"default"` if a setting is left to the backend.
        """

    def names_of_cpu(self) -> tuple[str, ...]:
        """Returns the precisions of this CPU other than float32."""
