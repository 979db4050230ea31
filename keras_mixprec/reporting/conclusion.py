"""What a run comes down to: its sentence, what that begins with, its loss."""

from collections.abc import Mapping

from keras_mixprec.reporting.facts import facts_of
from keras_mixprec.reporting.flat_loss import flat_loss
from keras_mixprec.reporting.headline import headline, main_finding


def conclusion(overview: Mapping) -> dict:
    """Returns what is read off all the rest of a run.

    Args:
        overview: Dict, as `RunData.overview` returns it, without these.

    Returns:
        Dict with `"headline"`, as `headline` returns it, `"finding"`, as
        `main_finding` does but for its event's place among those of the run,
        and `"flat_loss"`, as `flat_loss` does.
    """
    facts = facts_of(overview)
    finding = main_finding(facts)
    if finding:
        places = {id(event): n for n, event in enumerate(overview["events"])}
        finding |= {"event": places[id(finding["event"])]}
    said = {"headline": headline(facts), "finding": finding}
    return said | {"flat_loss": flat_loss({**overview, **said})}
