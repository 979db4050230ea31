"""PyTorch's devices, in the order in which Keras picks one."""

import torch


def query():
    """Returns kind, names and compute capabilities of the default devices."""
    if torch.backends.mps.is_available():
        return "mps", ["Apple GPU"], []
    if torch.cuda.is_available():
        return _cuda()
    if torch.xpu.is_available():
        count = torch.xpu.device_count()
        return "xpu", [torch.xpu.get_device_name(i) for i in range(count)], []
    return "cpu", ["cpu"], []


def _cuda():
    indices = range(torch.cuda.device_count())
    names = [torch.cuda.get_device_name(i) for i in indices]
    # A ROCm build answers with the numbers of AMD's architecture.
    if torch.version.hip:
        return "rocm", names, []
    return "cuda", names, [torch.cuda.get_device_capability(i) for i in indices]
