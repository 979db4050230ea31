"""Whether training in float16 goes on without a loss scale."""

import keras

from keras_mixprec.loss_scaling.by_hand import scaling_call
from keras_mixprec.loss_scaling.ensure import lacks_loss_scaling
from keras_mixprec.policies.layers import has_own_step, walk_with_model


def lack_of_scaling(model, used: dict, trained: bool) -> str | None:
    """Returns what does not scale the loss of a model with float16 layers.

    Args:
        model: A compiled `keras.Model`.
        used: Dict of `Watch`es, the loss scale optimizers in use.
        trained: Boolean. Whether a step has been taken, so that it is known
            which optimizers are in use.

    Returns:
        `"optimizer"`, `"train_step"`, or `None` if the loss is scaled.
    """
    if lacks_loss_scaling(model):
        return "optimizer"
    if not trained or not _computes_in_float16(model):
        return None
    if any(watch.optimizer.loss_not_scaled for watch in used.values()):
        return "train_step"
    # `compile` has made one that a `train_step` with others does not use.
    scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    return "optimizer" if scaled and not used else None


def remedy(model, lack: str) -> str:
    """Returns what there is to do about it, one or two sentences.

    Args:
        model: A `keras.Model`.
        lack: String, as `lack_of_scaling` returned it.
    """
    what = "nothing scales"
    if lack == "train_step":
        what = "`train_step` does not scale"
    start = (
        f"Layers compute in float16 but {what} the loss: small gradients "
        "become zero. "
    )
    own = f"call `loss = optimizer.{scaling_call()}` in `train_step`."
    if lack == "train_step":
        return start + own[:1].upper() + own[1:]
    if has_own_step(model):
        return (
            f"{start}Wrap each optimizer in keras_mixprec.LossScaleOptimizer, "
            f"and {own}"
        )
    return (
        f"{start}Compile with keras_mixprec.LossScaleOptimizer, or call "
        "keras_mixprec.ensure_loss_scaling(model)."
    )


class UnscaledLoss:
    """Logs what does not scale the loss, before the first step or after it.

    Args:
        model: As for `lack_of_scaling`.
        log: The `RunLog`.
    """

    def __init__(self, model, log):
        self._model = model
        self._log = log
        self._reads, self._logged = set(), set()

    def read(self, step: int, used: dict, trained: bool):
        """Logs it if it is so.

        Args:
            step: Int.
            used: As for `lack_of_scaling`.
            trained: As for `lack_of_scaling`.
        """
        if trained in self._reads:
            return
        self._reads.add(trained)
        lack = lack_of_scaling(self._model, used, trained)
        if lack and lack not in self._logged:
            self._logged.add(lack)
            event = {"kind": "no_loss_scaling", "by": lack}
            self._log.event(step, event)


def _computes_in_float16(model):
    entries = walk_with_model(model)
    return any(e.layer.compute_dtype == "float16" for e in entries)
