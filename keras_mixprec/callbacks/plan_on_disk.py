"""The plan that a tuner starts from and writes."""

import os
from pathlib import Path

from keras_mixprec.policies import PrecisionPlan, plan_file


class PlanOnDisk:
    """The file of a plan.

    Args:
        path: String or path-like.
    """

    def __init__(self, path):
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(
                "`plan` must be the path of a JSON file. "
                f"Received: plan={path!r} of type {type(path).__name__}"
            )
        self.path = Path(path)

    def load(self, model) -> tuple[PrecisionPlan, dict] | None:
        """Returns the plan and the tuner's state, `None` if there is no file.

        Raises:
            ValueError: If the file is damaged or belongs to another model.
        """
        if not self.path.exists():
            return None
        plan = PrecisionPlan.load(self.path)
        plan.validate(model)
        return plan, plan_file.read_tuner(self.path)

    def save(self, repairs):
        """Writes what the model follows now.

        Args:
            repairs: `Repairs` of the model.

        Raises:
            OSError: If it cannot be written; the old file is left as it was.
        """
        try:
            plan_file.write(self.path, repairs.plan(), repairs.state())
        except OSError as error:
            raise OSError(
                "The plan cannot be written; choose a path in a folder that "
                "exists and may be written to. "
                f"Received: plan={str(self.path)!r} ({error})"
            ) from error

    def save_if_possible(self, repairs) -> OSError | None:
        """Writes what the model follows now, in training.

        A folder that was removed meanwhile is made again.

        Args:
            repairs: `Repairs` of the model.

        Returns:
            What keeps it from being written, `None` if it is.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            plan_file.write(self.path, repairs.plan(), repairs.state())
        except OSError as error:
            return error
        return None
