"""torch's devices, in the order in which Keras prefers them."""

import torch

from keras_mixprec.backend.device_interface import Device


def query():
    if torch.backends.mps.is_available():
        return "mps", [Device("Apple GPU")]
    if torch.cuda.is_available():
        count = range(torch.cuda.device_count())
        return ("rocm" if torch.version.hip else "cuda"), [*map(_cuda, count)]
    if torch.xpu.is_available():
        count = range(torch.xpu.device_count())
        return "xpu", [Device(torch.xpu.get_device_name(i)) for i in count]
    return "cpu", [Device("cpu")]


def _cuda(index):
    found = torch.cuda.get_device_properties(index)
    if not torch.version.hip:
        capability = found.major, found.minor
        return Device(found.name, capability, "", found.total_memory)
    # For AMD GPUs, `gcnArchName` is a name such as "gfx90a:sramecc+:xnack-".
    architecture = getattr(found, "gcnArchName", "").partition(":")[0]
    return Device(found.name, None, architecture, found.total_memory)
