"""`compare_precisions`: compares policies by training."""

import contextlib
import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras

from keras_mixprec import _clock
from keras_mixprec._checks import check_choice, check_integer, check_number
from keras_mixprec._console import print_message
from keras_mixprec.analysis import isolated
from keras_mixprec.analysis.comparison import sources, training
from keras_mixprec.analysis.comparison.result import (
    FORMAT,
    KIND,
    VERSION,
    ComparisonResult,
)
from keras_mixprec.analysis.doctor.machine import find_versions
from keras_mixprec.analysis.resume import ResumeFile, fingerprint, surroundings
from keras_mixprec.backend import active
from keras_mixprec.devices.found import find_devices

# With `mode="auto"`, the ending of the metric's name tells whether higher is
# better.
_HIGHER = ("acc", "accuracy", "auc", "precision", "recall", "iou", "score")
_LOWER = ("loss", "error", "mae", "mse", "mape", "msle", "crossentropy")

_POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")


def compare_precisions(
    build: Callable[[], keras.Model] | str,
    data: Any,
    policies: Iterable | Mapping = _POLICIES,
    *,
    metric: str | Callable[[keras.Model], float] = "loss",
    mode: str = "auto",
    tolerance: float = 0.002,
    seeds: int | Iterable[int] = 3,
    steps: int = 100,
    blocks: int = 10,
    batch_size: int = 32,
    validation_data: Any = None,
    callbacks: Callable[[], list] | str | None = None,
    isolate: bool = False,
    resume: str | os.PathLike | None = None,
    verbose: int = 1,
) -> ComparisonResult:
    """Compares the speed, memory and accuracy of policies by training.

    Each policy trains in one `fit`, on the same batches in the same order and
    from the same initial weights. The losses equal the losses of a plain `fit`
    of `build()` under the same policy. An epoch is a block of steps. Policies
    take turns block by block, so a busy machine slows down all of them. The
    first block compiles functions, so it is not timed. If a policy fails, its
    row says why.

    All models with the same seed are in memory at once, with their optimizers,
    but only one of them trains at a time. The function sets random seeds, and
    restores the random state at its end.

    The name of a policy means Keras' own policy on every layer. `apply_policy`
    keeps some layers in float32. To compare its result, pass the plan:
    `apply_policy(build(), "mixed_float16")`.

    Args:
        build: Function without arguments that returns a compiled model, or
            `"module:name"` of one. The function is called under each policy.
            Layers follow this policy unless they have a dtype of their own.
        data: Arrays `(x, y)` or `(x, y, sample_weight)`; batches, such as a
            `tf.data.Dataset`, a `DataLoader` or a `PyDataset`; a function that
            returns one of these; or `"module:name"`. At most `steps` batches
            are read, and kept in memory. If there are fewer batches, they are
            repeated in the same order.
        policies: List, or dict by name, of policy names and `PrecisionPlan`s.
            The first one is the reference. Settings are added with `+`, or
            follow a plan in a tuple: `"float32+tf32"` or any other name for
            `set_matmul_precision`, `"float32+graph_rewrite_bfloat16"` for
            `graph_rewrite`, `"mixed_float16+monitor+tuner"` for our callbacks.
        metric: String, a key of the result of
            `model.evaluate(return_dict=True)`, or a function that takes the
            trained model and returns a number. Defaults to `"loss"`.
        mode: String. `"min"` if a lower metric is better, `"max"` if a higher
            one is. Defaults to `"auto"`: the name of the metric decides.
        tolerance: Float. How much worse the metric may be, as a share of the
            first policy's metric. Defaults to `0.002`.
        seeds: Int, how many times to train with each policy, with new initial
            weights each time; or a list of seeds. Defaults to `3`.
        steps: Int. Number of training steps for each policy and seed.
            Defaults to `100`.
        blocks: Int. Number of blocks into which the steps are divided, at least
            2. `steps` must be a multiple of `blocks`. Defaults to `10`.
        batch_size: Int. Samples per batch of arrays. Defaults to `32`.
        validation_data: Data for the metric, in the form of `data`. The metric
            uses all of it. Defaults to `None`: the training data.
        callbacks: Function without arguments that returns a list of callbacks
            for one `fit`, or `"module:name"`. Defaults to `None`.
        isolate: Boolean. If `True`, each policy trains in a new process. The
            process imports `build` and the calling script, so call this
            function below `if __name__ == "__main__":`. Defaults to `False`.
        resume: String or path-like, a JSON file that stores finished trainings.
            After an interruption, the same call continues from the file.
            Defaults to `None`.
        verbose: `0` or `1`. `1` shows a progress bar that counts the blocks.

    Returns:
        A `ComparisonResult`: `print` it, show it in a notebook, take its
        `best()`, or `save(path)` it.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument has a wrong value, there are no data, or an
            import fails. Also if `resume` belongs to a different comparison, or
            if all policies fail with the same error.

    Example:
    >>> def build():
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    ...     return model
    >>> data = np.ones((64, 4)), np.ones((64, 1))
    >>> policies = "float32", "mixed_bfloat16"
    >>> result = compare_precisions(
    ...     build, data, policies, steps=4, blocks=2, seeds=1, verbose=0)
    >>> [row["status"] for row in result.rows]
    ['done', 'done']
    """
    arms = sources.parse_arms(policies)
    steps = _check_steps(steps, blocks)
    batch_size = check_integer("batch_size", batch_size, low=1)
    check_choice("isolate", isolate, (True, False))
    check_choice("verbose", verbose, (0, 1))
    sources.check_function("build", build)
    sources.check_function("callbacks", callbacks, optional=True)
    _code("metric", metric)
    code = {"build": build, "metric": metric, "callbacks": callbacks}
    if isolate:
        what = "With `isolate=True`, each policy is trained"
        for name, value in code.items():
            sources.check_sendable(name, value, what)
    higher = _higher_is_better(metric, mode)
    seeds = _check_seeds(seeds)
    tolerance = check_number("tolerance", tolerance, low=0.0)
    with training.random_state_kept():
        batches = sources.read_batches("data", data, batch_size, steps)
        held_back = batches
        if validation_data is not None:
            name = "validation_data"
            held_back = sources.read_batches(name, validation_data, batch_size)
        device = find_devices()
        facts = {
            "backend": device["backend"],
            "device": ", ".join(dict.fromkeys(device["devices"])),
            "versions": find_versions() | active.runtime().versions(),
            "batch_size": sources.samples(batches.batches[0]),
            "samples_per_step": batches.samples_per_step(steps),
            "metric_samples": sum(map(sources.samples, held_back.batches)),
            "steps": steps,
            "blocks": blocks,
            "seeds": seeds,
            "metric": _named(metric),
            "metric_higher_is_better": higher,
            "tolerance": tolerance,
        }
        asked = {}
        if resume is not None:
            asked = {
                **surroundings(),
                **{n: fingerprint(_code(n, v)) for n, v in code.items()},
                "data": fingerprint(batches.batches),
                "validation_data": fingerprint(held_back.batches),
                "policies": fingerprint([arm.to_dict() for arm in arms]),
                "steps": steps,
                "blocks": blocks,
                "mode": higher,
            }
        store = Store(facts, arms, resume, asked)
        data = batches, held_back
        job = training.Job(
            build, steps, blocks, metric, callbacks, data, isolate
        )
        traceback = _run(store, arms, job, verbose)
    _check_any_done(store.record, batches, traceback)
    return ComparisonResult(store.record)


def _check_steps(steps, blocks):
    steps = check_integer("steps", steps, low=1)
    blocks = check_integer("blocks", blocks, low=2)
    if steps % blocks:
        raise ValueError(
            "`steps` must be a multiple of `blocks`. "
            f"Received: steps={steps}, blocks={blocks}"
        )
    return steps


def _check_seeds(seeds):
    if isinstance(seeds, Iterable) and not isinstance(seeds, str):
        found = [check_integer("seeds", seed) for seed in seeds]
    else:
        found = list(range(check_integer("seeds", seeds)))
    if not found or len(set(found)) < len(found):
        raise ValueError(
            "`seeds` must be a positive integer, or a list of different "
            f"integers. Received: seeds={seeds!r}"
        )
    return found


def _higher_is_better(metric, mode):
    check_choice("mode", mode, ("auto", "min", "max"))
    if not isinstance(metric, str) and not callable(metric):
        raise TypeError(
            "`metric` must be the name of a metric, or a function of the "
            f"model. Received: metric={metric!r}"
        )
    if mode != "auto":
        return mode == "max"
    name = metric if isinstance(metric, str) else ""
    if not name.endswith(_HIGHER + _LOWER):
        raise ValueError(
            "The name does not say whether a higher metric is better. Check "
            "its spelling, or pass `mode='min'` or `mode='max'`. "
            f"Received: metric={metric!r}"
        )
    return name.endswith(_HIGHER)


def _named(metric):
    """Returns a metric's name. The name of a function has a colon."""
    if isinstance(metric, str):
        return metric
    name = getattr(metric, "__qualname__", type(metric).__qualname__)
    return f"{getattr(metric, '__module__', '')}:{name}"


def _code(name, value):
    # A metric without a colon is a key of `evaluate`'s result, not an import.
    named = name == "metric" and ":" not in str(value)
    return value if named else sources.resolve(name, value)


def _started(arm, seed, job):
    """Starts the training of one arm with one seed.

    Keras keeps the global policy, names and seeds for each thread, so an arm
    trains in its thread as if no other arm trained.
    """
    if job.isolated:
        return isolated.Isolated(
            training.run,
            (arm, seed, job, None),
            KERAS_BACKEND=keras.backend.backend(),
        )
    own = getattr(keras.distribution, "distribution", lambda: None)()
    return isolated.Threaded(training.run, (arm, seed, job, own))


def _run(store, arms, job, verbose):
    """Trains all arms, and returns the traceback of the last failure."""
    seeds = store.record["seeds"]
    total = sum(len(store.missing(seed)) for seed in seeds) * job.blocks
    shown = verbose if total else 0
    bar = keras.utils.Progbar(total, verbose=shown, unit_name="block")
    count = itertools.count(1)
    traceback = ""
    for seed in seeds:
        with contextlib.ExitStack() as stack:
            workers = {}
            for arm in arms:
                if arm.name in store.missing(seed):
                    unknown = store.arm(arm.name)["memory"] is None
                    own = dataclasses.replace(job, asks_for_memory=unknown)
                    workers[arm.name] = worker = _started(arm, seed, own)
                    stack.callback(worker.close, isolated.SECONDS_TO_END)
                    stack.callback(worker.send, "stop")
            for name, kind, content in _turns(workers):
                if kind == "done":
                    store.add(name, content)
                elif kind == "failed":
                    why, traceback = content
                    store.arm(name).update(status="failed", error=why)
                    store.save()
                    if verbose:
                        print_message(f"\n{name} failed: {why}")
                bar.update(next(count), finalize=False)
    bar.update(total, finalize=True)
    return traceback


def _turns(workers):
    """Lets the workers train a block in turns, and yields their answers."""
    for turn in itertools.count():
        names = list(workers)
        if not names:
            return
        # The order rotates, so that no policy always trains first.
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            try:
                kind, content = workers[name].ask("go")
            except isolated.EndedError as error:
                kind, content = "failed", (str(error), error.printed)
            if kind != "block":
                workers.pop(name)
            yield name, kind, content


def _check_any_done(record, batches, traceback):
    """Raises if all policies failed with the same error."""
    errors = {arm["error"] for arm in record["arms"]}
    if any(arm["seeds"] for arm in record["arms"]) or len(errors) > 1:
        return
    hint = ""
    if len(batches.batches[0]) < 2:
        hint = ". `data` has no targets: pass `(x, y)`. Received: only x"
    error = ValueError(f"No policy could be trained. {errors.pop()}{hint}")
    error.add_note(traceback)
    raise error


class Store:
    """The record of a comparison, saved after each training.

    Args:
        facts: Dict. The record without `format`, `version`, `time` and `arms`.
        arms: List of `ArmRequest`.
        resume: As `compare_precisions` takes it.
        asked: Dict, as `ResumeFile` takes it.

    Attributes:
        record: Dict, whose keys docs/files.md lists.
    """

    def __init__(
        self,
        facts: dict[str, Any],
        arms: list[sources.ArmRequest],
        resume: Any,
        asked: dict,
    ):
        self._file = ResumeFile(resume, KIND, asked)
        before = self._file.found
        now = time.gmtime(_clock.wall())
        self.record: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "time": before.get("time", time.strftime(_TIME, now)),
            **facts,
            "arms": [{**arm.to_dict(), **_NOTHING_YET} for arm in arms],
        }
        for arm, other in zip(arms, before.get("arms", ()), strict=False):
            done = [s for s in other["seeds"] if s["seed"] in facts["seeds"]]
            # When a comparison resumes, an arm that failed is tried once more.
            if done:
                again = {"status": "done", "error": None}
                self.arm(arm.name).update({**other, **again, "seeds": done})
        self._file.found = self.record
        self.save = self._file.save
        self.save()

    def arm(self, name: str) -> dict:
        """Returns the arm with this name."""
        return next(a for a in self.record["arms"] if a["name"] == name)

    def missing(self, seed: int) -> list[str]:
        """Returns the names of the arms that have yet to train with a seed."""
        return [
            arm["name"]
            for arm in self.record["arms"]
            if arm["status"] == "done"
            and all(done["seed"] != seed for done in arm["seeds"])
        ]

    def add(self, name: str, found: dict[str, Any]) -> None:
        """Adds the measurements of one training.

        Args:
            name: String, the arm.
            found: Dict, as `training.run` sends it.
        """
        arm, seed = self.arm(name), {**found}
        arm |= seed.pop("arm")
        # Sort the seeds, because a resumed call may add them in a different
        # order.
        arm["seeds"] = sorted(
            [*arm["seeds"], seed],
            key=lambda s: self.record["seeds"].index(s["seed"]),
        )
        self.save()


_TIME = "%Y-%m-%dT%H:%M:%SZ"
_NOTHING_YET = {
    "status": "done",
    "error": None,
    "notes": [],
    "share_of_flops_16bit": None,
    "memory": None,
    "seeds": [],
}
