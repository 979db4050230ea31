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
        """Returns the 2-norm of every gradient, as float32 `(n,)`.

        A norm is finite if it is below float32's maximum, so large finite
        gradients raise no false alarm. Rows of a sparse gradient with the same
        index are not summed.
        """

    def gradient_maxima(self, gradients):
        """Returns the largest magnitude in each gradient, as float32 `(n,)`.

        For a sparse gradient, this is an upper bound: the largest sum of the
        magnitudes in all rows, as if all rows had the same index.
        """

    def nonfinite_kinds(self, gradients, skipped):
        """Returns the non-finite kinds of each gradient, as float32 `(n, 3)`.

        The columns are 1 if a gradient contains inf, -inf or NaN, otherwise 0.
        `skipped` is `True` or a boolean tensor. If the tensor is false, all
        columns may be 0, because only skipped steps need the kinds.
        """

    def is_sparse(self, gradient):
        """Returns whether the gradient has rows whose indices may repeat."""

    def replica(self):
        """Returns the number of the replica that runs this code.

        Returns `None` outside of replicas, and for a single replica.
        """

    def trace(self, tensors):
        """Returns the outermost trace that any of the tensors belongs to.

        Returns `None` if all tensors have values now.
        """

    def are_of_one_trace(self, one, other):
        """Returns whether two tensors belong to the same trace."""

    def sum_over_replicas(self, tensor):
        """Returns the sum over the replicas of a strategy."""

    def to_host_bool(self, finite):
        """Returns a Python bool in eager mode, otherwise the tensor."""

    def choose(self, condition, if_true, if_false):
        """Returns the result of one of two functions without side effects.

        A backend that can branch runs only one of them.
        """

    def unscale(self, gradients, inverse, keep, variables=()):
        """Returns gradients times `inverse`.

        The results are float32, or float64 for float64 gradients. Gradients
        that are `None` or marked by `keep` do not change. On torch, a gradient
        that is the `.grad` of one of `variables` is unscaled in place, as in
        `torch.amp.GradScaler`. A copy would take 15% of a step of large layers.
        """

    def commit(self, optimizer, finite, unscaled, variables, record, remember):
        """Applies the inner optimizer to `unscaled()` gradients if `finite`.

        Otherwise, `commit` calls `remember(True)`. A step that cannot branch
        always calls `remember(skipped)` with a tensor. In every case, `commit`
        calls `record()` at the end. `unscaled` is a function, because unscaling
        right before the update makes the update of large layers 10% faster.
        """

    def outside_graph(self) -> AbstractContextManager:
        """Returns a context that runs code eagerly, even in a traced step."""

    def read(self, variable):
        """Returns the variable's value as a NumPy array."""

    def read_sum(self, variable):
        """Returns the sum of a variable over the replicas of this process.

        The sum is a NumPy array.
        """

    def value(self, variable):
        """Returns the variable's value on one replica, as a tensor."""


class Replay(Protocol):
    """Runs parts of a model again."""

    # Errors that a step raises if an operation does not support a dtype, or a
    # mix of dtypes. An error of a different type is a defect in the model's
    # code or in keras_mixprec.
    REFUSALS: tuple[type[Exception], ...]

    def is_concrete(self, tensor):
        """Returns whether the tensor has a value now, outside of any trace."""

    def observe(self, tensor, on_value, on_cotangent):
        """Returns the tensor unchanged, and reports its value and gradient.

        `observe` calls `on_value(tensor)` now, and `on_cotangent(gradient)` in
        a backward pass. The backward pass continues with the result of
        `on_cotangent`, or with the gradient if the result is `None`.
        """

    def vjp(self, function, primals, pull):
        """Returns `function(primals)` and the gradients at `primals`.

        The outputs are float tensors, and `pull(outputs)` returns their
        cotangents. A gradient is zero if the outputs do not depend on its
        primal.
        """

    def compiled(self, function):
        """Returns the function, compiled by XLA if the backend uses XLA."""

    def each_operation(self, function, tensors, visit):
        """Runs `function(tensors)` and calls `visit` after every operation.

        `visit(inputs, outputs)` gets the tensors that the operation reads and
        returns.
        """

    def visited(self):
        """Returns the name and source line of the operation being visited.

        The name is the backend's name for the operation. The line comes from
        `line_of`.
        """

    def train_step(self, model, data):
        """Runs one step of `model.train_step` operation by operation.

        Returns its logs.
        """

    def take_step(self, model, data, traced):
        """Runs one step of `model.train_step`, and keeps its effects.

        The step runs operation by operation. `traced` has pairs of a variable
        and a value. The step must see these values if it reads the variables
        directly and not from its state. A compiled step would also see the
        values from the time when it was traced.

        Returns:
            The step's logs, and a list of pairs of a variable and its new
            value, unless the step has written the values itself.
        """

    def predict_step(self, model, data):
        """Runs `model.predict_step` on a batch, operation by operation.

        Returns the outputs. The caller enters a `keras.StatelessScope`.
        """

    def step_by_step(self) -> AbstractContextManager:
        """Returns a context that compiles nothing and runs loops in Python.

        Inside the context, functions that are already compiled also run as
        Python code.
        """

    def loses_assignment(self, variable):
        """Returns whether `fit` would lose a value that is assigned now."""

    def assigned(self, variable, value) -> Callable | None:
        """Assigns a value to a trained variable in the middle of a step.

        Returns:
            Function that restores the old value. `None` if nothing was
            assigned. The caller must then put the new value into a Keras scope.
        """

    def evaluating(self, model) -> AbstractContextManager:
        """Returns a context in which a model is evaluated during `fit`.

        The context restores the backend's own state of the model: the mode of
        modules, the progress of `fit`, and random states. If an exception ends
        the context, the values of variables are restored too.
        """

    def run_once(self, model, function, data):
        """Runs a function in the way that is cheapest for a few runs.

        Returns the list of tensors `function(data)`. The function runs
        operation by operation. JAX would compile each operation, so JAX traces
        the function and compiles it layer by layer. A tensor from inside a loop
        or a traced function has no value outside, so the list has `None` in its
        place.
        """


class Undo(Protocol):
    """Undoes everything that a step writes."""

    def undone(self, model, generators) -> AbstractContextManager:
        """Returns a context that restores all memory at its end.

        The context restores every tensor and variable that this thread writes
        to, such as those of a teacher model or of a backend optimizer. Random
        draws inside the context continue from the state in the dict
        `generators`. Draws after the context continue as if there had been none
        inside the context.
        """

    def telling(self, stepped) -> AbstractContextManager:
        """Returns a context that calls `stepped(pairs)` before an update.

        Only optimizers of the backend itself count, such as `torch.optim.Adam`.
        Each pair is a parameter and its gradient. The context restores the
        state that the optimizer keeps in Python.
        """


class Batches(Protocol):
    """The batches of a running `fit`."""

    def tapped(self, model, train_function, visit, raised=None):
        """Returns a function to call in place of `train_function`.

        The function calls `visit(batch)` with the next batch, while the model's
        variables hold their values. Then the function trains on the batch as
        usual, from the values that `visit` left.

        The batch contains the data for all replicas of this process. The batch
        is `None` if this process has no data left while other processes may
        have some.

        If `train_function` raises, for example because XLA cannot compile it,
        the function calls `raised(error)` while variables hold their values. If
        `raised` returns true, the function trains on the same batch once more.
        On torch, `TrainFunction` handles errors, because any step may raise.
        """

    def synchronized(self, model, variables) -> AbstractContextManager:
        """Returns a context in which variables hold the last step's values.

        The variables may only be read. JAX restores their earlier values at the
        end. Updating all variables, as `callback.model` does, would cost two
        steps of a small model.
        """


class Processes(Protocol):
    """Processes that train one model together."""

    def workers(self, model) -> int:
        """Returns the number of processes that train the model together.

        The replicas of one process count once, because they are one program.
        """

    def rank(self, model) -> int:
        """Returns the number of this process. Process 0 writes files."""

    def agree(self, model, values):
        """Returns the elementwise maximum of the processes' float32 arrays.

        There must be several processes. Each process must call `agree` with an
        array of the same shape.
        """

    def single_process(self, model) -> AbstractContextManager:
        """Returns a context in which this process runs the model alone.

        The model's variables hold plain values of one replica, and no operation
        waits for another process. A diagnosis needs this context, because it
        takes a different number of steps on each worker.
        """


class Runtime(Protocol):
    """Reports versions, and runs functions as `fit` does to time them."""

    # The modes in which `fit` can run a step: `"XLA"`, `"graph"` (a graph
    # without XLA) or `"eager"`. The backend's default mode comes first.
    MODES: tuple[str, ...]

    def versions(self) -> dict[str, str]:
        """Returns a dict of the versions of the backend and its libraries.

        The keys are the backend's own name and, if known, `"cuda"`, `"cudnn"`,
        `"rocm"` and `"built for"`. The last one lists the GPU architectures
        that have kernels.
        """

    def compiled(self, function, mode):
        """Returns a function of tensors that runs in one of `MODES`."""

    def wait(self, tensors):
        """Waits until the tensors are computed."""

    def random_state(self):
        """Returns the state of the process's random number generators."""

    def set_random_state(self, state):
        """Sets the state that `random_state` returned."""
