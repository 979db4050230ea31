"""What the code of a user's own `train_step` calls, read without running it."""

import inspect
import types

import keras

_SCALES = ("scale_loss", "stateless_scale_loss", "get_scaled_loss")
_APPLIES = ("apply", "apply_gradients", "stateless_apply", "minimize")
_CLIPS = ("clip_by_norm", "clip_by_global_norm", "clip_grad_norm_")
_UNSCALES = ("unscale", "get_unscaled_gradients", "unscale_")


def applies_unscaled(model_class: type[keras.Model]) -> bool:
    """Whether `train_step` updates weights and scales no loss on the way.

    `False` where what it calls cannot be seen to apply gradients.

    Args:
        model_class: Class with a `train_step` of its own.
    """
    names = names_reached(model_class)
    return not names.intersection(_SCALES) and bool(
        names.intersection(_APPLIES)
    )


def clips_scaled(model_class: type[keras.Model]) -> str | None:
    """Returns the function by which `train_step` clips scaled gradients.

    Args:
        model_class: Class with a `train_step` of its own.
    """
    names = names_reached(model_class)
    if names.intersection(_UNSCALES):
        return None
    return next((name for name in _CLIPS if name in names), None)


def names_reached(model_class: type[keras.Model]) -> set[str]:
    """Returns all names in the code of `train_step` and of what it calls.

    Methods of the class and functions of its module are followed.

    Args:
        model_class: Class with a `train_step` of its own.
    """
    names, seen = set(), set()
    waiting = [_code_of(model_class.train_step)]
    while waiting:
        code, scope = waiting.pop()
        if code is None or code in seen:
            continue
        seen.add(code)
        names.update(code.co_names)
        inner = [x for x in code.co_consts if isinstance(x, types.CodeType)]
        waiting += [(x, scope) for x in inner]
        waiting += [
            _code_of(found)
            for name in code.co_names
            for found in _meant_by(name, model_class, scope, code)
        ]
    return names


def _meant_by(name, model_class, scope, code):
    """The functions that a name in some code may stand for."""
    known = scope.get(name)
    # A table of functions, such as one for each backend.
    yield from known.values() if isinstance(known, dict) else [known]
    if name != "train_step":
        yield getattr(model_class, name, None)
    elif "super" in code.co_names:
        # Every one above may be the one that is meant.
        for above in model_class.__mro__[1:]:
            yield vars(above).get(name)


def _code_of(function):
    """Code and globals of a function, of what a decorator wraps too."""
    function = getattr(function, "python_function", function)
    function = getattr(function, "__func__", function)
    if not callable(function):
        return None, {}
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    return code, getattr(function, "__globals__", {})
