"""What is known of a run before it is read: from what its tags say."""

from collections.abc import Iterable, Mapping

from keras_mixprec.reporting import schema


def listed_run(run: str, contents: Iterable[Mapping], written: float) -> dict:
    """Returns what the list of runs has of one.

    Args:
        run: String. Its name.
        contents: Dicts, the contents of its tags.
        written: Float. When it was last written to.

    Returns:
        Dict with `"run"`, `"newer_schema"`, whether a newer version wrote it,
        `"written"`, and `"in_16_bits"`, whether any of its layers computed in
        16 bits when it began, `None` in an older log.
    """
    contents = [*contents]
    known = (c.get(schema.IN_16_BITS) for c in contents)
    return {
        "run": run,
        "newer_schema": _is_newer(contents),
        "written": written,
        "in_16_bits": next((x for x in known if x is not None), None),
    }


def _is_newer(contents):
    found = (content.get("schema") for content in contents)
    known = schema.SCHEMA_VERSION
    return any(isinstance(x, int) and x > known for x in found)
