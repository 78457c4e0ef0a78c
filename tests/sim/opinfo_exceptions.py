"""What differs from the host in all of torch's OpInfos, and why."""

import torch

SHAPES_ONLY = {
    **dict.fromkeys(
        (
            "bernoulli",
            "cauchy",
            "exponential",
            "geometric",
            "log_normal",
            "multinomial",
            "nn.functional.alpha_dropout",
            "nn.functional.dropout",
            "nn.functional.dropout2d",
            "nn.functional.dropout3d",
            "nn.functional.feature_alpha_dropout",
            "nn.functional.fractional_max_pool2d",
            "nn.functional.fractional_max_pool3d",
            "nn.functional.multi_head_attention_forward",
            "nn.functional.rrelu",
            "nn.functional.scaled_dot_product_attention",
            "normal",
            "rand_like",
            "randint",
            "randint_like",
            "randn",
            "randn_like",
            "svd_lowrank",
            "uniform",
        ),
        "it draws random numbers (some only with dropout), and the device's generator isn't the host's",
    ),
    **dict.fromkeys(
        ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
        "its values are undefined; the device's are poison",
    ),
}
"""Operators of which shapes and dtypes are compared, and not values."""

_SPARSE = "the device has strided tensors only, and says so"

DIFFERENT = {
    "as_strided:partial_views": "samples look beyond their tensors, at storage that a copy to the device leaves behind",
    "sparse.mm:reduce": _SPARSE,
    "sparse.sampled_addmm": _SPARSE,
    "to_sparse": _SPARSE,
    "tensor_split": "torch wants the indices on the host, whatever the device",
    "to": "samples name the host as the device to go to",
}
"""Operators with samples that end otherwise than on the host."""

if torch.__version__.startswith("2.11."):
    _EXPANDED = "its gradient writes into a copy of an expanded tensor, which torch refuses in 2.11"
    DIFFERENT |= dict.fromkeys(("diagonal_scatter", "select_scatter", "slice_scatter"), _EXPANDED)
