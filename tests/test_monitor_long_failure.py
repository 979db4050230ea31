"""A run that fails for a night leaves a log that can be opened."""

from keras_mixprec.loss_scaling.history import NonfiniteStep
from keras_mixprec.monitoring.counter_log import Skips
from keras_mixprec.monitoring.recorded_steps import Reading
from keras_mixprec.monitoring.scale_curve import Block, ScalePoint
from keras_mixprec.reporting.file_source import FileSource
from keras_mixprec.reporting.run_data import RunData
from keras_mixprec.reporting.run_log import RunLog

LOOK, READINGS = 50, 2000


def failing(look):
    """What a reading finds where all steps are skipped at the lowest scale."""
    first, last = LOOK * look, LOOK * (look + 1)
    steps = [
        NonfiniteStep(step, 0.5, ["dense/kernel"])
        for step in range(last - 31, last + 1)
    ]
    points = [ScalePoint(step, 0.5, step, 0) for step in (first, last)]
    others = [Block(first + 1, last - 32, LOOK - 32)]
    return Reading(points, [], last, last, True, steps, others, {}, {}, 0)


def test_it_is_small_and_every_skip_is_counted(tmp_path):
    with RunLog(tmp_path) as log:
        skips = Skips(log)
        for look in range(READINGS):
            skips.report("", failing(look))
        skips.report_rest(LOOK * READINGS)
    size = sum(path.stat().st_size for path in (tmp_path / "mixprec").iterdir())
    assert size < 20e6  # 120 MB if each were told.
    data = RunData("run", FileSource(log.folder)).overview()
    kinds = [event["kind"] for event in data["events"]]
    in_full = kinds.count("skipped_step")
    assert 1000 <= in_full < 1032
    others = sum(event.get("count", 0) for event in data["events"])
    assert in_full + others == LOOK * READINGS
    (course,) = data["scale"]
    assert course["skipped"][-1] == LOOK * READINGS
    assert len(course["steps"]) < 1500
