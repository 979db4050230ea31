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
        finite gradients raise no false alarm.
        """

    def largest_norms(self, gradients):
        """Returns a list of the norm up to which each gradient is finite.

        Rows of a sparse gradient may repeat. They are added up.
        """

    def gradient_maxima(self, gradients):
        """Returns float32 `(n,)`, the largest magnitude of each gradient.

        For a sparse gradient it is the largest sum that repeated rows could
        have.
        """

    def nonfinite_kinds(self, gradients, skipped):
        """Returns float32 `(n, 3)` of zeros and ones.

        1 where a gradient holds positive infinities, negative ones, or NaN. 0
        elsewhere, and where `skipped`, `True` or a tensor, is false. Computed
        in skipped steps only.
        """

    def is_sparse(self, gradient):
        """Returns whether it holds rows that may repeat."""

    def replica(self):
        """Returns which replica of a strategy runs this code.

        `None` outside of replicas, and where there is only one.
        """

    def trace(self, tensors):
        """Returns the outermost trace that any of the tensors belongs to.

        `None` if all have values now.
        """

    def are_of_one_trace(self, one, other):
        """Returns whether two tensors belong to the same trace."""

    def sum_over_replicas(self, tensor):
        """Returns the sum over the replicas of a strategy."""

    def to_host_bool(self, finite):
        """Returns a Python bool where that is free, else the tensor as it is.

        Reading it is free where the backend runs eagerly.
        """

    def choose(self, condition, if_true, if_false):
        """Returns the result of one of two functions that write nothing.

        A step runs only one of them if the backend can branch.
        """

    def unscale(self, gradients, inverse, keep, variables=()):
        """Returns gradients times `inverse`.

        They are float32, or float64 if they were. Gradients that `keep` marks,
        and `None`, are not changed. torch writes in place if a gradient is the
        `.grad` of one of `variables`, as `torch.amp.GradScaler` does: a copy
        costs 15% of a step of large layers.
        """

    def commit(self, optimizer, finite, unscaled, variables, record, remember):
        """Applies the inner optimizer to what `unscaled()` returns if `finite`.

        If not, it calls `remember(True)`. A step that cannot branch calls
        `remember(skipped)` with a tensor, every time. In both cases it calls
        `record()` at the end. Unscaling next to the update that reads the
        gradients saves 10% of the update of large layers.
        """

    def outside_graph(self) -> AbstractContextManager:
        """Returns a context that assigns at once, even in a traced step."""

    def read(self, variable):
        """Returns the variable's value as a NumPy array."""

    def read_sum(self, variable):
        """Returns the sum of what each replica counts for itself.

        It covers the replicas of this process, as a NumPy array.
        """

    def value(self, variable):
        """Returns the variable's value as a tensor, on one replica."""


class Replay(Protocol):
    """Running parts of a model again."""

    # A step raises these if its dtypes do not mix, or lack an operation. An
    # error of another type is a defect in the model's code or in ours.
    REFUSALS: tuple[type[Exception], ...]

    def is_concrete(self, tensor):
        """Returns whether it has a value now, not only when a function runs."""

    def observe(self, tensor, on_value, on_cotangent):
        """Returns the tensor unchanged, and calls the listeners.

        `on_value(tensor)` now, and `on_cotangent(gradient)` in a backward pass.
        The pass goes on with what the latter returns, or with the gradient if
        that is `None`.
        """

    def vjp(self, function, primals, pull):
        """Returns `function(primals)` and the gradients at `primals`.

        The outputs are float tensors, their cotangents `pull(outputs)`. A
        gradient is zeros where the outputs do not depend on a primal.
        """

    def compiled(self, function):
        """Returns the function, compiled by XLA where there is one."""

    def each_operation(self, function, tensors, visit):
        """Runs `function(tensors)` and calls `visit` with every operation.

        `visit(inputs, outputs)` gets the tensors of every single one.
        """

    def line_of_operation(self):
        """Returns the user's line of the visited operation; see `line_of`."""

    def name_of_operation(self):
        """Returns the backend's name for the operation that is visited."""

    def train_step(self, model, data):
        """Runs one step of `model.train_step` operation by operation.

        Returns its logs.
        """

    def take_step(self, model, data, traced):
        """Lets the model take a step for good, operation by operation.

        Some variables may not be read from the state that the step is given.
        They have the values of their trace, the pairs `traced`.

        Returns:
            Its logs, and a list of pairs of variables and the values that the
            step gives them, unless it has written these itself.
        """

    def predict_step(self, model, data):
        """Runs `model.predict_step` on a batch, operation by operation.

        Returns the outputs. Within a `keras.StatelessScope`.
        """

    def step_by_step(self) -> AbstractContextManager:
        """Returns a context that compiles nothing, and runs loops in Python.

        Functions that are compiled already run as they are written.
        """

    def loses_assignment(self, variable):
        """Returns whether `fit` loses a value that is assigned to it now."""

    def assigned(self, variable, value) -> Callable | None:
        """Gives a trained variable a value in the midst of a step.

        Returns:
            Function that puts the value of before back; `None` if a scope of
            Keras has to keep the new one, and nothing was assigned.
        """

    def evaluating(self, model) -> AbstractContextManager:
        """Returns a context to evaluate a model in the midst of `fit`.

        The backend's own state of the model is kept: the mode of modules, the
        place in `fit`, random numbers. Variables have their values even if an
        exception ends the context.
        """

    def run_once(self, model, function, data):
        """Returns `function(data)`, a list of tensors, run a few times only.

        It runs in the cheapest way: operation by operation, or on JAX, which
        compiles each operation, traced and compiled from layer to layer. A
        tensor from inside a loop or a traced function has no value outside, and
        is `None`.
        """


class Undo(Protocol):
    """Undoing what a step writes, wherever that is held."""

    def undone(self, model, generators) -> AbstractContextManager:
        """Returns a context after which memory has its earlier values.

        That holds for every tensor and variable that this thread writes to,
        such as those of an optimizer of the backend or of a teacher. Numbers
        that are drawn within are drawn once more afterwards. Draws within go on
        from the state in the dict `generators`.
        """

    def telling(self, stepped) -> AbstractContextManager:
        """Returns a context that calls `stepped(pairs)` as an optimizer steps.

        The optimizer is one of the backend, about to update each parameter of
        the pairs by its gradient. The state that it then keeps in Python is
        undone.
        """


class Batches(Protocol):
    """The batches of a running `fit`."""

    def tapped(self, model, train_function, visit, raised=None):
        """Returns a function to be called in place of `train_function`.

        It calls `visit(batch)` with the next batch, while the model's variables
        have their values. Then it trains on the batch as usual, from the values
        that `visit` has left. The batch is for all replicas of this process; it
        is `None` if this process has no data left but others may have some.

        If `train_function` raises, for example because XLA refuses to compile
        it, `raised(error)` is called, while variables have their values. If
        that returns true, the same batch is trained on once more. Torch leaves
        this to `TrainFunction`, because any step may raise there.
        """

    def synchronized(self, model, variables) -> AbstractContextManager:
        """Returns a context that gives variables the last step's values.

        Only read them. JAX puts the earlier values back: bringing all variables
        up to date, as `callback.model` does, costs two steps of a small model.
        """


class Processes(Protocol):
    """Processes that train one model together."""

    def workers(self, model) -> int:
        """Returns how many processes train the model together.

        Replicas of one process are one program, and have nothing to agree on.
        """

    def rank(self, model) -> int:
        """Which of those processes this one is, from 0."""

    def is_chief(self, model) -> bool:
        """Returns whether this process writes files."""

    def agree(self, model, values):
        """Returns the elementwise maximum over those processes.

        Of a float32 array. Every process must call it, with arrays of one
        shape, and there must be several.
        """

    def single_process(self, model) -> AbstractContextManager:
        """Returns a context for this process to run the model alone.

        The model's variables hold plain values of one replica, and no operation
        waits for another process. A diagnosis takes a different number of steps
        on each worker.
        """


class Runtime(Protocol):
    """Versions, and running a function as `fit` does, to time it."""

    # The ways in which `fit` may run a step, its default first: `"XLA"`,
    # `"graph"` (compiled, operation by operation) or `"eager"`.
    MODES: tuple[str, ...]

    def versions(self) -> dict[str, str]:
        """Returns the versions of the backend and of what it was built for.

        A dict by name: the backend's own, and if known `"cuda"`, `"cudnn"`,
        `"rocm"`, and `"built for"`, the architectures that it has kernels for.
        """

    def compiled(self, function, mode):
        """Returns a function of tensors, to run in one of `MODES`."""

    def wait(self, tensors):
        """Waits until the tensors are computed."""

    def random_state(self):
        """Returns the state of the random numbers of the whole process."""

    def set_random_state(self, state):
        """Sets the state that `random_state` returned."""
