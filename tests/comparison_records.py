"""Records of comparisons as data, without any training."""

from keras_mixprec.analysis.comparison.result import FORMAT, VERSION

STEPS = 0.1, 0.11, 0.1, 0.12, 0.1, 0.1


def arm(name, metrics, *, losses=(2.0, 1.0), steps=STEPS, **more):
    """The record of one arm, of a metric by seed."""
    seeds = [
        {
            "seed": seed,
            "losses": list(losses),
            "metric": metric,
            "skipped_steps": 0,
            "seconds_lost": 0.0,
            "step_seconds": list(steps),
            "compile_seconds": 1.5,
            "energy_joules_per_sample": None,
        }
        for seed, metric in enumerate(metrics)
    ]
    return {
        "name": name,
        "policy": name,
        "settings": [],
        "status": "done",
        "error": None,
        "notes": [],
        "share_of_flops_16bit": 0.0,
        "memory": None,
        "seeds": seeds,
    } | more


def record(arms, **more):
    """The whole record."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "time": "2026-11-23T08:00:00+00:00",
        "backend": "torch",
        "device": "AMD EPYC",
        "versions": {"keras": "3.15.1", "torch": "2.13.0"},
        "batch_size": 32,
        "samples_per_step": 32.0,
        "metric_samples": 10**6,
        "steps": 14,
        "blocks": 7,
        "seeds": [0, 1, 2],
        "metric": "accuracy",
        "metric_higher_is_better": True,
        "tolerance": 0.002,
        "arms": list(arms),
    } | more


def memory(mib, **more):
    return {
        "peak_bytes": mib * 2**20,
        "measured_by": "process",
        "weights_bytes": None,
        "slots_bytes": None,
        "activations_bytes": None,
    } | more


def four_arms():
    """A gain, a loss of accuracy, one that is slower, one that failed."""
    base = 0.925, 0.930, 0.921
    slow = arm("mixed_float16", base, steps=[1.0] * 6, losses=[2.0, 0.9])
    slow["seeds"][0] |= {"skipped_steps": 4, "seconds_lost": 4.0}
    return [
        arm("float32", base, steps=[0.1] * 6, memory=memory(800)),
        arm(
            "mixed_bfloat16",
            (0.926, 0.930, 0.921),
            steps=[0.05, 0.05, 0.04, 0.0625, 0.04, 0.0625],
            losses=[2.1, 1.1],
            memory=memory(600, weights_bytes=3 * 2**20),
            share_of_flops_16bit=0.98,
        ),
        arm("bad", (0.8, 0.81, 0.79), steps=[0.02] * 6, losses=[2.5, 2.4]),
        slow,
        arm("broken", [], status="failed", error="ValueError: <no> memory"),
    ]
