"""What the sentence on a run says of its steps, and of FLOPs in 16 bits."""

from collections.abc import Iterator, Mapping

from keras_mixprec.flop_shares import share_in_16_bits
from keras_mixprec.formats import SIXTEEN_BITS, format_count, format_share
from keras_mixprec.reporting.facts import Facts


def steps_clause(facts: Facts, quiet: bool, known: bool) -> str:
    """Returns how many steps there were, and how many of them were skipped.

    Args:
        facts: `Facts`.
        quiet: Boolean. Whether nothing was found.
        known: Boolean. Whether anything was measured.
    """
    return _last_of(facts) + _skips(facts, quiet, known)


# Skipped in a row, this many are no scale search any more.
STUCK = 5


def share_clause(layers: list, demoted: Mapping, why: str) -> Iterator[str]:
    """Yields the share of FLOPs in 16 bits, nothing where it is not known.

    Args:
        layers: List of dicts, as `Facts` has them.
        demoted: Dict from the paths of demoted layers to their dtypes.
        why: String. What is known of a run without any; empty if nothing is.
    """
    share = share_in_16_bits(layers)
    if share is None:
        return
    if not is_low(layers):
        yield why or "no layer in 16 bits"
    else:
        still = "still " if demoted else ""
        # Layers without products in wider dtypes take few.
        wide = any(x["compute_dtype"] not in SIXTEEN_BITS for x in layers)
        shown = f"{format_share(share)} of"
        if wide and shown == "100% of":
            shown = "nearly all"
        yield f"{shown} FLOPs {still}in 16 bits"


def not_known(facts: Facts) -> Iterator[str]:
    """Yields what was not looked at of a run in which nothing was found.

    What is wrong in 16 bits need not show in the ranges of outputs: where
    `sum(x**2)` overflows, `x / sqrt(sum(x**2))` is 0.

    Args:
        facts: `Facts`.
    """
    missing = [] if facts.measured else ["no range measured"]
    if not facts.examined:
        missing.append(
            "not compared with float32 (call "
            "keras_mixprec.diagnose(model, x, y))"
        )
    if missing:
        yield ", ".join(missing)


def is_low(layers: list) -> bool:
    """Whether any layer computes in 16 bits."""
    return any(layer["compute_dtype"] in SIXTEEN_BITS for layer in layers)


def _skips(facts, quiet, known):
    steps, skipped = facts.steps, facts.skipped
    total = max(skipped.values(), default=0)
    taken = format_count(steps, "step")
    if not total:
        none = ", none skipped" if skipped and steps else ""
        found = ", no findings" if quiet and known else ""
        return f"{taken}{none}{found}"
    last = ""
    if STUCK <= facts.in_a_row < min(steps, total):
        last = f", including the last {facts.in_a_row:,}"
    if len(skipped) > 1:
        own = (
            f"optimizer {name!r} skipped {f'{n:,}' if n else 'none'} of {taken}"
            f"{last * (n == total)}"
            for name, n in sorted(skipped.items())
        )
        return "; ".join(own)
    why = ""
    if quiet:
        why = " while the loss scale settled"
        if facts.in_a_row:
            why = ", with the loss scale still falling"
    return f"{_skipped(total, steps)}{why}{last}"


def _skipped(count, steps):
    if count >= steps > 0:
        return f"all {format_count(steps, 'step')} skipped"
    if not count:
        return "none skipped"
    return f"{count:,} of {format_count(steps, 'step')} skipped"


def _last_of(facts):
    """What steps are of, where the log has more than those."""
    if facts.fits == 1:
        return ""
    return f"in fit {facts.fits} of {facts.fits} (from step {facts.first:,}): "
