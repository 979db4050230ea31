"""A training process that is killed leaves a log."""

import os
import signal
import subprocess
import sys

from monitor_models import scalars, told
from reporting_readers import poll

TRAINING = """
import os
import sys
import keras
sys.path.insert(0, sys.argv[2])
from monitor_models import BACKEND, BAD, fit, good, monitor, one_weight

class Tell(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print(epoch, flush=True)

epochs = int(sys.argv[3])
model = one_weight(jit=BACKEND == "jax")
callbacks = [monitor(sys.argv[1], update_freq=1), Tell()]
fit(model, [*good(3), BAD] * epochs, callbacks, epochs=epochs)
"""


def training(log_dir, epochs):
    here = os.path.dirname(__file__)
    return subprocess.Popen(
        [sys.executable, "-c", TRAINING, log_dir, here, str(epochs)],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_sigkill_loses_nothing_that_was_written(tmp_path):
    with training(tmp_path, 100000) as process:
        try:
            printed = [int(process.stdout.readline()) for _ in range(3)]
        finally:
            process.send_signal(signal.SIGKILL)
    assert printed == [0, 1, 2]
    points = scalars(tmp_path, "skipped_steps")
    assert max(points) >= 12
    assert all(count == step // 4 for step, count in points.items())
    assert list(points) == list(range(len(points)))
    skipped = [e["at_step"] for e in told(tmp_path, "skipped_step")]
    assert skipped[:3] == [4, 8, 12]
    with training(tmp_path, 1) as again:
        assert poll(lambda: again.poll() is not None)
    after = [step for step in scalars(tmp_path, "loss_scale")]
    # It goes on at the step that the one before ended with.
    assert after == list(range(max(points) + 5))
