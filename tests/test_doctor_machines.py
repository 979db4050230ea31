"""The doctor's judgement of recorded machines."""

import json
import pathlib
import re

import pytest
from packaging.specifiers import SpecifierSet

from keras_mixprec.analysis.doctor.findings import entries, judge
from keras_mixprec.analysis.doctor.machine import Gpus, parse_nvidia_smi
from keras_mixprec.devices.native_formats import FORMATS
from keras_mixprec.devices.processor import parse_cpuinfo, parse_sysctl
from keras_mixprec.policies.hardware import formats, recommend, slow_because

pytestmark = pytest.mark.one_backend

FILE = pathlib.Path(__file__).parent / "recorded_machines.json"
MACHINES = {m["name"]: m for m in json.loads(FILE.read_text())}
URL = re.compile(r"https://\S+\.\S+/\S+")
EPYC = "AMD EPYC of family 25, model 17"
MEASURED = {"speed": {"bfloat16": 1.9}, "wrong": (), "date": "2026-11-23"}


def capabilities(machine, **more):
    processor = None
    if "cpuinfo" in machine:
        processor = parse_cpuinfo(machine["cpuinfo"])
    elif "sysctl" in machine:
        processor = parse_sysctl(machine["sysctl"])
    found = {"status": "ok", "error": "", "instructions": None} | machine
    if processor:
        found |= {"devices": [processor.name]}
        found |= {"instructions": processor.instructions}
    return found | more


def gpus(machine):
    text = machine.get("nvidia_smi")
    found = parse_nvidia_smi(text) if text else Gpus()
    return found._replace(on_bus=machine.get("on_bus"))


@pytest.mark.parametrize("name", MACHINES)
def test_a_recorded_machine(name):
    machine = MACHINES[name]
    assert URL.match(machine["source"]) or machine["source"].startswith("run: ")
    of_it = capabilities(machine)
    found = judge(of_it, gpus(machine))
    assert sorted(f.name for f in found) == sorted(machine["findings"])
    assert all(f.text and f.fix for f in found)
    if machine["kind"] is None:
        return
    supports = formats(of_it)
    assert supports.keys() == {*FORMATS}
    for format, status in machine["formats"].items():
        assert supports[format].status == status
    for support in supports.values():
        # The CPU's own flags need no source.
        own = machine["kind"] == "cpu" and support.status == "native"
        if support.status in ("native", "emulated") and not own:
            assert URL.fullmatch(support.source)
    if "policy" in machine:
        assert recommend(of_it).policy == machine["policy"]
        # Only where the hardware does not decide it.
        unknown = machine["kind"] == "cpu"
        decided = "mixed_bfloat16" if unknown else machine["policy"]
        measured = recommend(of_it | {"measured": MEASURED})
        assert measured.policy == machine.get("if_faster", decided)


SLOW = MEASURED | {"speed": {"bfloat16": 0.84}}
ONE_WRONG = MEASURED | {"speed": {}, "wrong": ("bfloat16",)}
BOTH_WRONG = ONE_WRONG | {"wrong": ("bfloat16", "float16")}


@pytest.mark.parametrize(
    ("name", "measured", "policy", "reason"),
    [
        (EPYC, None, "float32", "AVX512-BF16.*`keras-mixprec doctor`"),
        (EPYC, MEASURED, "mixed_bfloat16", r"1\.90 times"),
        (EPYC, SLOW, "float32", r"0\.84 times.*2026-11-23"),
        ("A100", ONE_WRONG, "mixed_float16", ""),
        ("A100", BOTH_WRONG, "float32", "wrong.* bfloat16 .*float16"),
    ],
)
def test_the_recommendation_goes_by_what_was_measured(
    name, measured, policy, reason
):
    of_it = capabilities(MACHINES[name], measured=measured)
    found = recommend(of_it)
    assert found.policy == policy
    assert re.search(reason, found.reason)
    # Whoever sets the policy all the same is warned.
    slow = slow_because("mixed_bfloat16", of_it)
    assert "0.84" in slow if measured is SLOW else slow == ""


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry["name"])
def test_a_known_bad_combination_is_well_formed_and_was_recorded(entry):
    fields = {"name", "level", "text", "fix", "evidence"}
    conditions = {"backend", "kind", "has", "lacks", "versions"}
    assert fields <= entry.keys() <= fields | conditions
    assert conditions & entry.keys()
    assert entry["level"] in ("error", "warning")
    for wanted in entry.get("versions", {}).values():
        assert SpecifierSet(wanted)
    evidence = entry["evidence"]
    assert URL.fullmatch(evidence) or evidence.startswith("run: ")
    seen = [entry["name"] in m["findings"] for m in MACHINES.values()]
    assert 0 < sum(seen) < len(seen) / 2
