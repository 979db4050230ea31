"""Whether layers that were demoted bear 16 bits by now."""

from keras.src.trainers.data_adapters import data_adapter_utils

from keras_mixprec.callbacks.ballot import any_worker
from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.low_layers import low_layers
from keras_mixprec.diagnosis.on_demand import examine
from keras_mixprec.numerics.dtypes import following
from keras_mixprec.policies.lone_layers import lone_layers


def sound_as_built(engine, repairs, paths, batches, step: int) -> set:
    """Returns those demoted layers that could be given back together.

    Args:
        engine: The `Engine`.
        repairs: `Repairs` of the model.
        paths: Paths of demoted layers.
        batches: List of batches to try them on, as `train_step` takes them.
        step: Int.
    """
    sound = set(paths)
    # What is sound beside others may not be so alone, once.
    for _ in range(2):
        sound -= _at_fault(engine, repairs, sound, batches, step)
    with following(repairs.as_built(sound)):
        sound -= repairs.paths_of(lone_layers(engine.model))
    at_fault = _at_fault(engine, repairs, sound, batches, step)
    repairs.tried(set(paths) - sound, step)
    return set() if at_fault else sound


def _at_fault(engine, repairs, paths, batches, step):
    """Which of the layers are at fault as they were built, anywhere."""
    if not paths:
        return set()
    found = set(paths)
    try:
        found = _at_fault_here(engine.model, repairs, paths, batches, step)
    # The other workers wait for this one.
    except Exception as error:
        engine.examiner.give_up(step, error)
    paths = sorted(paths)
    flags = any_worker(engine.model, [p in found for p in paths])
    return {p for p, flag in zip(paths, flags, strict=True) if flag}


def _at_fault_here(model, repairs, paths, batches, step):
    layers = []
    with following(repairs.as_built(paths)):
        for batch in batches:
            parts = data_adapter_utils.unpack_x_y_sample_weight(batch)
            found = examine(model, *parts, step=step)
            for finding in found.findings:
                layers += finding.layers
            # One that was demoted for its growth would be so again.
            low = {entry.path: entry.layer for entry in low_layers(model)}
            layers += [
                low[path]
                for path, bits in found.headroom.items()
                if path in low and bits < thresholds.BITS_ABOVE
            ]
    return repairs.paths_of(layers)
