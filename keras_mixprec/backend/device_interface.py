"""What a backend must define of its devices, as `interface.py` has the rest."""

from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol


class Device(NamedTuple):
    """What a backend reports of one of its devices.

    Attributes:
        name: String, such as `"NVIDIA H100 80GB HBM3"`.
        capability: Tuple of two ints, a CUDA device's compute capability.
        architecture: String, what an AMD GPU has in its place: `"gfx90a"`.
        memory: Int, bytes.
    """

    name: str
    capability: tuple[int, int] | None = None
    architecture: str = ""
    memory: int | None = None


class Devices(Protocol):
    """What the active backend computes on."""

    def query(self) -> tuple[str, list[Device]]:
        """Returns the kind of the default devices, and the devices.

        The kind is `"cpu"`, `"cuda"`, `"rocm"`, `"tpu"`, `"mps"` or what else
        the backend calls it. No device is initialized that was not before, but
        by JAX.
        """


class Memory(Protocol):
    """What training takes of the devices' memory, as the backend counts it."""

    def reset_peak(self):
        """Lets the peaks of the devices start over from what is in use now.

        Does nothing where they keep none. JAX cannot: its peaks are those
        since the process started.
        """

    def peak_bytes(self) -> int | None:
        """Returns the largest number of bytes that was in use on one device.

        On that which has used the most. `None` where the devices keep no
        statistics, as CPUs do.
        """

    def program_bytes(self, model, batch) -> int | None:
        """Returns what a train step takes at its peak, without running it.

        Variables, batch, activations and all: what the compiled program of one
        device says of itself. `None` where `fit` runs no such program, or it
        says nothing. The model is built and compiled, the batch a tuple of
        structures of arrays; of these only shapes and dtypes are read.
        """


class Precision(Protocol):
    """What float32 matrix products and convolutions are computed in.

    By the names of `policies/matmul_precision.py`; `kind` is what
    `Devices.query` returns.
    """

    def put(self, name, kind):
        """Sets it, until it is set to something else."""

    def scope(self, name, kind) -> AbstractContextManager:
        """Context in which it is set; what was set before is afterwards."""

    def local_scope(self, name) -> AbstractContextManager:
        """As `scope`, for what is traced and computed within alone.

        `"float32"` or `"tf32"`. Cheap: models compiled before stay as they are.
        """

    def read(self, kind) -> tuple[str, str]:
        """Returns what products, and convolutions, were set to.

        `"default"` if that is left to the backend.
        """

    def names_of_cpu(self) -> tuple[str, ...]:
        """Returns what this CPU has beside float32."""
