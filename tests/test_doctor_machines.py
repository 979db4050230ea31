"""The doctor's judgement of machines as people recorded them."""

import json
import pathlib
import re

import pytest
from packaging.specifiers import SpecifierSet

from keras_mixprec.analysis.doctor.findings import judge
from keras_mixprec.analysis.doctor.known_bad import entries
from keras_mixprec.analysis.doctor.machine import Gpus, parse_nvidia_smi
from keras_mixprec.devices.native_formats import FORMATS, formats_of
from keras_mixprec.devices.processor import parse_cpuinfo, parse_sysctl
from keras_mixprec.policies.hardware import formats, recommend

FILE = pathlib.Path(__file__).parent / "recorded_machines.json"
MACHINES = json.loads(FILE.read_text())
URL = re.compile(r"https://\S+\.\S+/\S+")
USABLE = [m for m in MACHINES if m["kind"] is not None]
NATIVE = {"speed": {"bfloat16": 1.9}, "wrong": (), "date": "2026-11-23"}


def name_of(machine):
    return machine["name"]


def capabilities(machine):
    processor = None
    if "cpuinfo" in machine:
        processor = parse_cpuinfo(machine["cpuinfo"])
    elif "sysctl" in machine:
        processor = parse_sysctl(machine["sysctl"])
    found = {"status": "ok", "error": "", "instructions": None} | machine
    if processor:
        found |= {"devices": [processor.name]}
        found |= {"instructions": processor.instructions}
    return found


def gpus(machine):
    text = machine.get("nvidia_smi")
    found = parse_nvidia_smi(text) if text else Gpus()
    return found._replace(on_bus=machine.get("on_bus"))


def test_there_are_enough_of_them():
    assert len(MACHINES) >= 12
    assert len({m["name"] for m in MACHINES}) == len(MACHINES)


@pytest.mark.parametrize("machine", MACHINES, ids=name_of)
def test_each_says_where_it_was_recorded(machine):
    source = machine["source"]
    assert URL.fullmatch(source) or source.startswith("run: ")


@pytest.mark.parametrize("machine", MACHINES, ids=name_of)
def test_findings(machine):
    found = judge(capabilities(machine), gpus(machine))
    assert sorted(f.name for f in found) == sorted(machine["findings"])
    assert all(f.text and f.fix for f in found)


@pytest.mark.parametrize("machine", USABLE, ids=name_of)
def test_formats(machine):
    found = formats(capabilities(machine))
    assert set(found) == set(FORMATS)
    status = {format: found[format].status for format in machine["formats"]}
    assert status == machine["formats"]


@pytest.mark.parametrize(
    "machine", [m for m in USABLE if "policy" in m], ids=name_of
)
def test_recommendations(machine):
    found = capabilities(machine)
    assert recommend(found).policy == machine["policy"]
    measured = recommend(found | {"measured": NATIVE})
    # Only where the hardware does not decide it.
    assert measured.policy == machine.get("if_faster", _decided(machine))


def _decided(machine):
    unknown = machine["kind"] == "cpu"
    return "mixed_bfloat16" if unknown else machine["policy"]


@pytest.mark.parametrize("machine", USABLE, ids=name_of)
def test_every_claim_has_a_source(machine):
    for support in formats(capabilities(machine)).values():
        # What a CPU's own flags say needs none.
        own = machine["kind"] == "cpu" and support.status == "native"
        if support.status in ("native", "emulated") and not own:
            assert URL.fullmatch(support.source)


def test_a_native_cpu_without_a_measurement_names_the_doctor():
    machine = next(m for m in MACHINES if "EPYC" in m["name"])
    reason = recommend(capabilities(machine)).reason
    assert "AVX512-BF16" in reason
    assert "`keras-mixprec doctor`" in reason


def test_a_slow_measurement_says_float32():
    machine = next(m for m in MACHINES if "EPYC" in m["name"])
    slow = NATIVE | {"speed": {"bfloat16": 0.84}}
    found = recommend(capabilities(machine) | {"measured": slow})
    assert found.policy == "float32"
    assert "0.84 times" in found.reason
    assert "2026-11-23" in found.reason


def test_a_gpu_with_wrong_results_is_not_recommended_that_format():
    machine = next(m for m in MACHINES if m["name"] == "A100")
    wrong = {"speed": {}, "date": "2026-11-23", "wrong": ("bfloat16",)}
    found = recommend(capabilities(machine) | {"measured": wrong})
    assert found.policy == "mixed_float16"
    wrong["wrong"] = ("bfloat16", "float16")
    found = recommend(capabilities(machine) | {"measured": wrong})
    assert found.policy == "float32"
    assert "wrong results in bfloat16 and float16" in found.reason


def test_an_unknown_device_is_unknown():
    assert {s.status for s in formats_of("abacus").values()} == {"unknown"}


@pytest.mark.parametrize("entry", entries(), ids=name_of)
def test_each_known_bad_combination_is_well_formed(entry):
    fields = {"name", "level", "text", "fix", "evidence"}
    conditions = {"backend", "kind", "has", "lacks", "versions"}
    assert fields <= entry.keys() <= fields | conditions
    assert conditions & entry.keys()
    assert entry["level"] in ("error", "warning")
    for wanted in entry.get("versions", {}).values():
        assert SpecifierSet(wanted)


@pytest.mark.parametrize("entry", entries(), ids=name_of)
def test_each_known_bad_combination_has_evidence_and_was_recorded(entry):
    evidence = entry["evidence"]
    assert URL.fullmatch(evidence) or evidence.startswith("run: ")
    matches = [m for m in MACHINES if entry["name"] in m["findings"]]
    assert 0 < len(matches) < len(MACHINES) / 2
