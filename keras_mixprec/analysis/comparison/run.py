"""`compare_precisions`: the same training under several policies."""

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
from keras_mixprec.analysis.comparison import training
from keras_mixprec.analysis.comparison.arms import ArmRequest, parse_arms
from keras_mixprec.analysis.comparison.result import (
    FORMAT,
    KIND,
    VERSION,
    ComparisonResult,
)
from keras_mixprec.analysis.comparison.sources import (
    check_function,
    check_sendable,
    read_batches,
    resolve,
    samples,
)
from keras_mixprec.analysis.doctor.machine import find_versions
from keras_mixprec.analysis.isolated import EndedError, Isolated, Threaded
from keras_mixprec.analysis.resume import ResumeFile, fingerprint, surroundings
from keras_mixprec.backend import active
from keras_mixprec.devices.found import find_devices

# Endings of metric names that tell which end is better.
_HIGHER = ("acc", "accuracy", "auc", "precision", "recall", "iou", "score")
_LOWER = ("loss", "error", "mae", "mse", "mape", "msle", "crossentropy")

# A process needs seconds to end. One that hangs is killed.
_SECONDS_TO_END = 30

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
    """Trains a model under several policies, and measures what each brings.

    Each policy trains in one `fit`, on the same batches in the same order and
    from the same initial weights. Its losses equal the losses of a plain `fit`
    of `build()` under that policy. An epoch is a block of steps, and policies
    take turns block by block. A machine that slows down then slows down all of
    them. The first block compiles functions, so it is not timed. One that fails
    is a row that says why.

    All models of a seed exist at the same time, each with its variables and its
    optimizer's. In one process only one of them trains at a time and needs
    further memory. Random seeds are set.

    A policy by name is Keras' own, on every layer. `apply_policy` keeps the
    output in float32. To compare such a model, give the plan that it returns:
    `apply_policy(build(), "mixed_float16")`.

    Args:
        build: Function without arguments that returns a compiled model, or
            `"module:name"` of one. It is called under each policy, which its
            layers follow unless they are given a dtype of their own.
        data: Arrays `(x, y)` or `(x, y, sample_weight)`; batches, such as a
            `tf.data.Dataset`, a `DataLoader` or a `PyDataset`; a function that
            returns one of these; or `"module:name"`. Batches are read once, as
            many as there are steps, kept in memory, and repeated in this order
            if there are fewer.
        policies: List, or dict by name, of policy names and `PrecisionPlan`s.
            With more in force, joined by `+`, or in a tuple behind a plan:
            `"float32+tf32"`, or what else `set_matmul_precision` takes;
            `"float32+graph_rewrite_bfloat16"`, as by `graph_rewrite`;
            `"mixed_float16+monitor+tuner"`, with our callbacks at their
            defaults. All are compared with the first.
        metric: String, a key of what `model.evaluate(return_dict=True)`
            returns, or a function of the trained model that returns a number.
            Defaults to `"loss"`.
        mode: String. `"min"` or `"max"`: which end of the metric is better.
            Defaults to `"auto"`, by its name.
        tolerance: Float. How much worse than the first policy's the metric may
            be, as a share. Defaults to `0.002`.
        seeds: Int, how many times each policy trains, with other initial
            weights each time; or a list of seeds. Defaults to `3`.
        steps: Int. Training steps of each policy with each seed. Defaults to
            `100`.
        blocks: Int of at least 2 that divides `steps`. Defaults to `10`.
        batch_size: Int. Samples per batch of arrays. Defaults to `32`.
        validation_data: Data for the metric, in the form of `data`. The metric
            uses all of it. Defaults to `None`, the training data.
        callbacks: Function without arguments that returns a list of callbacks
            for one `fit`, or `"module:name"`. Defaults to `None`.
        isolate: Boolean. If `True`, each policy trains in a new process. The
            process imports `build` and the script of the call, so call it below
            `if __name__ == "__main__":`. Defaults to `False`.
        resume: String or path-like, a JSON file: what is finished is kept
            there, and the same call continues from it. Defaults to `None`.
        verbose: `0` or `1`. `1` shows a progress bar that counts the blocks.

    Returns:
        A `ComparisonResult`: `print` it, show it in a notebook, take its
        `best()`, or `save(path)` it.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a value is not allowed, data have no batch, or something
            cannot be imported. Also if `resume` belongs to another comparison,
            or if all policies fail with the same error.

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
    arms = parse_arms(policies)
    steps = _check_steps(steps, blocks)
    batch_size = check_integer("batch_size", batch_size, low=1)
    check_choice("isolate", isolate, (True, False))
    check_choice("verbose", verbose, (0, 1))
    check_function("build", build)
    check_function("callbacks", callbacks, optional=True)
    code = {"build": build, "metric": metric, "callbacks": callbacks}
    if isolate:
        what = "With `isolate=True` each policy is trained"
        for name, value in code.items():
            check_sendable(name, value, what)
    higher = _higher_is_better(metric, mode)
    seeds = _check_seeds(seeds)
    tolerance = check_number("tolerance", tolerance, low=0.0)
    with training.random_state_kept():
        batches = read_batches("data", data, batch_size, steps)
        held_back = batches
        if validation_data is not None:
            name = "validation_data"
            held_back = read_batches(name, validation_data, batch_size)
        device = find_devices()
        facts = {
            "backend": device["backend"],
            "device": ", ".join(dict.fromkeys(device["devices"])),
            "versions": find_versions() | active.runtime().versions(),
            "batch_size": samples(batches.batches[0]),
            "samples_per_step": batches.samples_per_step(steps),
            "metric_samples": sum(map(samples, held_back.batches)),
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
        near = max(round(steps / blocks), 1) * blocks
        raise ValueError(
            "`steps` must be a multiple of `blocks`, which are equally long: "
            f"`steps={near}` is. Received: steps={steps}, blocks={blocks}"
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
            f"ones. Received: seeds={seeds!r}"
        )
    return found


def _higher_is_better(metric, mode):
    check_choice("mode", mode, ("auto", "min", "max"))
    if not isinstance(metric, str) and not callable(metric):
        raise TypeError(
            "`metric` must be the name of a metric, or a function of the "
            f"model. Received: metric={metric!r} of type "
            f"{type(metric).__name__}"
        )
    if mode != "auto":
        return mode == "max"
    name = metric if isinstance(metric, str) else ""
    if not name.endswith(_HIGHER + _LOWER):
        raise ValueError(
            "Whether a higher metric is better does not follow from its name: "
            "check its spelling, or give `mode`, 'min' or 'max'. "
            f"Received: metric={metric!r}"
        )
    return name.endswith(_HIGHER)


def _named(metric):
    """A metric's name; of a function, one with a colon."""
    if isinstance(metric, str):
        return metric
    name = getattr(metric, "__qualname__", type(metric).__qualname__)
    return f"{getattr(metric, '__module__', '')}:{name}"


def _code(name, value):
    # A metric may be named as `evaluate` does.
    named = name == "metric" and ":" not in str(value)
    return value if named else resolve(name, value)


class _Worker:
    """The training of one arm with one seed, seen from the comparison.

    A thread has Keras' global policy, names and seeds for itself, so that it
    trains as a program would that does nothing else; only one trains at a
    time.
    """

    def __init__(self, arm, seed, job):
        if job.isolated:
            self._training: Threaded = Isolated(
                training.run,
                (arm, seed, job, None),
                KERAS_BACKEND=keras.backend.backend(),
            )
        else:
            own = getattr(keras.distribution, "distribution", lambda: None)()
            self._training = Threaded(training.run, (arm, seed, job, own))

    def turn(self):
        """Lets it train until its next message, which is returned."""
        try:
            return self._training.ask("go")
        except EndedError as error:
            return "failed", (str(error), error.printed)

    def stop(self):
        """Ends it, at the end of its turn."""
        self._training.send("stop")
        self._training.close(_SECONDS_TO_END)


def _run(store, arms, job, verbose):
    """Trains all, and returns the traceback of the last failure."""
    seeds = store.record["seeds"]
    total = sum(len(store.missing(seed)) for seed in seeds) * job.blocks
    shown = verbose if total else 0
    bar = keras.utils.Progbar(total, verbose=shown, unit_name="block")
    count = itertools.count(1)

    traceback = ""

    def told(name, failure):
        nonlocal traceback
        if failure:
            traceback = failure[1]
            if verbose:
                print_message(f"\n{name} failed: {failure[0]}")
        bar.update(next(count), finalize=False)

    for seed in seeds:
        with contextlib.ExitStack() as stack:
            workers = {}
            for arm in arms:
                if arm.name in store.missing(seed):
                    unknown = store.arm(arm.name)["memory"] is None
                    own = dataclasses.replace(job, asks_for_memory=unknown)
                    workers[arm.name] = _Worker(arm, seed, own)
                    stack.callback(workers[arm.name].stop)
            _take_turns(store, workers, told)
    bar.update(total, finalize=True)
    return traceback


def _take_turns(store, workers, told):
    """Lets one after the other train a block, until all are done."""
    turn = 0
    while workers:
        # The order rotates, so that no policy always follows the same one.
        names = list(workers)
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            kind, content = workers[name].turn()
            if kind == "done":
                store.add(name, content)
            elif kind == "failed":
                store.fail(name, content[0])
            told(name, content if kind == "failed" else None)
            if kind != "block":
                workers.pop(name)
        turn += 1


def _check_any_done(record, batches, traceback):
    """Raises the error that all policies have: it is the fault of none."""
    errors = {arm["error"] for arm in record["arms"]}
    if any(arm["seeds"] for arm in record["arms"]) or len(errors) > 1:
        return
    hint = ""
    if len(batches.batches[0]) < 2:
        hint = ". `data` has no targets: give `(x, y)`. Received: x alone"
    error = ValueError(f"No policy could be trained. {errors.pop()}{hint}")
    error.add_note(traceback)
    raise error


class Store:
    """The record, as it grows.

    Args:
        facts: Dict. All of the record but `format`, `version`, `time` and
            `arms`.
        arms: List of `ArmRequest`.
        resume: As `compare_precisions` takes it.
        asked: Dict, as `ResumeFile` takes it.

    Attributes:
        record: Dict, whose keys docs/files.md lists.
    """

    def __init__(
        self,
        facts: dict[str, Any],
        arms: list[ArmRequest],
        resume: Any,
        asked: dict,
    ):
        self._file = ResumeFile(resume, KIND, asked)
        before = self._file.found
        now = time.gmtime(_clock.wall())
        self.record: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", now),
            **facts,
            "arms": [_empty(arm) for arm in arms],
        }
        if before:
            self._continue(before)
        self._file.found = self.record
        self._file.save()

    def arm(self, name: str) -> dict:
        """Returns the arm of that name."""
        return next(a for a in self.record["arms"] if a["name"] == name)

    def missing(self, seed: int) -> list[str]:
        """Returns the names of the arms that a seed has still to be done of."""
        return [
            arm["name"]
            for arm in self.record["arms"]
            if arm["status"] == "done"
            and all(done["seed"] != seed for done in arm["seeds"])
        ]

    def add(self, name: str, found: dict[str, Any]) -> None:
        """Takes what one training has measured.

        Args:
            name: String, of the arm.
            found: Dict, as `training.run` sends it.
        """
        arm, seed = self.arm(name), {**found}
        arm |= seed.pop("arm")
        # Seeds may finish in any order.
        arm["seeds"].append(seed)
        arm["seeds"].sort(key=lambda s: self.record["seeds"].index(s["seed"]))
        self._file.save()

    def fail(self, name: str, error: str) -> None:
        """Takes note that an arm has failed, and why."""
        self.arm(name).update(status="failed", error=error)
        self._file.save()

    def _continue(self, before):
        self.record["time"] = before["time"]
        for arm, other in zip(self.record["arms"], before["arms"], strict=True):
            kept = [
                s for s in other["seeds"] if s["seed"] in self.record["seeds"]
            ]
            # One that failed is tried once more.
            if kept:
                arm |= {**other, "status": "done", "error": None, "seeds": kept}


def _empty(arm):
    return {
        **arm.to_dict(),
        "status": "done",
        "error": None,
        "notes": [],
        "share_of_flops_16bit": None,
        "memory": None,
        "seeds": [],
    }
