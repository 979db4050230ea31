"""Runs parts of a model again on torch, in dispatch modes.

See `interface.py`.
"""

import contextlib
import functools
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from keras_mixprec.backend.torch.operations import kind_of, tensors_in
from keras_mixprec.backend.user_code import line_of, stack
from keras_mixprec.keras_internals import casts_value, stored_value

# `IndexError` is a refusal, because a 16-bit dtype may round a token id up to a
# number that an embedding does not have.
REFUSALS = (IndexError, RuntimeError, TypeError, ValueError)


def is_concrete(tensor):
    return tensor.device.type != "meta"


def observe(tensor, on_value, on_cotangent):
    value = tensor.detach()
    _CopiesOnWrite.keep(value)
    on_value(value)
    if tensor.requires_grad:
        # Set the hook on a new view of the tensor, so that the hook does not
        # affect other hooks of the tensor.
        tensor = tensor.view_as(tensor)
        tensor.register_hook(on_cotangent)
    return tensor


def vjp(function, primals, pull):
    primals = [p.detach().requires_grad_() for p in primals]
    with torch.enable_grad():
        # A layer may write into its inputs, so pass copies.
        outputs = function([p.clone() for p in primals])
    cotangents = pull(outputs)
    tied = [
        (output, cotangent)
        for output, cotangent in zip(outputs, cotangents, strict=True)
        if output.requires_grad
    ]
    gradients = [torch.zeros_like(p) for p in primals]
    if tied:
        gradients = torch.autograd.grad(
            [output for output, _ in tied],
            primals,
            [cotangent for _, cotangent in tied],
            materialize_grads=True,
        )
    return outputs, list(gradients)


def compiled(function):
    return function


@contextlib.contextmanager
def evaluating(model):
    modes = [(module, module.training) for module in model.modules()]
    devices = []
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        devices = list(range(torch.cuda.device_count()))
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for module, training in modes:
            module.training = training


def each_operation(function, tensors, visit):
    with _Operations(visit), torch.no_grad():
        function(tensors)


def visited():
    # Leave out the frames of dispatch modes, which lie between the user's code
    # and the operation.
    line = line_of(stack(without="__torch_dispatch__"))
    return _Operations.visited, line


def train_step(model, data):
    # A user's `train_step` may accumulate gradients over several steps. Clear
    # the gradients, which `undone` restores later. `model.zero_grad()` would
    # fail on integer variables of the model.
    for variable in model.trainable_variables:
        stored_value(variable).grad = None
    with torch.enable_grad(), _CopiesOnWrite():
        return model.train_step(data)


def take_step(model, data, traced):
    with torch.enable_grad():
        return model.train_step(data), []


def predict_step(model, data):
    with evaluating(model), torch.no_grad(), _CopiesOnWrite():
        model.eval()
        return model.predict_step(data)


def step_by_step():
    # Versions of torch before 2.6 do not have `set_stance`.
    if hasattr(torch.compiler, "set_stance"):
        return torch.compiler.set_stance("force_eager")
    return contextlib.nullcontext()


def loses_assignment(variable):
    # In a layer that casts a variable to float16, Keras 3.15 assigns to the
    # cast copy, so the variable itself does not change.
    return casts_value(variable)


def assigned(variable, value):
    # A value in a `StatelessScope` gets no gradient, so assign to the variable
    # itself.
    if not variable.trainable:
        return None
    held = stored_value(variable)
    before = held.detach().clone()
    _write(held, value)
    return functools.partial(_write, held, before)


def _write(held, value):
    with torch.no_grad():
        held.copy_(torch.as_tensor(value))


def run_once(model, function, data):
    return function(data)


class _CopiesOnWrite(TorchDispatchMode):
    """Copies observed values before code overwrites their memory.

    An observed value shares memory with its tensor. An operation such as `x -=
    mean` would change the observed value too.
    """

    _kept: dict | None = None

    def __init__(self):
        super().__init__()
        self._outer: dict | None = None

    def __enter__(self):
        self._outer, _CopiesOnWrite._kept = self._kept, {}
        return super().__enter__()

    def __exit__(self, *args):
        _CopiesOnWrite._kept = self._outer
        return super().__exit__(*args)

    @classmethod
    def keep(cls, value):
        if cls._kept is not None:
            shared = cls._kept.setdefault(_memory(value), [])
            shared.append(weakref.ref(value))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for tensor in kind_of(func).written(args, kwargs):
            for value in self._kept.pop(_memory(tensor), ()):
                if (value := value()) is not None:
                    value.data = value.clone()
        return func(*args, **kwargs)


def _memory(tensor):
    return tensor.untyped_storage()._cdata


class _Operations(TorchDispatchMode):
    visited = ""

    def __init__(self, visit):
        super().__init__()
        self._visit = visit

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        with torch.utils._python_dispatch._disable_current_modes():
            _Operations.visited = func._schema.name.partition("::")[2]
            self._visit(tensors_in((args, kwargs)), tensors_in(result))
        return result
