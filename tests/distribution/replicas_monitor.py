"""A monitor of two devices of one process; prints "done"."""

import tempfile

import numpy as np
from replicas import IS_TENSORFLOW, scope
from tuned import ROWS

# isort: split
# `tuned` has put the folder of the tests on the path.
from monitor_models import OPTIMIZERS, arrays, good, one_weight, watched

# In the half of the third batch that the second device has.
BAD_ROW = 2 * ROWS + ROWS - 1


def one_log_has_the_steps_of_both(name):
    with scope():
        model = one_weight(OPTIMIZERS[name], not IS_TENSORFLOW, metrics=["mse"])
    values = good(6)
    x, y = arrays(values)
    x[BAD_ROW] = 1e30
    model.evaluate(x, y, batch_size=ROWS, verbose=0)
    options = {"epochs": 2, "update_freq": 1, "validation_data": (x, y)}
    run = watched(tempfile.mkdtemp(), (x, y), model, **options)
    skipped = run.scalars("skipped_steps")
    assert [*skipped.values()] == [*[0] * 3, *[1] * 6, *[2] * 4], skipped
    steps = [event["at_step"] for event in run.told("skipped_step")]
    assert steps == [3, 9], steps
    # The batch of the skipped step counts on neither device.
    mean = np.square([*values[:2], *values[3:]]).mean()
    for shown in run.history["loss"], run.history["mse"]:
        np.testing.assert_allclose(shown, [mean] * 2, rtol=1e-6)


if __name__ == "__main__":
    for name in OPTIMIZERS:
        one_log_has_the_steps_of_both(name)
    print("done")
