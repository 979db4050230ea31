"""What a `PrecisionTuner` hands on to what acts for it in one `fit`."""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class TunerSettings:
    """The arguments of a `PrecisionTuner`, and where its plan is kept.

    Attributes:
        save_plan: Function of the `Repairs`, called after each change.
        use_bfloat16: Boolean. Whether bfloat16 is tried before float32.
    """

    save_plan: Callable
    use_bfloat16: bool
    dry_run: bool
    promote_after: int
    cooldown: int
    max_demoted_fraction: float
    max_rebuilds: int
    on_limit: str
    update_freq: int
    verbose: int
