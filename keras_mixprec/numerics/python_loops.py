"""Loops of `keras.ops` that run in Python, with numbers in every step."""

import contextlib

from keras import ops, tree

from keras_mixprec._patched import patched_here
from keras_mixprec.backend import active
from keras_mixprec.keras_internals import backend_core


@contextlib.contextmanager
def step_by_step():
    """Context that compiles nothing, and runs each step of a loop.

    `while_loop`, `fori_loop` and `cond` are Python where nothing is compiled;
    the others are a batch of calls, or call once more to know shapes.
    """
    instead = {"map": _map, "vectorized_map": _map, "scan": _scan}
    with active.replay().step_by_step(), patched_here(backend_core, instead):
        yield


def _map(function, elements):
    count = len(tree.flatten(elements)[0])
    return _stacked([function(_at(elements, i)) for i in range(count)])


def _scan(f, init, xs=None, length=None, reverse=False, unroll=1):
    count = length if xs is None else len(tree.flatten(xs)[0])
    places = range(count)[::-1] if reverse else range(count)
    carry, results = init, {}
    for place in places:
        x = None if xs is None else _at(xs, place)
        carry, results[place] = f(carry, x)
    return carry, _stacked([results[place] for place in range(count)])


def _at(elements, place):
    return tree.map_structure(lambda leaf: leaf[place], elements)


def _stacked(results):
    def stack(*leaves):
        return None if leaves[0] is None else ops.stack(leaves)

    return tree.map_structure(stack, *results) if results else None
