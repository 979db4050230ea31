"""`save_weights`: a checkpoint whose weights are in 16 bits."""

import os
import tempfile
from pathlib import Path

import keras
import numpy as np

from keras_mixprec._checks import check_choice
from keras_mixprec._files import check_regular
from keras_mixprec.formats import SIXTEEN_BITS, get_format
from keras_mixprec.policies.layers import check_model

# The name of the HDF5 group with the optimizer's state. The state keeps its
# dtype, because its second moments would underflow in float16.
_OPTIMIZER = "optimizer"


def save_weights(
    model: keras.Model, path: str | os.PathLike, dtype: str = "float16"
) -> None:
    """Saves the weights of a model in 16 bits, at half the size.

    `model.load_weights(path)` reads the file without this package, into a model
    of any dtype. Integers and the optimizer's state keep their dtypes. The
    model does not change.

    Args:
        model: A built `keras.Model`.
        path: String or path-like, which ends in `.weights.h5`. An existing file
            is replaced atomically.
        dtype: `"float16"` or `"bfloat16"`. Defaults to `"float16"`.

    Raises:
        TypeError: If `model` is not a `keras.Model`.
        ValueError: If `dtype` or `path` is wrong, or a weight is larger than
            the largest number of the dtype.
        OSError: If the file cannot be written.

    Example:
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = f"{folder}/small.weights.h5"
    ...     save_weights(model, path, dtype="bfloat16")
    ...     model.load_weights(path)
    """
    check_model(model)
    check_choice("dtype", dtype, SIXTEEN_BITS)
    target = Path(path)
    if not target.name.endswith(".weights.h5"):
        raise ValueError(
            f"`path` must end in '.weights.h5'. Received: path={str(path)!r}"
        )
    check_regular(target)
    # Write into a folder next to `path`, because a rename is atomic only within
    # one file system.
    with tempfile.TemporaryDirectory(dir=target.absolute().parent) as folder:
        wide, narrow = Path(folder, "wide.weights.h5"), Path(folder, "narrow")
        model.save_weights(wide)
        _rewrite(wide, narrow, dtype)
        os.replace(narrow, target)


def _rewrite(source, target, dtype):
    import h5py  # Keras also writes weight files with h5py.

    with h5py.File(source, "r") as wide, h5py.File(target, "w") as narrow:

        def copy(name, item):
            is_array = isinstance(item, h5py.Dataset)
            if not is_array:
                made = narrow.require_group(name)
            elif item.dtype.kind != "f" or name.startswith(_OPTIMIZER):
                made = narrow.create_dataset(name, data=item[()])
            else:
                made = narrow.create_dataset(
                    name, data=_cast(name, item[()], dtype)
                )
                if dtype == "bfloat16":
                    made.attrs["dtype"] = dtype
            made.attrs.update(item.attrs)

        narrow.attrs.update(wide.attrs)
        wide.visititems(copy)


def _cast(name, array, dtype):
    finite = np.abs(array[np.isfinite(array)])
    largest = float(finite.max(initial=0.0))
    maximum = get_format(dtype).maximum
    if largest > maximum:
        raise ValueError(
            f"A weight in {name!r} is above {dtype}'s largest number, "
            f"{maximum:g}. Use another dtype. Received: {largest:g}"
        )
    return array.astype(dtype)
