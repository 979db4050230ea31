"""What `compare_precisions` accepts of steps, seeds, functions and metrics."""

from collections.abc import Iterable
from typing import Any

from keras_mixprec._checks import check_choice, check_integer

_HIGHER = ("acc", "accuracy", "auc", "precision", "recall", "iou", "score")
_LOWER = ("loss", "error", "mae", "mse", "mape", "msle", "crossentropy")


def check_steps(steps: int, blocks: int) -> int:
    """Returns `steps`, or raises if it is no multiple of `blocks`."""
    steps = check_integer("steps", steps, low=1)
    blocks = check_integer("blocks", blocks, low=2)
    if steps % blocks:
        near = max(round(steps / blocks), 1) * blocks
        raise ValueError(
            "`steps` must be a multiple of `blocks`, which are equally long: "
            f"`steps={near}` is. Received: steps={steps}, blocks={blocks}"
        )
    return steps


def check_seeds(seeds: int | Iterable[int]) -> list[int]:
    """Returns the list of seeds, or raises saying what is wrong."""
    if isinstance(seeds, Iterable) and not isinstance(seeds, str):
        found = [check_integer("seeds", seed) for seed in seeds]
    else:
        found = list(range(check_integer("seeds", seeds)))
    if not found or len(set(found)) < len(found):
        raise ValueError(
            "`seeds` must be a positive integer, or a list of different "
            f"ones. Received: seeds={seeds!r}"
        )
    return found


def higher_is_better(metric: Any, mode: str) -> bool:
    """Returns whether the metric is better the higher it is."""
    check_choice("mode", mode, ("auto", "min", "max"))
    if not isinstance(metric, str) and not callable(metric):
        raise TypeError(
            "`metric` must be the name of a metric, or a function of the "
            f"model. Received: metric={metric!r} of type "
            f"{type(metric).__name__}"
        )
    if mode != "auto":
        return mode == "max"
    name = metric if isinstance(metric, str) else ""
    if name.endswith(_HIGHER) or name.endswith(_LOWER):
        return name.endswith(_HIGHER)
    raise ValueError(
        "Whether a higher metric is better does not follow from its name: "
        "check its spelling, or give `mode`, 'min' or 'max'. "
        f"Received: metric={metric!r}"
    )
