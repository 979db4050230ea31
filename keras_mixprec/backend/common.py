"""Code for all backends: variables, errors, sharing among workers."""

import contextlib
import json
import re

import keras
import numpy as np

from keras_mixprec.backend import active


def optimizers_of(model: keras.Model) -> dict:
    """Returns the optimizers of a model, by the name of the attribute.

    An optimizer with several names appears once, as `"optimizer"` or by its
    first name.
    """
    found = {
        name: value
        for name, value in vars(model).items()
        if isinstance(value, keras.optimizers.Optimizer)
    }
    names = sorted(found, key=lambda name: name != "optimizer")
    first = {id(found[name]): name for name in reversed(names)}
    return {name: o for name, o in found.items() if first[id(o)] == name}


def all_variables(model: keras.Model) -> list:
    """Returns every variable of a model, its metrics and its optimizers."""
    found = [*model.variables, *model.metrics_variables]
    for optimizer in optimizers_of(model).values():
        found += optimizer.variables
    # Remove duplicates by id. Keras compares variables by value, so a set
    # cannot hold variables.
    return list({id(variable): variable for variable in found}.values())


def variable_scope(model):
    """Returns the scope in which variables for `model` must be created.

    Under a TensorFlow strategy, this is the strategy's scope. All replicas
    would share a variable that is created outside of that scope.
    """
    strategy = getattr(model, "distribute_strategy", None)
    return strategy.scope() if strategy else contextlib.nullcontext()


def build_optimizer(model: keras.Model):
    """Builds the optimizer of a compiled model, as its first step would."""
    optimizer = model.optimizer
    if optimizer is not None and not optimizer.built:
        with variable_scope(model):
            optimizer.build(model.trainable_variables)


class OutOfMemoryError(MemoryError):
    """A diagnosis ran out of memory, so no layer is to blame."""


# Words in the errors that backends, CUDA's libraries and C++ raise when memory
# runs out. Few out-of-memory errors have their own type, and Keras raises some
# again as a `RuntimeError`.
_EXHAUSTED = re.compile(
    "out.?of.?memory|memoryerror|resource.?exhausted|oom when allocating"
    "|failed to allocate|can't allocate memory|status_alloc_failed|bad_alloc"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error or one of its causes reports lack of memory."""
    seen: BaseException | None = error
    while seen is not None:
        if _EXHAUSTED.search(f"{type(seen).__name__}: {seen}".lower()):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


@contextlib.contextmanager
def naming_exhaustion():
    """Context that turns out-of-memory errors into `OutOfMemoryError`.

    `OutOfMemoryError` is not one of the backend's `REFUSALS`, so callers do not
    mistake it for an error about dtypes.

    Raises:
        OutOfMemoryError: If memory runs out inside the context.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(
            "The diagnosis ran out of memory, so no layer has a verdict. Pass "
            "a smaller batch, or free memory on the device. Received: "
            f"{type(error).__name__}: {error}"
        ) from error


def shape_in_fit(array) -> tuple:
    """Returns an array's shape and the dtype to which `fit` casts it."""
    dtype = keras.backend.standardize_dtype(array.dtype)
    is_float = "float" in dtype
    return array.shape, keras.config.floatx() if is_float else dtype


def any_worker(model: keras.Model, numbers: list) -> list:
    """Returns the maximum of each number over all workers.

    Every worker must call this function.

    Args:
        model: The model that the workers train together.
        numbers: List of numbers, or booleans. Each is sent as float32.
    """
    values, processes = np.array(numbers, "float32"), active.processes()
    if processes.workers(model) > 1:
        values = processes.agree(model, values)
    return values.tolist()


def of_all_workers(model: keras.Model, content) -> list:
    """Returns the content of each worker, in the order of the workers.

    Every worker must call this function.

    Args:
        model: The model that the workers train together.
        content: The content of this worker, which JSON can represent.
    """
    processes = active.processes()
    own = np.frombuffer(json.dumps(content, default=float).encode(), np.uint8)
    (longest,) = any_worker(model, [len(own)])
    # Each worker fills its own row of a table and leaves zeros in all other
    # rows. The maximum over all workers is then the whole table.
    table = np.zeros((processes.workers(model), int(longest)))
    table[processes.rank(model), : len(own)] = own
    agreed = any_worker(model, table.ravel().tolist())
    table = np.reshape(agreed, table.shape)
    texts = [bytes(row.astype(np.uint8)).rstrip(b"\0") for row in table]
    return [json.loads(text) for text in texts]
