"""What a backend must define: a Protocol for each of its modules.

A folder `backend/<name>/` has a module for each Protocol here and in
`device_interface.py`, named like it in lower case. `active.py` finds those of
the backend that Keras uses. Only these folders import TensorFlow, JAX or torch.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol


class Step(Protocol):
    """What an optimizer step that may be skipped needs."""

    def gradient_norms(self, gradients):
        """Returns float32 `(n,)`, the 2-norm of every gradient in one pass.

        Finite exactly when the norm is below float32's maximum, so that large
        finite gradients raise no false alarm.
        """

    def largest_norms(self, gradients):
        """Returns a list of the norm up to which each gradient is finite.

        Rows of a sparse one may repeat, and are added up.
        """

    def gradient_maxima(self, gradients):
        """Returns float32 `(n,)`, the largest magnitude of each gradient.

        That of an element, or what repeated rows of a sparse gradient could
        add up to.
        """

    def nonfinite_kinds(self, gradients, skipped):
        """Returns float32 `(n, 3)` of zeros and ones.

        1 where a gradient holds positive infinities, negative ones, or NaN; 0
        elsewhere and where `skipped`, `True` or a tensor, is false. Computed in
        skipped steps only.
        """

    def is_sparse(self, gradient):
        """Whether it holds rows that may repeat."""

    def replica(self):
        """Returns which replica of a strategy runs this code.

        `None` outside of replicas, and where there is only one.
        """

    def trace(self, tensors):
        """Returns the outermost trace that any of the tensors belongs to.

        `None` if all have values now.
        """

    def are_of_one_trace(self, one, other):
        """Whether two tensors belong to the same trace."""

    def sum_over_replicas(self, tensor):
        """Returns the sum over the replicas of a strategy."""

    def to_host_bool(self, finite):
        """Returns a Python bool where that is free, else the tensor as it is.

        It is where the backend runs eagerly and reads it at no cost in
        compilation.
        """

    def known_finite(self, tensor):
        """Returns `True` if all is finite and knowing so waits for nothing.

        As on a CPU outside of compiled functions; `False` if it is not finite
        or that is not known.
        """

    def unscale(self, gradients, inverse, keep, variables=()):
        """Returns gradients times `inverse`.

        In float32 or, where they are float64, in that; those that `keep` marks,
        and `None`, stay as they are. torch writes in place where a gradient is
        the `.grad` of one of `variables`, as `torch.amp.GradScaler` does: a
        copy costs 15% of a step of large layers.
        """

    def commit(self, optimizer, finite, unscaled, variables, record, remember):
        """Applies the inner optimizer to what `unscaled()` returns if `finite`.

        Else calls `remember(True)`, or where there is no branch for it
        `remember(skipped)` with a tensor in every step. Then calls `record()`,
        whatever the case. Unscaling next to the update that reads the gradients
        saves 10% of the update of large layers.
        """

    def outside_graph(self) -> AbstractContextManager:
        """Context in which assignments happen now, even in a traced step."""

    def read(self, variable):
        """Returns the variable's value as a NumPy array."""

    def read_sum(self, variable):
        """Returns the sum of what each replica counts for itself.

        Over those of this process, as a NumPy array.
        """

    def value(self, variable):
        """Returns the variable's value as a tensor, on one replica."""


class Replay(Protocol):
    """Running parts of a model again."""

    # What a step raises if its dtypes do not mix, or have no such operation. An
    # error of another type is a defect, of the model's code or of ours.
    REFUSALS: tuple[type[Exception], ...]

    def is_concrete(self, tensor):
        """Whether it has a value now, rather than when a function runs."""

    def observe(self, tensor, on_value, on_cotangent):
        """Returns the tensor unchanged, and calls the listeners.

        `on_value(tensor)` now, and `on_cotangent(gradient)` if a backward pass
        comes by, which goes on with what that returns in place of the gradient,
        if it is not `None`.
        """

    def stop_gradient(self, tensor):
        """Returns the value alone, without what it was computed from."""

    def vjp(self, function, primals, pull):
        """Returns `function(primals)` and the gradients at `primals`.

        Those of the outputs, float tensors, for the cotangents `pull(outputs)`;
        zeros where there is none.
        """

    def compiled(self, function):
        """Returns the function, compiled by XLA where there is one."""

    def each_operation(self, function, tensors, visit):
        """Runs `function(tensors)` and calls `visit` with every operation.

        `visit(inputs, outputs)` gets the tensors of every single one.
        """

    def line_of_operation(self):
        """Returns the user's line that runs what is visited, as `line_of`."""

    def name_of_operation(self):
        """Returns what the backend calls the operation that is visited."""

    def train_step(self, model, data):
        """Runs one step of `model.train_step` operation by operation.

        Returns its logs.
        """

    def take_step(self, model, data, traced):
        """Lets the model take a step for good, operation by operation.

        Variables that the step reads from elsewhere than from the state that it
        is given have the values of the pairs `traced`, those of its trace.

        Returns:
            Its logs, and a list of pairs of variables and the values that the
            step gives them, unless it has written these itself.
        """

    def predict_step(self, model, data):
        """Runs `model.predict_step` on a batch, operation by operation.

        Returns the outputs. Within a `keras.StatelessScope`.
        """

    def step_by_step(self) -> AbstractContextManager:
        """Context in which nothing is compiled, and loops run in Python.

        Functions that are compiled already run as they are written.
        """

    def loses_assignment(self, variable):
        """Whether what is assigned to it now is lost in `fit`."""

    def assigned(self, variable, value) -> Callable | None:
        """Gives a trained variable a value in the midst of a step.

        Returns:
            Function that puts the value of before back; `None` if a scope of
            Keras has to keep the new one, and nothing was assigned.
        """

    def evaluating(self, model) -> AbstractContextManager:
        """Context in which a model can be evaluated in the midst of `fit`.

        Nothing that the backend itself keeps of it is changed: the mode of
        modules, where `fit` is, random numbers; nor is a variable without its
        value if an exception ends the context.
        """

    def run_once(self, model, function, data):
        """Returns `function(data)`, a list of tensors, run a few times only.

        In the way that costs least then: operation by operation, or on JAX,
        where each operation is compiled by itself, traced and compiled from
        layer to layer. `None` in place of a tensor from inside a loop or a
        traced function, whose value is not known outside.
        """


class Undo(Protocol):
    """Undoing what a step writes, wherever that is held."""

    def undone(self, model, generators) -> AbstractContextManager:
        """Context after which memory has the values that it had before.

        Every tensor and every variable of the backend that is written to in
        this thread, whoever holds it, as an optimizer of the backend's own or
        a teacher. Numbers that are drawn in it are drawn once more afterwards;
        those in it go on from the state that the dict `generators` has.
        """

    def telling(self, stepped) -> AbstractContextManager:
        """Context in which `stepped(pairs)` is called as an optimizer steps.

        One of the backend itself, about to update each parameter of the pairs
        by the gradient beside it; what it then keeps in Python is undone.
        """


class Batches(Protocol):
    """The batches of a running `fit`."""

    def tapped(self, model, train_function, visit, raised=None):
        """Returns a function to be called in place of `train_function`.

        It calls `visit(batch)` with the next batch, while the model's variables
        have their values, and then trains on it as usual, with the values that
        `visit` left them with. The batch is what this process trains on, of all
        its replicas; `None` if it has no data left but other processes may
        have.

        If `train_function` raises, as where XLA refuses to compile it,
        `raised(error)` is called, while variables have their values as well,
        and if that returns true the same batch is trained on once more. Not on
        torch, where any step may raise: see `TrainFunction`.
        """

    def synchronized(self, model, variables) -> AbstractContextManager:
        """Context within which variables have the last step's values.

        Only to be read: on JAX, where `callback.model` brings all variables up
        to date and then costs two steps of a small model, they go back to what
        they were.
        """


class Processes(Protocol):
    """Processes that train one model together."""

    def workers(self, model) -> int:
        """Returns how many processes train the model together.

        The replicas of one process, which is one program, have nothing to agree
        on.
        """

    def rank(self, model) -> int:
        """Which of those processes this one is, from 0."""

    def is_chief(self, model) -> bool:
        """Whether this process is the one that writes files."""

    def agree(self, model, values):
        """Returns the elementwise maximum over those processes.

        Of a float32 array; `values` itself if there is but one. Every process
        must call it, with arrays of one shape.
        """

    def single_process(self, model) -> AbstractContextManager:
        """Context in which this process runs the model by itself.

        The model's variables hold plain values of one replica, and no operation
        waits for another process: a diagnosis takes as many steps as its data
        need, on each worker another number.
        """


class Runtime(Protocol):
    """Versions, and running a function as `fit` does, to time it."""

    # How `fit` may run a step, what it does by default first: `"XLA"`,
    # `"graph"` (compiled, operation by operation) or `"eager"`.
    MODES: tuple[str, ...]

    def versions(self) -> dict[str, str]:
        """Returns the versions of the backend and of what it was built for.

        By name: the backend's own, and as far as known `"cuda"`, `"cudnn"`,
        `"rocm"`, and `"built for"`, the architectures that it has kernels for.
        """

    def compiled(self, function, mode):
        """Returns a function of tensors, to run in one of `MODES`."""

    def wait(self, tensors):
        """Waits until the tensors are computed."""

    def random_state(self):
        """Returns the state of the random numbers of the whole process."""

    def set_random_state(self, state):
        """Sets it to what `random_state` returned."""
