"""torch's settings for float32 products: one switch for each library.

This module sets the older `torch.set_float32_matmul_precision` and
`torch.backends.cudnn.allow_tf32`. If only the newer switches were set, torch
raises an error when code reads the older ones. Convolutions on a CPU have only
a newer switch.
"""

import contextlib
import functools

import torch

_PRODUCTS = {
    "default": "highest",
    "float32": "highest",
    "tf32": "high",
    "bfloat16": "medium",
}
_CONVOLUTIONS = {"default": "none", "bfloat16": "bf16"}
_NAMES = {"none": "float32", "ieee": "float32", "tf32": "tf32"}
_NAMES |= {"bf16": "bfloat16", "highest": "float32", "high": "tf32"}


def put(name, kind):
    torch.set_float32_matmul_precision(_PRODUCTS[name])
    torch.backends.cudnn.allow_tf32 = name != "float32"
    if hasattr(torch.backends.mkldnn, "conv"):
        value = _CONVOLUTIONS.get(name, "ieee")
        torch.backends.mkldnn.conv.fp32_precision = value


@contextlib.contextmanager
def scope(name, kind):
    before = _state()
    put(name, kind)
    try:
        yield
    finally:
        _restore(before)


def local_scope(name):
    return scope(name, "cuda")


def read(kind):
    backends = torch.backends
    if not hasattr(backends.mkldnn, "conv"):
        products = _NAMES.get(torch.get_float32_matmul_precision(), "tf32")
        tf32 = kind == "cuda" and backends.cudnn.allow_tf32
        return products, "tf32" if tf32 else "float32"
    if kind == "cuda":
        switches = backends.cuda.matmul, backends.cudnn.conv
    else:
        switches = backends.mkldnn.matmul, backends.mkldnn.conv
    return tuple(_NAMES[switch.fp32_precision] for switch in switches)


@functools.cache
def names_of_cpu():
    # torch's switch allows oneDNN to use bfloat16, but oneDNN does so on some
    # CPUs only. To find out, compute a product that bfloat16 would round. With
    # torch 2.13, a CPU with AVX512-BF16 but without AMX computed the product in
    # float32.
    size = 256
    with scope("bfloat16", "cpu"), torch.no_grad():
        odd = torch.eye(size, device="cpu") * (1 + 2**-12)
        product = odd @ torch.eye(size, device="cpu")
    return () if bool((product == odd).all()) else ("bfloat16",)


def _switches():
    backends = torch.backends
    if not hasattr(backends.mkldnn, "conv"):
        return []
    return [
        backends.cuda.matmul,
        backends.cudnn.conv,
        backends.cudnn.rnn,
        backends.mkldnn.matmul,
        backends.mkldnn.conv,
    ]


def _state():
    # The getters of torch's older switches raise an error if only the newer
    # switches were set.
    older = [None, None]
    with contextlib.suppress(RuntimeError):
        older[0] = torch.get_float32_matmul_precision()
    with contextlib.suppress(RuntimeError):
        older[1] = torch.backends.cudnn.allow_tf32
    return older, [switch.fp32_precision for switch in _switches()]


def _restore(state):
    (products, allows), values = state
    if products is not None:
        torch.set_float32_matmul_precision(products)
    if allows is not None:
        torch.backends.cudnn.allow_tf32 = allows
    for switch, value in zip(_switches(), values, strict=True):
        switch.fp32_precision = value
