"""Undoes everything that a step writes on torch; see `interface.py`."""

import contextlib
import contextvars

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from keras_mixprec.backend.torch.operations import kind_of, tensors_in
from keras_mixprec.keras_internals import stored_value

_DRAWING = contextvars.ContextVar("drawing", default=False)


@contextlib.contextmanager
def undone(model, generators):
    values = [stored_value(variable) for variable in model.trainable_variables]
    writes = _Writes(values, generators)
    try:
        with writes:
            yield
    finally:
        writes.undo()


@contextlib.contextmanager
def telling(stepped):
    kept = []

    def before(optimizer, args, kwargs):
        groups = optimizer.param_groups
        state = {key: dict(own) for key, own in optimizer.state.items()}
        kept.append((optimizer, state, [dict(group) for group in groups]))
        updated = [p for group in groups for p in group["params"]]
        stepped([(p, p.grad) for p in updated if p.grad is not None])

    hook = register_optimizer_step_pre_hook(before)
    try:
        yield
    finally:
        hook.remove()
        for optimizer, state, groups in reversed(kept):
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, own in zip(optimizer.param_groups, groups, strict=True):
                group.clear()
                group.update(own)


class _Writes(TorchDispatchMode):
    """Copies all memory that operations write to, before they write.

    Random draws of this thread do not advance the generators that all threads
    share. Each random operation starts from a state that only this run uses.
    """

    def __init__(self, values, generators):
        super().__init__()
        # Store copies by storage and not by tensor, because views of a tensor
        # share its storage. Storages that are created inside the context need
        # no copy.
        self._before = {}
        self._born = set()
        self._gradients = {id(value): (value, value.grad) for value in values}
        self._generators = generators

    def undo(self):
        for storage, value in self._before.values():
            storage.copy_(value)
        for leaf, gradient in self._gradients.values():
            leaf.grad = gradient

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        kind = kind_of(func)
        for tensor in kind.written(args, kwargs):
            self._keep(tensor)
        for value in args:
            if isinstance(value, torch.Tensor) and value.requires_grad:
                self._keep_gradient(value)
        if kind.draws:
            with self._own_state(args, kwargs):
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        if kind.makes:
            for tensor in filter(_has_storage, tensors_in(result)):
                self._born.add(tensor.untyped_storage()._cdata)
        return result

    def _keep(self, tensor):
        if _has_storage(tensor):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._born and key not in self._before:
                self._before[key] = storage, storage.clone()

    def _keep_gradient(self, tensor):
        if tensor.is_leaf and id(tensor) not in self._gradients:
            self._gradients[id(tensor)] = tensor, tensor.grad

    @contextlib.contextmanager
    def _own_state(self, args, kwargs):
        # Leave alone any generator that the caller passes to the operation. If
        # contexts are nested, only the innermost one replaces the random state.
        if kwargs.get("generator") is not None or _DRAWING.get():
            yield
            return
        found = [x for x in args if isinstance(x, torch.Tensor)]
        device = torch.device(kwargs.get("device") or "cpu")
        device = found[0].device if found else device
        get, put = _state_of(device)
        before = get()
        put(self._generators.get(device.type, before))
        token = _DRAWING.set(True)
        try:
            yield
        finally:
            _DRAWING.reset(token)
            self._generators[device.type] = get()
            put(before)


def _has_storage(tensor):
    return tensor.layout == torch.strided and tensor.device.type != "meta"


def _state_of(device):
    if device.type == "cpu":
        return torch.get_rng_state, torch.set_rng_state
    module = getattr(torch, device.type)
    return module.get_rng_state, module.set_rng_state
