"""A run that fails for a night leaves a log that can be opened."""

from typing import NamedTuple

from keras_mixprec.callbacks.skips import Skips
from keras_mixprec.reporting import RunLog
from keras_mixprec.reporting.file_source import FileSource
from keras_mixprec.reporting.run_data import RunData

LOOK, LOOKS = 50, 2000


class Step(NamedTuple):
    step: int
    scale: float
    variables: list


class Reading(NamedTuple):
    new_steps: list
    skipped: int
    unseen: int
    loss_scale: float
    changed: bool


def failing(look):
    """What a look finds where all steps are skipped at the lowest scale."""
    steps = range(LOOK * look + 1, LOOK * (look + 1) + 1)
    last = [Step(step, 0.5, ["dense/kernel"]) for step in steps[-32:]]
    unseen = LOOK - len(last)
    return Reading(last, LOOK * (look + 1), unseen, 0.5, look == 0)


def test_it_is_small_and_every_skip_is_counted(tmp_path):
    with RunLog(tmp_path) as log:
        skips = Skips(log)
        for look in range(LOOKS):
            for tell in skips.tell, skips.tell_scale:
                tell(LOOK * (look + 1), "", failing(look), 0)
        skips.tell_rest(LOOK * LOOKS)
    size = sum(path.stat().st_size for path in (tmp_path / "mixprec").iterdir())
    assert size < 20e6  # 120 MB if each were told.
    data = RunData("run", FileSource(log.folder)).overview()
    kinds = [event["kind"] for event in data["events"]]
    in_full = kinds.count("skipped_step")
    assert 1000 <= in_full < 1032
    others = sum(event.get("count", 0) for event in data["events"])
    assert in_full + others == LOOK * LOOKS
    (course,) = data["scale"]
    assert course["skipped"][-1] == LOOK * LOOKS
    assert len(course["steps"]) < 1500
