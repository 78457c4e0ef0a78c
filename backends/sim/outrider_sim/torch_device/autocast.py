"""Autocast: lists of operators that run in the lower precision, in float32, or in their operands' widest dtype.

The lists equal torch's lists for accelerators. Unlike torch, the cast of a weight isn't cached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_LOWER = """
_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm
chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell
rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention
"""

_FLOAT = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
_upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
_upsample_bicubic2d_aa norm.Scalar norm.ScalarOpt_dim
"""

# In float32 too, unless the caller names a dtype: they take it as an argument.
_FLOAT_RESULT = """
prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord sum sum.dim_IntList
"""

_WIDEST = """
addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
"""


def register(library: Any, kind: str) -> None:
    """Add the kernels to `library`, for autocast on devices called `kind`."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]  # the stubs lack it

    def eligible(value: Any) -> bool:
        return (
            isinstance(value, Tensor)
            and value.device.type == kind
            and value.is_floating_point()
            and value.dtype is not torch.float64
        )

    def cast(value: Any, dtype: torch.dtype) -> Any:
        if eligible(value):
            return value.to(dtype)
        if isinstance(value, list | tuple):
            return type(value)(cast(item, dtype) for item in value)
        return value

    def kernel(func: Any, chosen: Callable[[Sequence[Any], dict[str, Any]], torch.dtype | None]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(keys):
                dtype = chosen(args, kwargs)
                if dtype is not None:
                    args = tuple(cast(value, dtype) for value in args)
                    kwargs = {name: cast(value, dtype) for name, value in kwargs.items()}
                return func(*args, **kwargs)

        return run

    def lower(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.dtype:
        del args, kwargs
        return torch.get_autocast_dtype(kind)

    def single(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.dtype:
        del args, kwargs
        return torch.float32

    def single_unless_named(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.dtype | None:
        named = [
            *(value for value in args if isinstance(value, torch.dtype)),
            *([kwargs["dtype"]] if kwargs.get("dtype") else []),
        ]
        return None if named else torch.float32

    def widest(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.dtype | None:
        given: list[torch.dtype] = []
        for value in (*args, *kwargs.values()):
            given += [each.dtype for each in (value if isinstance(value, list | tuple) else (value,)) if eligible(each)]
        found = None
        for dtype in given:
            found = dtype if found is None else torch.promote_types(found, dtype)
        return found

    for names, chosen in ((_LOWER, lower), (_FLOAT, single), (_FLOAT_RESULT, single_unless_named), (_WIDEST, widest)):
        for full in names.split():
            name, _, overload = full.partition(".")
            func = getattr(getattr(torch.ops.aten, name, None), overload or "default", None)
            if func is not None:  # some go from one version of torch to the next
                library.impl(full, kernel(func, chosen), "AutocastPrivateUse1")

    def refused(*args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        raise RuntimeError(
            "binary_cross_entropy is unsafe under autocast: its input is a sigmoid in the lower precision; use "
            "binary_cross_entropy_with_logits, which takes what comes before the sigmoid"
        )

    library.impl("binary_cross_entropy", refused, "AutocastPrivateUse1")
