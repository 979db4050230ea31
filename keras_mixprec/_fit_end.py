"""Ends the session of our callbacks if `fit` raises an error."""

import contextlib
import functools

import keras

# The name of the model's attribute that holds its session. A global registry of
# sessions would keep every model alive.
SESSION_ATTRIBUTE = "_keras_mixprec_session"


def _ending(fit):
    """Returns a `fit` that ends the callbacks' session if it raises."""

    @functools.wraps(fit)
    def fit_and_end(model, *args, **kwargs):
        __tracebackhide__ = True  # Hides this frame in notebooks and pytest.
        before = vars(model).get(SESSION_ATTRIBUTE)
        try:
            return fit(model, *args, **kwargs)
        except BaseException as error:
            session = vars(model).get(SESSION_ATTRIBUTE)
            if session is not None and session is not before:
                # An error while the session ends must not hide the error that
                # ended `fit`.
                with contextlib.suppress(Exception):
                    session.abandon(error)
            raise

    return fit_and_end


# Keras does not call `on_train_end` after an exception or Ctrl-C, so a wrapper
# of `fit` ends the session. The wrapper is installed on import, because
# Python looks up `model.fit` before it creates the callbacks of the call.
_TRAINER = next(c for c in keras.Model.__mro__ if "fit" in vars(c))
_TRAINER.fit = _ending(_TRAINER.fit)
