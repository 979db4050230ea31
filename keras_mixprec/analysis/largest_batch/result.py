"""What a search for the largest batch has found."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Found:
    """What was found for one policy.

    Attributes:
        policy: String, a policy's name or `"plan"`.
        batch_size: Int. Samples of the largest batch that trained; 0 if not
            even the smallest did.
        fails_at: Int. Samples of the smallest batch that ran out of memory;
            `None` if none did.
        trials: List of dicts, in the order in which they ran: `size`, `fits`,
            and `peak_bytes` and `measured_by` if it did, `because` if not.
    """

    policy: str
    batch_size: int
    fails_at: int | None
    trials: list[dict]

    def __str__(self):
        if not self.batch_size:
            return f"{self.policy}: not even {samples(self.fails_at)} fit"
        text = f"{self.policy}: {samples(self.batch_size)} fit"
        if self.fails_at is None:
            return f"{text}, and no more were tried"
        return f"{text}, {self.fails_at:,} do not"


@dataclasses.dataclass(frozen=True)
class LargestBatch:
    """The largest batch that trains under a policy; printed, a sentence or two.

    Attributes:
        found: The `Found` of the policy.
        baseline: The `Found` of the policy that it is compared with, or
            `None`.
    """

    found: Found
    baseline: Found | None

    @property
    def batch_size(self) -> int:
        """Samples of the largest batch that trains, 0 if none does."""
        return self.found.batch_size

    @property
    def ratio(self) -> float | None:
        """How many times the samples of the baseline's largest batch.

        `None` without a baseline, if nothing fits in that, or if a search
        ended at `max_size`.
        """
        known = [self.found, self.baseline]
        if any(f is None or f.fails_at is None for f in known):
            return None
        if not self.baseline.batch_size:  # type: ignore[union-attr]
            return None
        return self.batch_size / self.baseline.batch_size  # type: ignore[union-attr]

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it as what JSON can hold."""
        return {
            "batch_size": self.batch_size,
            "ratio": self.ratio,
            **dataclasses.asdict(self),
        }

    def __str__(self):
        if self.baseline is None:
            return str(self.found)
        ratio = f" ({self.ratio:.2f}x)" if self.ratio is not None else ""
        return f"{self.found}{ratio}\n{self.baseline}"


def samples(count: int) -> str:
    """Returns a number of samples in words."""
    return f"{count:,} sample{'' if count == 1 else 's'}"
