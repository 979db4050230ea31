"""The progress of a diagnosis that takes long, on the console."""

import contextlib
import sys

import keras

from keras_mixprec import _clock
from keras_mixprec._console import print_message
from keras_mixprec.numerics.calls import counted_by
from keras_mixprec.policies.layers import walk_with_model

# A diagnosis that takes longer than this many seconds shows a progress bar.
_PATIENCE = 2.0

# The first diagnosis of more layers than this is expected to take longer.
_MANY = 30

# Each layer is recorded in two steps, and checked forward and backward.
_PASSES = 4


@contextlib.contextmanager
def progress(model, who: str, when: str, seconds: float | None):
    """Shows the progress of the diagnosis that runs within the context.

    Args:
        model: The `keras.Model`.
        who: String. The callback that speaks, none to be silent.
        when: String, `"before the first step"`.
        seconds: Float. How long it is expected to take; `None` if that is not
            known.

    Yields:
        Object whose `findings` are to be set to the findings that are no
        search for the loss scale.
    """
    layers = len(walk_with_model(model)) - 1  # The model itself is in it.
    shown = _Shown(who, layers, when)
    if not who:
        yield shown
        return
    if layers > _MANY if seconds is None else seconds > _PATIENCE:
        shown.announce()
    with counted_by(shown.tick):
        yield shown
    shown.conclude()


class _Shown:
    """What is on the console."""

    def __init__(self, who, layers, when):
        self._who = who
        self._layers = layers
        self._when = when
        self._total, self._done = layers * _PASSES, 0
        self._bar = None
        self._said = False
        self.findings: list = []
        self._begun = _clock.now()

    def announce(self):
        if not self._said:
            self._say(f"checking {self._layers} layers {self._when} ...")

    def _say(self, message):
        self._said = True
        print_message(f"{self._who}: {message}")

    def tick(self):
        # A search that finds something takes more passes.
        self._done = min(self._done + 1, self._total - 1)
        if self._bar is None and self._seconds() > _PATIENCE:
            self.announce()
            if _can_draw_over():
                self._bar = keras.utils.Progbar(self._total, unit_name="check")
        if self._bar is not None:
            self._bar.update(self._done)

    def conclude(self):
        if self._bar is not None:
            self._bar.update(self._total, finalize=True)
        if self._said:
            took = f"{self._seconds():.1f} s"
            named = {finding.verdict.layer for finding in self.findings}
            count = len(named - {None})
            what = f": {count} at fault" if count else ""
            if not named:
                what = ": none at fault"
            self._say(f"checked {self._layers} layers in {took}{what}.")

    def _seconds(self):
        return _clock.now() - self._begun


def _can_draw_over():
    """Whether what is printed goes to a terminal or a notebook, not a file."""
    return sys.stdout.isatty() or "ipykernel" in sys.modules
