"""Splits an endless list into tags of bounded size."""

from keras_mixprec.reporting.schema import chunk_tag


class Chunks:
    """A family of tags, each of which holds up to `size` entries.

    Args:
        family: String. What the tags begin with.
        size: Int >= 1. Entries per tag.
        index: Int >= 0. Number of the first tag.
    """

    def __init__(self, family: str, size: int, index: int):
        self._family = family
        self._size = size
        self._index = index
        self._entries = []

    def extend(self, entries) -> list[tuple[str, list]]:
        """Adds entries.

        Args:
            entries: Iterable.

        Returns:
            List of `(tag, entries)`: each tag that changed, with all that it
            holds now.
        """
        changed = {}
        for entry in entries:
            if len(self._entries) == self._size:
                self._index += 1
                self._entries = []
            self._entries.append(entry)
            changed[chunk_tag(self._family, self._index)] = self._entries
        return list(changed.items())
