"""A comparison in a process of its own, for `test_resume.py`.

    python tests/compared_training.py FILE POLICY SEED [isolate]

Two policies, two seeds, resumed from FILE. It kills itself when the training
of POLICY with SEED has taken its first block.
"""

import os
import signal
import sys

import comparison_models as models
import keras

import keras_mixprec as kmp

POLICIES = "float32", "mixed_bfloat16"
KILLED_AT = "KILLED_AT"


class Killed(keras.callbacks.Callback):
    """Kills the whole process group at the end of the first epoch."""

    def on_epoch_end(self, epoch, logs=None):
        here = keras.config.dtype_policy().name
        if os.environ.get(KILLED_AT) == f"{here} {seed_of_this_thread()}":
            os.killpg(0, signal.SIGKILL)


def seed_of_this_thread():
    return keras.src.backend.common.global_state.get_global_attribute(
        "global_random_seed"
    )


def callbacks():
    return [Killed()]


def compare(path, **arguments):
    result = kmp.compare_precisions(
        models.dense,
        models.arrays,
        POLICIES,
        callbacks=callbacks,
        resume=path,
        seeds=2,
        steps=8,
        blocks=2,
        batch_size=models.BATCH,
        verbose=0,
        **arguments,
    )
    return result.to_dict()["record"]


if __name__ == "__main__":
    path, policy, seed, *rest = sys.argv[1:]
    os.environ[KILLED_AT] = f"{policy} {seed}"
    compare(path, isolate=rest == ["isolate"])
