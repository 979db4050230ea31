"""Rebuilds a model from its config in other dtypes."""

import contextlib
import copy
import functools
import inspect
import itertools
import tempfile
import threading
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from keras_mixprec import keras_internals
from keras_mixprec._console import one_line
from keras_mixprec._patched import patched
from keras_mixprec.formats import SIXTEEN_BITS, format_count
from keras_mixprec.inference.assignment import Assignment, has_policy
from keras_mixprec.policies.layers import every_place, walk_with_model
from keras_mixprec.policies.names import is_16_bit, is_fixed, policy_name

# Orthogonal initializers need a QR decomposition, which some backends lack in
# 16 bits. Zeros work too, because the weights are copied afterwards.
_ORTHOGONAL = ("Orthogonal", "OrthogonalInitializer")
_ZEROS = {
    "module": "keras.initializers",
    "class_name": "Zeros",
    "config": {},
    "registered_name": None,
}


class Rebuilder:
    """Rebuilds a model, with its weights, in any dtypes.

    Layers get their policies when they are created, before they have variables.
    The order of creation identifies them, because no config mentions the layers
    that another layer creates.

    Args:
        model: A built `keras.Model`. It does not change.
        x: One batch of inputs. If the config does not build the new model, the
            model is called on this batch.

    Attributes:
        reference: The model in float32, with its weights.
        entries: List of the reference's `LayerEntry`s, its own entry last.
        origins: Dict from their paths to the `LayerEntry`s of the model.

    Raises:
        ValueError: If the model cannot be rebuilt from its config.
    """

    def __init__(self, model: keras.Model, x: Any):
        self._model = model
        self._x = x
        self._config = _config_of(model)
        made: list[keras.layers.Layer] = []

        def widen(layer):
            made.append(layer)
            _set(layer, "float32")

        self.reference = self._made(widen)
        self.entries = walk_with_model(self.reference)
        paths = {id(entry.layer): entry.path for entry in self.entries}
        self._order = [paths.get(id(layer), "") for layer in made]
        own = {id(e.layer): e for e in walk_with_model(model)}
        # A shared layer may be rebuilt as two layers. Either of the two may be
        # paired with the original.
        self.origins = {
            paths[id(new)]: own[id(old)]
            for old, new in self._pairs(self.reference)
        }

    def build(self, policies: dict[str, str]) -> keras.Model:
        """Returns a new model with the original weights.

        Args:
            policies: Dict of layer path to policy name. All other layers are
                float32.

        Raises:
            ValueError: If the config now gives a different model.
        """
        order = iter(self._order)

        def set_planned(layer):
            _set(layer, policies.get(next(order, ""), "float32"))

        return self._made(set_planned)

    def reloaded(self, model: keras.Model, policy: str) -> keras.Model:
        """Returns the model as Keras would load it, without its weights.

        Args:
            model: The result of `build`.
            policy: Policy name, the global policy when the file is loaded.

        Raises:
            Exception: If Keras cannot load the model. Any kind is possible.
        """
        config = _config_of(model)
        with _global_policy(policy):
            loaded = _deserialized(config, self._model)
        for own, new in zip(*map(every_place, (model, loaded)), strict=True):
            if hasattr(own, "save_assets"):  # Copy vocabularies.
                copy_state(own, new)
        return loaded

    def pairs_of(self, model: keras.Model, other: keras.Model) -> list[tuple]:
        """Returns the path and both layers of each place in two models.

        Args:
            model: The result of `build`.
            other: The result of `reloaded`.
        """
        paths = {
            id(entry.layer): entry.path for entry in walk_with_model(model)
        }
        places = zip(every_place(model), every_place(other), strict=True)
        return [(paths[id(own)], own, new) for own, new in places]

    def _made(self, visit):
        with _global_policy("float32"), _on_creation(visit):
            model = self._revived(self._config)
        for own, new in self._pairs(model):
            copy_state(own, new)
        return model

    def _pairs(self, model):
        """Pairs each layer of the original with its counterpart."""
        places = every_place(self._model), every_place(model)
        pairs = list(itertools.zip_longest(*places))
        for own, new in pairs:
            if type(own) is not type(new):
                raise ValueError(_another_model(self._model, own, new))
        return pairs

    def _revived(self, config):
        try:
            model = self._deserialized_somehow(config)
            if not model.built:
                model(self._x, training=False)
        except Exception as error:  # User code may raise anything.
            raise ValueError(
                f"The model {self._model.name!r} cannot be rebuilt from its "
                "config. `get_config` must return all that `from_config` "
                "needs. Register your functions with Keras, and import modules "
                "inside the functions of `Lambda` layers. "
                f"Received: {one_line(error, 400)}"
            ) from error
        return model

    def _deserialized_somehow(self, config):
        try:
            return _deserialized(config, self._model)
        except TypeError:
            if keras_internals.functional_of(self._model) is not None:
                raise
            # Keras' own `get_config` includes `trainable` and `dtype`, which
            # the `__init__` of most models does not take.
            taken = inspect.signature(type(self._model).__init__).parameters
            own = {k: v for k, v in config["config"].items() if k in taken}
            return type(self._model)(**own)


def copy_state(source: keras.layers.Layer, target: keras.layers.Layer) -> None:
    """Copies the variables and files that a layer would save.

    Args:
        source: A layer. Its sublayers are not copied.
        target: A second layer of the same class.
    """
    store: dict[str, Any] = {}
    source.save_own_variables(store)
    # Copy the values, because `fit` on JAX would later reuse their memory.
    store = {k: np.array(ops.convert_to_numpy(v)) for k, v in store.items()}
    if store:
        target.load_own_variables(store)
    if hasattr(source, "save_assets"):
        with tempfile.TemporaryDirectory() as folder:
            source.save_assets(folder)
            target.load_assets(folder)


def with_float32_outputs(model: keras.Model) -> keras.Model:
    """Returns a model that casts its 16-bit outputs to float32.

    The casts are Keras layers, so a file of the model loads without this
    package.

    Args:
        model: A `keras.Model`, which may be changed. It is returned as it is
            unless it is functional or `Sequential`.
    """
    if type(model) is keras.Sequential and model.outputs:
        if _is_narrow(model.outputs[0]):
            model.add(_cast(model.layers[-1].name))
        return model
    if type(model) is not keras_internals.Functional or not any(
        map(_is_narrow, model.outputs)
    ):
        return model
    names = iter(model.output_names)

    def cast(tensor):
        layer = _cast(next(names))
        return layer(tensor) if _is_narrow(tensor) else tensor

    outputs = tree.map_structure(cast, model.output)
    return keras.Model(model.input, outputs, name=model.name)


def _is_narrow(tensor):
    return keras.backend.standardize_dtype(tensor.dtype) in SIXTEEN_BITS


def _cast(name):
    return keras.layers.Identity(dtype="float32", name=f"{name}_float32")


def _config_of(model):
    """Returns the config that a file of the uncompiled model would hold."""
    # The optimizer, loss and metrics may have no config, so the model's config
    # leaves them out.
    compiled = [
        x
        for x in keras_internals.flat_layers(model)
        if getattr(x, "compiled", False)
    ]
    try:
        with contextlib.ExitStack() as stack:
            for part in compiled:
                stack.enter_context(patched(part, {"compiled": False}))
            config = keras.saving.serialize_keras_object(model)
    except Exception as error:  # User code may raise anything.
        raise ValueError(
            f"The model {model.name!r} cannot be rebuilt: its class needs "
            f"`get_config` and `from_config`. Received: {one_line(error, 400)}"
        ) from error
    return _fit_for_16_bits(config)


def _fit_for_16_bits(config):
    if isinstance(config, list | tuple):
        return type(config)(map(_fit_for_16_bits, config))
    if not isinstance(config, dict):
        return config
    if config.get("class_name") in _ORTHOGONAL:
        return _ZEROS
    config = {key: _fit_for_16_bits(value) for key, value in config.items()}
    # A 16-bit `InputLayer` would round the inputs of a float32 layer too.
    if config.get("class_name") == "InputLayer":
        settings = config["config"]
        if settings.get("dtype") in SIXTEEN_BITS:
            settings["dtype"] = "float32"
    # A layer saves its LoRA weights as part of its kernel, so the rebuilt layer
    # must not create new LoRA weights.
    if config.get("module") == "keras.layers":
        for name in ("lora_rank", "lora_alpha"):
            config["config"].pop(name, None)
    return config


def _deserialized(config, model):
    known = {
        keras.saving.get_registered_name(type(layer)): type(layer)
        for layer in keras_internals.flat_layers(model)
        if not hasattr(keras.layers, type(layer).__name__)
    }
    return keras.saving.deserialize_keras_object(
        copy.deepcopy(config),  # Keras modifies a config that it loads.
        custom_objects=known,
        safe_mode=False,
    )


def _another_model(model, own, new):
    names = [x.name if x is not None else "no layer" for x in (own, new)]
    return (
        f"The config of {model.name!r} rebuilds a different model. It lacks "
        "layers that were added or swapped in outside the model's own code. "
        f"Received: {names[0]!r}, rebuilt as {names[1]!r}"
    )


def _set(layer, policy):
    # A lookup layer overrides `compute_dtype`, which does not work yet when
    # `Layer.__init__` returns.
    own = type(layer).compute_dtype is not keras.layers.Layer.compute_dtype
    if not own and not is_fixed(layer):
        keras_internals.set_policy_object(layer, keras.DTypePolicy(policy))


@contextlib.contextmanager
def _global_policy(policy):
    """Sets the global policy inside a `with` block."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


@contextlib.contextmanager
def _on_creation(visit):
    """Calls a function with each layer that this thread creates."""
    cls = keras.layers.Layer
    original, thread = cls.__init__, threading.get_ident()
    # Some classes call `__init__` twice, but the function must see each layer
    # once. The dict keeps the layers, so that Python does not reuse their ids.
    seen: dict = {}

    @functools.wraps(original)
    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if threading.get_ident() == thread and id(self) not in seen:
            seen[id(self)] = self
            visit(self)

    # `Operation.__new__` reads the signature from `__init__.__signature__`.
    init.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    with patched(cls, {"__init__": init}):
        yield


_INSIDE = "a .keras file has one dtype for a layer and its parts"
_BY_ITSELF = (
    "a part of it needs float32, and a .keras file has one dtype for both"
)


def loadable(
    source: Rebuilder, assignment: Assignment, x: Any
) -> tuple[keras.Model, Assignment, list[str]]:
    """Builds a model that a file restores in the same dtypes, if possible.

    Args:
        source: `Rebuilder`.
        assignment: `Assignment`, the policies that the layers should follow.
        x: One batch of inputs, as tensors.

    Returns:
        The model, the assignment that it follows, and notes on the dtypes that
        a file loses. If part of a layer needs float32, the whole layer may
        become float32.
    """
    while True:
        model = source.build(assignment.policies)
        loaded = {
            policy: _others(source, model, policy, x)
            for policy in ("float32", *assignment.dtypes())
        }
        for policy, others in loaded.items():
            if others == {}:
                return model, assignment, _under(policy)
        changed = _adapted(assignment, loaded["float32"] or {})
        if changed.policies == assignment.policies:
            return model, assignment, [_note(loaded["float32"])]
        assignment = changed


def _others(source, model, policy, x):
    """Returns the loaded policies of layers that load with a wrong policy.

    The keys are layer paths. The result is `None` if Keras cannot load the
    model, or the loaded model cannot be called.
    """
    try:
        loaded = source.reloaded(model, policy)
        with keras.StatelessScope():
            loaded(x, training=False)
    except Exception:  # User code may raise anything.
        return None
    return {
        path: policy_name(new)
        for path, own, new in source.pairs_of(model, loaded)
        if has_policy(own) and policy_name(own) != policy_name(new)
    }


def _adapted(assignment, others):
    """Moves the assignment towards the policies that a file restores."""
    for path, theirs in others.items():
        ours = assignment.policies.get(path, "float32")
        if not is_16_bit(theirs):
            if assignment.is_inside_float32(path):
                assignment = assignment.replaced([path], theirs, _INSIDE)
        elif is_16_bit(ours):
            assignment = assignment.replaced([path], theirs, "")
        elif holder := path.rpartition("/")[0]:
            assignment = assignment.widened(holder, _BY_ITSELF)
    return assignment


def _under(policy):
    if policy == "float32":
        return []
    return [
        "Some layers create sublayers without a dtype. Call "
        f"`keras.config.set_dtype_policy({policy!r})` before you load a .keras "
        "file of the model."
    ]


def _note(others):
    if others is None:
        return "Keras cannot load this model from a file. Use `save_weights`."
    shown = ", ".join([*others][:3])
    return (
        f"A .keras file of this model loads "
        f"{format_count(len(others), 'layer')} in another dtype ({shown}). "
        "Save the plan too, with `report.plan.save('plan.json')`. Then call "
        "`keras_mixprec.apply_policy(model, "
        "keras_mixprec.PrecisionPlan.load('plan.json'))` after loading."
    )
