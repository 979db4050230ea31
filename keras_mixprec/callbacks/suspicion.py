"""When bad steps are more than the loss scale feeling for its ceiling."""

from collections import deque

# The next batch that fails is looked at closely, which costs no more than a
# diagnosis. Twice as many are waited for if it was but the scale search.
_PATIENCE = 1

# Steps that bad ones are counted over. A healthy scale search that has found
# its ceiling loses one step in 2000.
WINDOW = 500


class Suspicion:
    """Counts the steps that were skipped or had a loss that is not finite.

    Suspicious is one of them within 500 steps; after each suspicion that
    came to nothing, such as bad data, twice as many.
    """

    def __init__(self):
        self._patience = _PATIENCE
        self._seen = deque()
        self.last_bad_step = None

    def add(self, step: int, bad: int) -> bool:
        """Returns whether it is time to look for a reason.

        Args:
            step: Int. How many steps were taken.
            bad: Int. How many of them were bad, since whenever.
        """
        if self._seen and bad > self._seen[-1][1]:
            self.last_bad_step = step
        self._seen.append((step, bad))
        while self._seen[0][0] < step - WINDOW:
            self._seen.popleft()
        return bad - self._seen[0][1] >= self._patience

    def start_over(self):
        """Counts from here on: what there was is known."""
        self._seen = deque([self._seen[-1]] if self._seen else [])

    def came_to_nothing(self):
        """Waits for twice as many bad steps from here on."""
        self._patience *= 2
        self.start_over()
