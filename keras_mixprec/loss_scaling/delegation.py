"""What reaches through the wrapper to the optimizer inside."""

_ARGUMENTS = (
    "weight_decay",
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "use_ema",
    "ema_momentum",
    "ema_overwrite_frequency",
    "gradient_accumulation_steps",
)


def _delegated(name):
    def get(self):
        inner = vars(self).get("inner_optimizer")
        return getattr(inner, name, None)

    def set_(self, value):
        # Keras' constructor sets its defaults before there is an inner one.
        if "inner_optimizer" in vars(self):
            setattr(self.inner_optimizer, name, value)

    return property(get, set_, doc=f"`{name}` of the inner optimizer.")


class DelegatesToInner:
    """Mixin: attributes that the wrapper lacks are the inner optimizer's."""

    def exclude_from_weight_decay(self, var_list=None, var_names=None):
        """Excludes variables from the inner optimizer's weight decay."""
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    def __getattr__(self, name):
        # Called only where the usual look-up failed.
        if name.startswith("_") or "inner_optimizer" not in vars(self):
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}"
            )
        return getattr(self.inner_optimizer, name)

    def __setattr__(self, name, value):
        inner = vars(self).get("inner_optimizer")
        if (
            inner is not None
            and not name.startswith("_")
            and name not in vars(self)
            and not hasattr(type(self), name)
            and hasattr(inner, name)
        ):
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)


for _name in _ARGUMENTS:
    setattr(DelegatesToInner, _name, _delegated(_name))
