"""Operations that peers compute in float32 whatever they are given."""

# Names as in `backend/operations.py`.
#
# torch: "CUDA Ops that can autocast to float32",
# https://pytorch.org/docs/stable/amp.html#cuda-ops-that-can-autocast-to-float32
TORCH = frozenset(
    {
        "acos",
        "asin",
        "cosh",
        "cumprod",
        "cumsum",
        "exp",
        "expm1",
        "log",
        "log1p",
        "log_softmax",
        "norm",
        "pow",
        "prod",
        "reciprocal",
        "rsqrt",
        "softmax",
        "softplus",
        "sum",
    }
)

# TensorFlow: the deny list of the graph rewrite, `FloatDenyList` of
# tensorflow/core/grappler/optimizers/auto_mixed_precision_lists.h.
TENSORFLOW = frozenset({"exp", "expm1", "norm", "mean", "pow", "sum"})
