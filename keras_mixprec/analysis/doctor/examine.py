"""Examines the active backend in this process."""

import os
from collections.abc import Callable

import keras

from keras_mixprec import _clock
from keras_mixprec.analysis.doctor.findings import judge
from keras_mixprec.analysis.doctor.machine import find_gpus, find_versions
from keras_mixprec.analysis.doctor.report import DoctorReport, now
from keras_mixprec.analysis.doctor.self_test import (
    check_formats,
    judge_results,
)
from keras_mixprec.analysis.doctor.speed import measure_speed, training_speed
from keras_mixprec.backend import active
from keras_mixprec.devices import measured
from keras_mixprec.devices.found import find_devices, list_devices
from keras_mixprec.devices.native_formats import formats_of
from keras_mixprec.policies.hardware import recommend_policy
from keras_mixprec.policies.matmul_precision import in_force

# Environment variables that the report lists, because they change the speed or
# the results of computing in 16 bits.
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_TF32_OVERRIDE",
    "TF_ENABLE_ONEDNN_OPTS",
    "ONEDNN_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "JAX_PLATFORMS",
    "JAX_DEFAULT_MATMUL_PRECISION",
    "XLA_FLAGS",
    "OMP_NUM_THREADS",
)


def examine(quick: bool, say: Callable) -> DoctorReport:
    """Returns the report on the active backend.

    Args:
        quick: Boolean. If `True`, measures less.
        say: Function that shows a line of progress.
    """
    start = _clock.now()
    say("devices and versions")
    gpus = find_gpus()
    capabilities = find_devices()
    kind, devices = _devices(capabilities["instructions"], gpus)
    versions = find_versions() | active.runtime().versions()
    if gpus.driver:
        versions["driver"] = gpus.driver
    name, version = keras.backend.backend(), capabilities["version"]
    backend = {"name": name, "version": version, "status": "ok", "error": ""}
    facts = capabilities | {**backend, "backend": name, "versions": versions}
    findings = judge(facts, gpus)
    say("results of each format against float64")
    supports = devices[0]["formats"]
    results = check_formats(_formats(supports, quick=False))
    findings += judge_results(results, devices[0]["name"])
    rows = []
    if results[0].status != "fails":
        rows = measure_speed(kind, _formats(supports, quick), quick, say)
    cache = ""
    if speed := training_speed(rows):
        wrong = dict.fromkeys(r.format for r in results if r.status == "wrong")
        found = measured.Measured(speed, tuple(wrong), now()[:10], quick)
        cache = measured.save(capabilities, found)
    picked = recommend_policy()
    findings.sort(key=lambda finding: finding.level)
    return DoctorReport(
        backend=backend,
        kind=kind,
        devices=devices,
        versions=versions,
        settings=_settings(),
        speed=[row._asdict() for row in rows],
        self_test=[result._asdict() for result in results],
        findings=[f._asdict() for f in findings],
        cache=cache,
        recommendation={"policy": picked.policy, "reason": picked.reason},
        quick=quick,
        seconds=_clock.now() - start,
    )


def _settings():
    """Returns the settings that matter in 16 bits, by name."""
    found = {n: os.environ[n] for n in _VARIABLES if n in os.environ}
    found["matmul precision"] = str(in_force())
    policy = keras.config.dtype_policy().name
    if policy != "float32":
        found["global policy"] = policy
    return found


def _devices(instructions, gpus):
    kind, devices = list_devices()
    # TensorFlow reports no memory before it initializes a device, so use the
    # memory that nvidia-smi reports.
    known = gpus.memory if len(gpus.memory) == len(devices) else ()
    known = known or [None] * len(devices)
    return kind, [
        {
            "name": device.name,
            "memory": device.memory or memory,
            "capability": ".".join(map(str, device.capability or ())) or None,
            "architecture": device.architecture,
            "instructions": instructions and list(instructions),
            "formats": _supports(kind, device, instructions),
        }
        for device, memory in zip(devices, known, strict=True)
    ]


def _supports(kind, device, instructions):
    capability, architecture = device.capability, device.architecture
    found = formats_of(
        kind, device.name, capability, architecture, instructions
    )
    return {format: support._asdict() for format, support in found.items()}


def _formats(supports, quick):
    """Returns the formats to try. A quick report omits emulated formats."""
    tf32 = ["tf32"] if supports["tf32"]["status"] == "native" else []
    return ["float32", *tf32] + [
        format
        for format in ("bfloat16", "float16")
        if not quick or supports[format]["status"] != "emulated"
    ]
