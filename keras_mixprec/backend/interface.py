"""Protocols: each backend defines one module for each of them.

A folder `backend/<name>/` has a module for each Protocol here and in
`device_interface.py`, with the Protocol's name in lower case. `active.py` finds
the modules of the backend that Keras uses. Only these folders import
TensorFlow, JAX or torch.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol


class Step(Protocol):
    """An optimizer step that may be skipped."""

    def gradient_norms(self, gradients):
        """Returns float32 `(n,)`, the 2-norm of every gradient in one pass.

        Finite exactly when the norm is below float32's maximum, so that large
        finite gradients raise no false alarm. Rows of a sparse gradient that
        repeat are not added up.
        """

    def gradient_maxima(self, gradients):
        """Returns float32 `(n,)`, the largest magnitude of each gradient.

        For a sparse gradient it is the largest sum that rows could have if
        they all repeated one index.
        """

    def nonfinite_kinds(self, gradients, skipped):
        """Returns float32 `(n, 3)` of zeros and ones.

        The columns tell whether a gradient holds inf, -inf or NaN. All are 0 if
        `skipped`, `True` or a tensor, is false. They are computed in skipped
        steps only.
        """

    def is_sparse(self, gradient):
        """Returns whether the gradient holds rows that may repeat."""

    def replica(self):
        """Returns the number of the replica that runs this code.

        `None` outside of replicas, and for a single replica.
        """

    def trace(self, tensors):
        """Returns the outermost trace that any of the tensors belongs to.

        `None` if all tensors have values now.
        """

    def are_of_one_trace(self, one, other):
        """Returns whether two tensors belong to the same trace."""

    def sum_over_replicas(self, tensor):
        """Returns the sum over the replicas of a strategy."""

    def to_host_bool(self, finite):
        """Returns a Python bool if it costs nothing, else the tensor as it is.

        It costs nothing while the backend runs eagerly.
        """

    def choose(self, condition, if_true, if_false):
        """Returns the result of one of two functions that write nothing.

        A step runs only one of them if the backend can branch.
        """

    def unscale(self, gradients, inverse, keep, variables=()):
        """Returns gradients times `inverse`.

        The results are float32, or float64 for float64 gradients. Gradients
        that `keep` marks, and `None`, do not change. torch writes in place if a
        gradient is the `.grad` of one of `variables`, as
        `torch.amp.GradScaler` does. A copy would cost 15% of a step of large
        layers.
        """

    def commit(self, optimizer, finite, unscaled, variables, record, remember):
        """If `finite`, applies the inner optimizer to `unscaled()` gradients.

        If not `finite`, it calls `remember(True)`. A step that cannot branch
        always calls `remember(skipped)` with a tensor. In both cases it calls
        `record()` at the end. `unscaled` is a function because it is 10% of the
        update of large layers faster to unscale next to the update.
        """

    def outside_graph(self) -> AbstractContextManager:
        """Returns a context that assigns at once, even in a traced step."""

    def read(self, variable):
        """Returns the variable's value as a NumPy array."""

    def read_sum(self, variable):
        """Returns the sum of the variable's values on all replicas.

        It is the sum over the replicas of this process, as a NumPy array.
        """

    def value(self, variable):
        """Returns the variable's value as a tensor, on one replica."""


class Replay(Protocol):
    """Running parts of a model again."""

    # A step raises these errors if an operation does not support its dtypes or
    # their mix. An error of another type is a defect in the model's code or in
    # this package.
    REFUSALS: tuple[type[Exception], ...]

    def is_concrete(self, tensor):
        """Returns whether the tensor has a value now, outside of any trace."""

    def observe(self, tensor, on_value, on_cotangent):
        """Returns the tensor unchanged, and calls the listeners.

        It calls `on_value(tensor)` now, and `on_cotangent(gradient)` in a
        backward pass. The pass goes on with the result of `on_cotangent`, or
        with the gradient if the result is `None`.
        """

    def vjp(self, function, primals, pull):
        """Returns `function(primals)` and the gradients at `primals`.

        The outputs are float tensors, their cotangents `pull(outputs)`. A
        gradient is zeros where the outputs do not depend on a primal.
        """

    def compiled(self, function):
        """Returns the function, compiled by XLA if the backend has it."""

    def each_operation(self, function, tensors, visit):
        """Runs `function(tensors)` and calls `visit` after every operation.

        `visit(inputs, outputs)` gets the tensors of this operation.
        """

    def visited(self):
        """Returns the name and the line of the operation that is visited.

        The name is the backend's, the line is as from `line_of`.
        """

    def train_step(self, model, data):
        """Runs one step of `model.train_step` operation by operation.

        Returns its logs.
        """

    def take_step(self, model, data, traced):
        """Takes a step that is not undone, operation by operation.

        Some variables may not be read from the state that the step gets. They
        have the values of their trace, in the pairs `traced`.

        Returns:
            The step's logs, and a list of pairs of a variable and its new
            value, unless the step has written the values itself.
        """

    def predict_step(self, model, data):
        """Runs `model.predict_step` on a batch, operation by operation.

        Returns the outputs. Within a `keras.StatelessScope`.
        """

    def step_by_step(self) -> AbstractContextManager:
        """Returns a context that compiles nothing, and runs loops in Python.

        Within it, functions that are already compiled also run as Python code.
        """

    def loses_assignment(self, variable):
        """Returns whether `fit` would lose a value that is assigned now."""

    def assigned(self, variable, value) -> Callable | None:
        """Gives a trained variable a value in the midst of a step.

        Returns:
            Function that puts the old value back. `None` if nothing was
            assigned, because a scope of Keras has to keep the new value.
        """

    def evaluating(self, model) -> AbstractContextManager:
        """Returns a context in which a model is evaluated during `fit`.

        The context restores the backend's own state of the model: the mode of
        modules, the place in `fit`, random numbers. It restores the values of
        variables even if an exception ends it.
        """

    def run_once(self, model, function, data):
        """Returns the list of tensors `function(data)`, in the cheapest way.

        This is the way for a function that runs only a few times: operation by
        operation. JAX would compile each operation, so there the function is
        traced and compiled from layer to layer. A tensor from inside a loop or
        a traced function has no value outside, and is `None`.
        """


class Undo(Protocol):
    """Undoing all writes of a step, to whatever memory."""

    def undone(self, model, generators) -> AbstractContextManager:
        """Returns a context that restores memory at its end.

        It restores every tensor and variable that this thread writes to, also
        in an optimizer of the backend or in a teacher model. Random draws
        within the context continue from the state in the dict `generators`.
        Draws after it continue as if there had been none within.
        """

    def telling(self, stepped) -> AbstractContextManager:
        """Returns a context that calls `stepped(pairs)` before an update.

        It does so for optimizers of the backend. Each pair is a parameter and
        the gradient to update it by. The context restores the state that the
        optimizer keeps in Python.
        """


class Batches(Protocol):
    """The batches of a running `fit`."""

    def tapped(self, model, train_function, visit, raised=None):
        """Returns a function to be called in place of `train_function`.

        It calls `visit(batch)` with the next batch, while the model's variables
        have their values. Then it trains on the batch as usual, from the values
        that `visit` has left. The batch is for all replicas of this process. It
        is `None` if this process has no data left, but other processes may.

        If `train_function` raises, for example because XLA refuses to compile
        it, the function calls `raised(error)` while variables have their
        values. If `raised` returns true, it trains on the same batch once more.
        torch leaves this to `TrainFunction`, because any step may raise there.
        """

    def synchronized(self, model, variables) -> AbstractContextManager:
        """Returns a context that gives variables the last step's values.

        The variables may only be read. JAX restores their earlier values,
        because it costs two steps of a small model to bring all variables up to
        date, as `callback.model` does.
        """


class Processes(Protocol):
    """Processes that train one model together."""

    def workers(self, model) -> int:
        """Returns how many processes train the model together.

        The replicas of one process count once: they are one program.
        """

    def rank(self, model) -> int:
        """Returns which of those processes this is; 0 writes files."""

    def agree(self, model, values):
        """Returns the elementwise maximum of the processes' float32 arrays.

        There must be several processes. Each must call this, with an array of
        the same shape.
        """

    def single_process(self, model) -> AbstractContextManager:
        """Returns a context in which this process runs the model alone.

        The model's variables hold plain values of one replica, and no operation
        waits for another process. A diagnosis needs this, because it takes a
        different number of steps on each worker.
        """


class Runtime(Protocol):
    """Versions, and running a function as `fit` does, to time it."""

    # The ways in which `fit` may run a step, the default first: `"XLA"`,
    # `"graph"` (a graph without XLA) or `"eager"`.
    MODES: tuple[str, ...]

    def versions(self) -> dict[str, str]:
        """Returns a dict of the versions of the backend and its libraries.

        The keys are the backend's own name and, if known, `"cuda"`, `"cudnn"`,
        `"rocm"` and `"built for"`, the architectures with kernels.
        """

    def compiled(self, function, mode):
        """Returns a function of tensors as it runs in one of `MODES`."""

    def wait(self, tensors):
        """Waits until the tensors are computed."""

    def random_state(self):
        """Returns the state of the process's random numbers."""

    def set_random_state(self, state):
        """Sets the state that `random_state` returned."""
