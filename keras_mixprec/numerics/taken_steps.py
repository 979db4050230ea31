"""Train steps that a model takes as in training, and that are undone again."""

import contextlib

import keras
from keras import ops

from keras_mixprec._patched import patched
from keras_mixprec.backend import active
from keras_mixprec.backend.common import all_variables
from keras_mixprec.formats import SIXTEEN_BITS
from keras_mixprec.keras_internals import holding, set_value, stored_value
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.numerics.dry_step import logged_losses, restored
from keras_mixprec.numerics.held_optimizer import is_scaling, scale_variables
from keras_mixprec.numerics.untouched import PythonState


class StepTaker:
    """Lets a model take train steps.

    Args:
        model: A built and compiled `keras.Model`.

    Attributes:
        optimizers: List of all optimizers that the model holds.
        scaling: Dict from the ids of those that scale the loss to them.
    """

    def __init__(self, model: keras.Model):
        self.optimizers = PythonState(model).all_of(keras.optimizers.Optimizer)
        wrapper = keras.optimizers.LossScaleOptimizer
        found = [o for o in self.optimizers if isinstance(o, wrapper)]
        self.scaling = {id(o): o for o in found}
        self._model = model
        self._traced: list = []
        self._python = PythonState(model)

    def can_take(self) -> bool:
        """Whether the model can take steps here.

        Optimizers that are not built yet would be in the step, and replicas
        would wait for each other. TensorFlow's optimizers do not know variables
        that are widened.
        """
        model, scaling = self._model, self.scaling
        strategy = getattr(model, "distribute_strategy", None)
        narrow = any(v.dtype in SIXTEEN_BITS for v in model.trainable_variables)
        return (
            all(
                o.built and (id(o) in scaling or not is_scaling(o))
                for o in self.optimizers
            )
            and not narrow
            and active.processes().workers(model) == 1
            and (strategy is None or strategy.num_replicas_in_sync == 1)
        )

    @property
    def ours(self) -> dict:
        """Those of `scaling` that record a history, as this package's do."""
        return {
            key: optimizer
            for key, optimizer in self.scaling.items()
            if hasattr(optimizer, "history")
        }

    @contextlib.contextmanager
    def undone(self):
        """Context that undoes all steps."""
        known = all_variables(self._model)
        with contextlib.ExitStack() as stack:
            stack.enter_context(restored(self._model))
            stack.enter_context(active.undo().telling(lambda _: None))
            values = [stored_value(v) for v in known]
            stack.enter_context(holding(known, values))
            for optimizer in self.ours.values():
                # The optimizer must not check whether the loss was scaled.
                stack.enter_context(
                    patched(optimizer._stages, {"scaling": True})
                )
                # Without spikes, training would not diverge.
                if optimizer.spikes:
                    optimizer.spikes.stop()
            self._python = PythonState(self._model)
            yield

    def set_scales(self, scales: dict):
        """Sets loss scales, before a step.

        Args:
            scales: Dict from ids of optimizers to their loss scales.
        """
        variables = self.scale_variables()
        for key, scale in scales.items():
            scale = ops.convert_to_tensor(scale, "float32")
            set_value(variables[key], scale)
        # A compiled step keeps what it reads besides its state.
        values = [(v, stored_value(v)) for v in variables.values()]
        self._traced = self._traced or values

    def take(self, data) -> float:
        """Takes a step.

        Args:
            data: The batch, as `train_step` takes it.

        Returns:
            The loss that the step logs, 0 if it logs none.
        """
        written, replay = [], active.replay()

        def run(data):
            logs, written[:] = replay.take_step(self._model, data, self._traced)
            losses = [*map(ops.convert_to_tensor, logged_losses(logs))]
            return [value for _, value in written] + losses

        # Metrics would add the losses of earlier steps.
        type(self._model).reset_metrics(self._model)
        try:
            values = replay.run_once(self._model, run, data)
        finally:
            if not _is_eager(self._model):
                self._python.put_back()  # Python code runs as it is traced.
        for (variable, _), value in zip(written, values, strict=False):
            if value is not None:
                set_value(variable, value)
        losses = [x for x in values[len(written) :] if x is not None]
        return float(sum(to_array(x).sum() for x in losses))

    def read(self, name: str) -> dict:
        """Returns what optimizers have recorded, by id and name.

        Args:
            name: String. An attribute of their `history`.
        """
        return {
            (key, name): to_array(getattr(o.history, name).value) + 0
            for key, o in self.ours.items()
        }

    def scale_variables(self) -> dict:
        """Returns the loss scale variables, by the ids of optimizers."""
        return {k: scale_variables(o)[0] for k, o in self.scaling.items()}


def _is_eager(model):
    return model.run_eagerly or "eager" in active.runtime().MODES
