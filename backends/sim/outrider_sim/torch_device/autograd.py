"""Autograd and autocast of the simulated device.

Torch's autograd engine holds a device guard while it runs a node, and for an external device the guard calls Python. A Python
error that is pending at that moment ends the process. An operator that fails without a Python frame between the engine and
itself therefore returns a placeholder instead of raising. Torch rejects this result with an error of its own, which
the guard survives; `SimAutogradEngine` then raises the operator's original error.

The lists of autocast equal torch's lists for accelerators: operators that run in the lower precision, in float32, or in their
operands' widest dtype. Unlike torch, the cast of a weight isn't cached.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable


class SimAutogradEngine(torch._C._ImperativeEngine):
    """Torch's autograd engine, extended to raise the original error of a failed operator of the simulated device.

    The engine keeps the original errors of failed operators until its call raises them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._kept: dict[str, BaseException] = {}

    def store(self, error: BaseException) -> str:
        """Keep the error of a failed operator, and return a placeholder, which the operator returns instead of raising.
        Torch's error about the placeholder contains its text.
        """
        with self._lock:
            mark = f"(failure {next(self._numbers)} of the simulated device)"
            self._kept[mark] = error
            if len(self._kept) > 64:
                self._kept.pop(next(iter(self._kept)))
            return f"{error} {mark}"

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the backward pass. Raises an operator's original error instead of torch's error about its result."""
        try:
            # The backward pass runs on the calling thread, so all its operations belong to one actor.
            with torch.autograd.set_multithreading_enabled(False):
                return super().run_backward(*args, **kwargs)
        except Exception as error:
            meant = self._pop_original_error(str(error))
            if meant is None:
                raise
            raise meant from error

    def _pop_original_error(self, text: str) -> BaseException | None:
        """Remove and return the operator's error that caused torch's error message `text`, or None."""
        with self._lock:
            for mark in list(self._kept):
                if mark in text:
                    return self._kept.pop(mark)
            return self._kept.popitem()[1] if self._kept and "failure" in text else None


_BODY: CodeType = SimAutogradEngine.run_backward.__code__


def install() -> Callable[[BaseException], str]:
    """Replace torch's autograd engine by `SimAutogradEngine`.

    Returns the function that an operator calls with its error: the function raises the error, or returns a placeholder that
    the operator must return.
    """
    engine = SimAutogradEngine()
    Variable._execution_engine = engine

    def failed(error: BaseException) -> str:
        """Raise `error`, or return a placeholder for it if torch's engine called the operator without a Python
        frame between.
        """
        frame = sys._getframe(1).f_back
        if frame is None or frame.f_code is _BODY:  # no Python frame between, that could see an error
            return engine.store(error)
        raise error

    return failed


# -- autocast ----------------------------------------------------------------------------------------------------------


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


def register_autocast(library: Any, kind: str) -> None:
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
