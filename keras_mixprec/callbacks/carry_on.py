"""Going on without a part of the monitor that does not work here."""

import warnings


def carry_on_without(what: str, reason) -> None:
    """Warns that `what` is not possible, and why; training goes on."""
    warnings.warn(
        f"MixPrecMonitor cannot {what}, and carries on without: "
        f"{str(reason)[:200]}",
        UserWarning,
        stacklevel=3,
    )
