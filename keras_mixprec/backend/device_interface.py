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
        """Resets the peaks of the devices to the memory that is in use now.

        Does nothing on devices without peaks and on JAX, which cannot reset
        them: JAX's peaks count from the start of the process.
        """

    def peak_bytes(self) -> int | None:
        """Returns the peak of the device with the largest peak, in bytes.

        `None` for devices without statistics, such as CPUs.
        """

    def program_bytes(self, model, batch) -> int | None:
        """Returns the peak of a train step in bytes, without running the step.

        The compiled program of one device reports this number. It counts
        variables, batch, activations and temporaries. `None` if `fit` runs no
        compiled program, or the program reports nothing. The model is built
        and compiled. The batch is a tuple of structures of arrays. Only their
        shapes and dtypes are read.
        """


class Precision(Protocol):
    """The precision of float32 matrix products and convolutions.

    Names are those of `policies/matmul_precision.py`, kinds those of
    `Devices.query`.
    """

    def put(self, name, kind):
        """Sets the precision until the next call."""

    def scope(self, name, kind) -> AbstractContextManager:
        """Returns a context that sets the precision and then restores it."""

    def local_scope(self, name) -> AbstractContextManager:
        """Returns a context for code that is traced and computed within it.

        `name` is `"float32"` or `"tf32"`. It costs less than `scope`, because
        it does not change models that are already compiled.
        """

    def read(self, kind) -> tuple[str, str]:
        """Returns the settings of products and of convolutions.

        `"default"` stands for a setting that the backend chooses.
        """

    def names_of_cpu(self) -> tuple[str, ...]:
        """Returns the precisions of this CPU other than float32."""
