"""torch's versions, and functions run as in `fit`; see `interface.py`."""

import torch

MODES = ("eager",)


def versions():
    found = {"torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
        found["built for"] = " ".join(torch.cuda.get_arch_list())
    if torch.version.hip:
        found["rocm"] = torch.version.hip
    elif torch.backends.cudnn.is_available():
        number = torch.backends.cudnn.version()
        # cuDNN's version number has a form such as 90100 since cuDNN 9, and
        # such as 8902 before cuDNN 9.
        major, rest = divmod(number, 10000 if number >= 90000 else 1000)
        found["cudnn"] = f"{major}.{rest // 100}.{rest % 100}"
    return found


def compiled(function, mode):
    return function


def wait(tensors):
    if torch.backends.mps.is_available():
        torch.mps.synchronize()
    elif torch.cuda.is_available():
        torch.cuda.synchronize()
    elif torch.xpu.is_available():
        torch.xpu.synchronize()


def random_state():
    return torch.get_rng_state(), torch.cuda.get_rng_state_all()


def set_random_state(state):
    torch.set_rng_state(state[0])
    torch.cuda.set_rng_state_all(state[1])
