"""No callback's session outlives the `fit` that it watches."""

import contextlib
import functools

import keras

# The attribute of a model that holds its session, which would keep the model
# alive elsewhere.
SESSION_ATTRIBUTE = "_keras_mixprec_session"


def _ending(fit):
    """A `fit` that ends the session that joined it, however it ends."""

    @functools.wraps(fit)
    def fit_and_end(model, *args, **kwargs):
        __tracebackhide__ = True  # Notebooks and pytest leave this frame out.
        before = vars(model).get(SESSION_ATTRIBUTE)
        try:
            return fit(model, *args, **kwargs)
        except BaseException as error:
            session = vars(model).get(SESSION_ATTRIBUTE)
            if session is not None and session is not before:
                # The user has to see the error that ended `fit`.
                with contextlib.suppress(Exception):
                    session.abandon(error)
            raise

    return fit_and_end


# Keras calls no `on_train_end` after an exception or Ctrl-C. A callback is made
# when Python has looked its `fit` up already, so that this is imported before.
_TRAINER = next(c for c in keras.Model.__mro__ if "fit" in vars(c))
_TRAINER.fit = _ending(_TRAINER.fit)
