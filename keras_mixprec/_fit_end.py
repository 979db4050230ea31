"""Ends the session of our callbacks if `fit` raises an error."""

import contextlib
import functools

import keras

# A model holds its session in this attribute. Held elsewhere, the session would
# keep the model alive.
SESSION_ATTRIBUTE = "_keras_mixprec_session"


def _ending(fit):
    """A `fit` that ends the session that its callbacks started."""

    @functools.wraps(fit)
    def fit_and_end(model, *args, **kwargs):
        __tracebackhide__ = True  # Notebooks and pytest leave this frame out.
        before = vars(model).get(SESSION_ATTRIBUTE)
        try:
            return fit(model, *args, **kwargs)
        except BaseException as error:
            session = vars(model).get(SESSION_ATTRIBUTE)
            if session is not None and session is not before:
                # The user must see the error that ended `fit`, not another one.
                with contextlib.suppress(Exception):
                    session.abandon(error)
            raise

    return fit_and_end


# Keras calls no `on_train_end` after an exception or Ctrl-C. Python looks up
# `model.fit` before it makes the callbacks in the call. So `fit` is replaced
# before there are any callbacks.
_TRAINER = next(c for c in keras.Model.__mro__ if "fit" in vars(c))
_TRAINER.fit = _ending(_TRAINER.fit)
