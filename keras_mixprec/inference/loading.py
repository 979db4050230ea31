"""What a `.keras` file of a converted model loads as, without this package.

Keras' files have the policies of the layers that a config names. Those of
layers that another one makes itself follow what its code gives them: its own
policy, or the global one.
"""

from typing import Any

import keras

from keras_mixprec.backend import active
from keras_mixprec.formats import format_count
from keras_mixprec.inference.assignment import Assignment, has_policy
from keras_mixprec.inference.rebuild import Rebuilder
from keras_mixprec.policies.names import is_16_bit, policy_name

_INSIDE = "a .keras file has one dtype for it and the layer that it is part of"
_BY_ITSELF = (
    "stays in float32 with what it is made of: a .keras file has one dtype for "
    "it, and a part of it needs float32"
)


def loadable(
    source: Rebuilder, assignment: Assignment, x: Any
) -> tuple[keras.Model, Assignment, list[str]]:
    """Builds a model that loads from a file as it is, as far as that goes.

    Args:
        source: `Rebuilder`.
        assignment: `Assignment`, what the layers are to follow.
        x: One batch of inputs, as tensors.

    Returns:
        The model; the assignment that it follows, in which a layer may be wide
        because one inside it is; and notes on what a file does not give back.
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
    """What layers of a loaded model follow that do not follow what they should.

    By path; `None` if it cannot be loaded, or called.
    """
    try:
        loaded = source.reloaded(model, policy)
        with keras.StatelessScope():
            loaded(x, training=False)
    except (ValueError, *active.replay().REFUSALS):
        return None
    return {
        path: policy_name(new)
        for path, own, new in source.pairs_of(model, loaded)
        if has_policy(own) and policy_name(own) != policy_name(new)
    }


def _adapted(assignment, others):
    """The same, but for what would compute in fewer bits when loaded."""
    for path, theirs in others.items():
        ours = assignment.policies.get(path, "float32")
        if not is_16_bit(theirs):
            if assignment.is_inside_float32(path):
                assignment = assignment.replaced([path], theirs, _INSIDE)
        elif is_16_bit(ours):  # Stored in what it computes in.
            assignment = assignment.replaced([path], theirs, "")
        elif holder := path.rpartition("/")[0]:
            assignment = assignment.widened(holder, _BY_ITSELF)
    return assignment


def _under(policy):
    if policy == "float32":
        return []
    return [
        "Some layers are made without a dtype by the code that they are part "
        "of. A .keras file gives the same model back if it is loaded after "
        f"`keras.config.set_dtype_policy({policy!r})`."
    ]


def _note(others):
    if others is None:
        return (
            "A .keras file of it cannot be loaded: save its weights instead, "
            "with `save_weights`, or export it."
        )
    shown = ", ".join([*others][:3])
    return (
        f"A .keras file of it gives {format_count(len(others), 'layer')} back "
        f"in another dtype ({shown}), which other code makes without one. "
        "Save the plan as well, `report.plan.save('plan.json')`, and set it "
        "behind `keras.saving.load_model`: `keras_mixprec.apply_policy(model, "
        "keras_mixprec.PrecisionPlan.load('plan.json'))` computes the same."
    )
