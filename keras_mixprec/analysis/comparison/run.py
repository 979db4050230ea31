"""`compare_precisions`: the same training under several policies."""

import contextlib
import dataclasses
import gc
import os
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import numpy as np

from keras_mixprec._checks import check_choice, check_integer, check_number
from keras_mixprec._console import print_message
from keras_mixprec.analysis.comparison.arguments import (
    check_function,
    check_seeds,
    check_steps,
    higher_is_better,
)
from keras_mixprec.analysis.comparison.arms import parse_arms
from keras_mixprec.analysis.comparison.peak import (
    ALONE,
    ISOLATED,
    device_can_tell,
)
from keras_mixprec.analysis.comparison.result import ComparisonResult
from keras_mixprec.analysis.comparison.sources import (
    check_sendable,
    describe,
    resolve,
)
from keras_mixprec.analysis.comparison.store import Store
from keras_mixprec.analysis.comparison.training import Job
from keras_mixprec.analysis.comparison.workers import (
    Worker,
    in_process,
    in_thread,
    read_both,
)
from keras_mixprec.analysis.doctor.versions import find_versions
from keras_mixprec.analysis.resume import fingerprint, surroundings
from keras_mixprec.backend import active
from keras_mixprec.devices.found import find_devices

# What a worker's last message is.
_LAST = "done", "failed"

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
    tokens_per_sample: int | None = None,
    callbacks: Callable[[], list] | str | None = None,
    loss_scales: Any = None,
    isolate: bool = False,
    resume: str | os.PathLike | None = None,
    verbose: int = 1,
) -> ComparisonResult:
    """Trains a model under several policies, and measures what each brings.

    Each policy trains in one `fit`, on the same batches in the same order and
    from the same initial weights: its losses are those of a plain `fit` of
    `build()` under that policy. The steps are divided into blocks, of which an
    epoch is one, and policies take turns block by block, so that a machine
    that slows down slows all of them down. The first block, in which functions
    are compiled, is not timed. One that fails is a row that says why.

    All models of a seed are there at the same time, each with its own
    variables and its optimizer's; what they need beside these only one needs
    at a time, in one process. Random seeds are set.

    A policy by name is Keras' own, on every layer. To compare what
    `apply_policy` makes of a model, whose output stays in float32, give the
    plan that it returns: `apply_policy(build(), "mixed_float16")`.

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
        tolerance: Float. Share by which the metric may be worse than the
            first policy's. Defaults to `0.002`.
        seeds: Int, how many times each policy trains, with other initial
            weights each time; or a list of seeds. Defaults to `3`.
        steps: Int. Training steps of each policy with each seed. Defaults to
            `100`.
        blocks: Int, at least 2, of which `steps` is a multiple. Defaults to
            `10`.
        batch_size: Int. Samples per batch of arrays. Defaults to `32`.
        validation_data: As `data`, to take the metric on, all of it. Defaults
            to `None`: on what was trained on.
        tokens_per_sample: Int, to give throughput in tokens too. Defaults to
            `None`.
        callbacks: Function without arguments that returns a list of callbacks
            for one `fit`, or `"module:name"`. Defaults to `None`.
        loss_scales: List of what `LossScaleOptimizer` takes as `loss_scale`,
            and names of presets. Each policy that computes in float16 trains
            with each of them. Defaults to `None`: as `build` compiles it.
        isolate: Boolean. Whether each policy trains in a new process, which
            imports `build` and `data`, and a script that this is called in:
            call it below `if __name__ == "__main__":` there. Defaults to
            `False`.
        resume: String or path-like, a JSON file: what is finished is kept
            there, and the same call continues from it. Defaults to `None`.
        verbose: `0` or `1`. Whether a progress bar counts the blocks.

    Returns:
        A `ComparisonResult`: `print` it, show it in a notebook, take its
        `best()`, or `save(path)` it.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a value is not allowed, data have no batch, something
            cannot be imported, `resume` is of another comparison, or all
            policies fail alike, which is then the fault of none.

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
    arms = parse_arms(policies, loss_scales)
    steps = check_steps(steps, blocks)
    batch_size = check_integer("batch_size", batch_size, low=1)
    if tokens_per_sample is not None:
        tokens_per_sample = check_integer(
            "tokens_per_sample", tokens_per_sample, low=1
        )
    check_choice("isolate", isolate, (True, False))
    check_choice("verbose", verbose, (0, 1))
    check_function("build", build)
    check_function("callbacks", callbacks)
    facts = {
        "seeds": check_seeds(seeds),
        "metric": metric if isinstance(metric, str) else describe(metric),
        "metric_higher_is_better": higher_is_better(metric, mode),
        "tolerance": check_number("tolerance", tolerance, low=0.0),
        "steps": steps,
        "blocks": blocks,
        "isolate": isolate,
        "tokens_per_sample": tokens_per_sample,
    }
    sources = {
        "build": build,
        "data": data,
        "validation_data": validation_data,
        "metric": metric,
        "callbacks": callbacks,
    }
    code = {"build": build, "metric": metric, "callbacks": callbacks}
    if isolate:
        for name, value in sources.items():
            check_sendable(
                name, value, "With `isolate=True` each policy is trained"
            )
    with _random_state_kept():
        read = data, validation_data, batch_size, steps
        both = read_both(*read)
        facts |= _found(*both, steps)
        facts["sources"] = {n: describe(v) for n, v in sources.items()}
        if resume is not None:
            facts["fingerprints"] = {
                **surroundings(),
                **{n: fingerprint(_code(n, v)) for n, v in code.items()},
                "validation_data": both[1].digest(),
                "loss_scales": fingerprint([arm.loss_scale for arm in arms]),
            }
        store = Store(facts, arms, resume)
        job = Job(build, steps, blocks, metric, callbacks)
        if isolate:
            target: Callable = in_process
            rest: tuple = read, facts["batches_digest"]
            job = dataclasses.replace(job, where=ISOLATED)
        else:
            target, rest = in_thread, (both, _distribution())

        def start(arm, seed, job=job):
            unknown = store.arm(arm.name)["memory"] is None
            job = dataclasses.replace(job, asks_for_memory=unknown)
            return Worker(target, (arm, seed, job, *rest), isolate)

        if not isolate and device_can_tell():
            _measure_memory(store, arms, start, job)
        _run(store, arms, start, verbose)
        _check_any_done(store.record, both[0])
    return ComparisonResult(store.record)


def _measure_memory(store, arms, start, job):
    """Trains each policy for some steps alone, where others' is told apart."""
    few = dataclasses.replace(job, steps=4, blocks=2, where=ALONE)
    for arm in arms:
        if store.arm(arm.name)["memory"] is None:
            worker = start(arm, store.record["seeds"][0], few)
            kind = ""
            while kind not in _LAST:
                kind, content = worker.turn()
            worker.stop()
            gc.collect()
            if kind == "done":  # Why it fails is said when it takes its turn.
                store.remember(arm.name, content["arm"]["memory"])


def _run(store, arms, start, verbose):
    by_name = {arm.name: arm for arm in arms}
    seeds = store.record["seeds"]
    todo = sum(len(store.missing(seed)) for seed in seeds)
    progress = _Progress(todo * (store.record["blocks"] + 1), verbose)
    for seed in seeds:
        with contextlib.ExitStack() as stack:
            workers = {}
            for name in store.missing(seed):
                workers[name] = start(by_name[name], seed)
                stack.callback(workers[name].stop)
            _take_turns(store, workers, progress)
    progress.end()


def _take_turns(store, workers, progress):
    """Lets one after the other train a block, until all are done."""
    workers = dict(workers)
    answers = _build_all(store, workers, progress)
    turn = 0
    while workers:
        # Rotated, so that no policy is always behind the same one.
        names = list(workers)
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            answer = workers[name].turn(answers.pop(name, "go"))
            if _take(store, name, answer, progress):
                del workers[name]
        turn += 1


def _build_all(store, workers, progress):
    """Builds all models; returns the weights of those that need others'."""
    digests, first, answers = {}, None, {}
    for name in list(workers):
        answer = workers[name].turn()
        if _take(store, name, answer, progress):
            del workers[name]
        else:
            digests[name] = answer[1]
    for name, digest in digests.items():
        if first is None:
            first = name
        elif digest != digests[first]:
            if first not in answers:
                answers[first] = workers[first].turn("weights")[1]
            answers[name] = answers[first]
            store.note(
                name, f"its initial weights were set to those of {first!r}"
            )
    answers.pop(first, None)
    return answers


def _take(store, name, answer, progress):
    """Takes a worker's message; returns whether it was its last."""
    kind, content = answer
    if kind == "done":
        store.add(name, content)
    elif kind == "failed":
        store.fail(name, content)
        progress.say(f"{name} failed: {content}")
    progress.count()
    return kind in _LAST


def _check_any_done(record, batches):
    """Raises the error that all policies have: it is the fault of none."""
    errors = {arm["error"] for arm in record["arms"]}
    if any(arm["seeds"] for arm in record["arms"]) or len(errors) > 1:
        return
    hint = (
        ""
        if batches.has_targets
        else ". `data` has no targets: give `(x, y)`. Received: x alone"
    )
    raise ValueError(f"No policy could be trained. {errors.pop()}{hint}")


class _Progress:
    """A progress bar that counts blocks, building being one."""

    def __init__(self, total, verbose):
        self._count = 0
        self._total = total
        shown = verbose and total
        self._bar = shown and keras.utils.Progbar(total, unit_name="block")

    def count(self):
        self._count += 1
        if self._bar:
            self._bar.update(min(self._count, self._total - 1))

    def say(self, text):
        if self._bar:
            print_message(f"\n{text}")

    def end(self):
        if self._bar:
            self._bar.update(self._total, finalize=True)


def _found(batches, held_back, steps):
    device = find_devices()
    return {
        "backend": device["backend"],
        "device": ", ".join(dict.fromkeys(device["devices"])),
        "versions": find_versions() | active.runtime().versions(),
        "batch_size": batches.batch_size,
        "samples_per_step": batches.samples_per_step(steps),
        "batches_digest": batches.digest(),
        "metric_samples": held_back.samples(),
    }


def _code(name, value):
    # A metric is named as `evaluate` does.
    return value if name == "metric" else resolve(name, value)


def _distribution():
    known = getattr(keras.distribution, "distribution", None)
    return known() if known else None


@contextlib.contextmanager
def _random_state_kept():
    """Context behind which random numbers go on as before."""
    state = random.getstate(), np.random.get_state()
    own = active.runtime().random_state()
    try:
        yield
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])
        active.runtime().set_random_state(own)
