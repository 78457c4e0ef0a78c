"""Functions that run instead of an operator's own kernel: composites, emulated operators, and injected differences.

Composite operators are those that torch runs differently for tensors implemented in Python. Some `out=` overloads then don't
write the passed tensor. They are replaced by the operator without `out=` and a copy. `ctc_loss` is replaced because torch's
composite then rejects lengths in host memory.

Differences are injected between one rank's device or host and the other ranks'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

# -- composites ----------------------------------------------------------------------------------------------------------

_COMPOSITES = ("matmul", "linalg_matrix_rank")


def _copy_to_out(packet: Any) -> Callable[..., Tensor]:
    def run(*args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        result: Tensor = packet(*args, **kwargs)
        if not torch.can_cast(result.dtype, out.dtype):
            raise RuntimeError(f"result type {result.dtype} can't be cast to the dtype of out, {out.dtype}")
        if out.shape != result.shape:
            out.resize_(result.shape)
        return out.copy_(result)

    return run


def _ctc_loss(log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, *rest: Any) -> Tensor:
    result: Tensor = torch.ops.aten.ctc_loss.IntList(
        log_probs, targets, input_lengths.tolist(), target_lengths.tolist(), *rest
    )
    return result


def composite_kernels() -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """Yield the operators' names with overload, and their implementations."""
    yield "ctc_loss.Tensor", _ctc_loss
    for name in _COMPOSITES:
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            if any(argument.name == "out" for argument in getattr(packet, overload)._schema.arguments):
                yield f"{name}.{overload}", _copy_to_out(packet)


# -- operators that the host lacks ---------------------------------------------------------------------------------------


def _add_bias(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates if bias is None else gates + bias


def lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute one LSTM step: return the hidden state, the cell state and the four activated gates, concatenated for the
    backward.
    """
    i, f, g, o = (_add_bias(input_gates, input_bias) + _add_bias(hidden_gates, hidden_bias)).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat((i, f, g, o), 1)


def lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of the LSTM gates (before activation), of the cell state and of the bias."""
    i, f, g, o = workspace.chunk(4, 1)
    t = cy.tanh()
    ghy = torch.zeros_like(cx) if grad_hy is None else grad_hy
    gcx = ghy * o * (1 - t * t)
    if grad_cy is not None:
        gcx = gcx + grad_cy
    gates = torch.cat(
        (gcx * g * i * (1 - i), gcx * cx * f * (1 - f), gcx * i * (1 - g * g), ghy * t * o * (1 - o)), 1
    )  # fmt: skip
    return gates, gcx * f, gates.sum(0) if has_bias else None


def gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute one GRU step: return the hidden state, and five blocks that the backward needs, concatenated."""
    ir, iz, n = _add_bias(input_gates, input_bias).chunk(3, 1)
    hr, hz, hn = _add_bias(hidden_gates, hidden_bias).chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (n + r * hn).tanh()
    return n + z * (hx - n), torch.cat((r, z, n, hx, hn), 1)


def gru_cell_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of the GRU gates of both projections, of the hidden state and of both biases."""
    r, z, n, hx, hn = workspace.chunk(5, 1)
    gz = grad_hy * (hx - n) * (1 - z) * z
    gn = grad_hy * (1 - z) * (1 - n * n)
    gr = gn * hn * (1 - r) * r
    inputs, hidden = torch.cat((gr, gz, gn), 1), torch.cat((gr, gz, gn * r), 1)
    return inputs, hidden, grad_hy * z, inputs.sum(0) if has_bias else None, hidden.sum(0) if has_bias else None


EMULATED: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "aten::_thnn_fused_lstm_cell": lstm_cell,
        "aten::_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
        "aten::_thnn_fused_gru_cell": gru_cell,
        "aten::_thnn_fused_gru_cell_backward": gru_cell_backward,
    }
)
"""Functions on host tensors that compute operators which the host lacks, by schema name."""


# -- injected differences ------------------------------------------------------------------------------------------------


DIVERGENCES: Mapping[str, str] = MappingProxyType(
    {
        "tie": "of equal values, argmax, max and topk take the last where other devices take the first",
        "ulp": "products of matrices are one unit in the last place larger",
        "slow": "the calling host thread goes on only when nothing else can",
    }
)
"""The kinds of injected differences, with their effects. A difference lasts until the next reset."""

PRODUCTS = frozenset({"aten::mm", "aten::bmm", "aten::addmm", "aten::linear", "aten::matmul", "aten::baddbmm"})

Run = Callable[..., Any]


def _last(dim: int, tensor: Tensor, indices: Tensor) -> Tensor:
    return tensor.shape[dim] - 1 - indices


def _argmax(tensor: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    if dim is None:
        flat = tensor.flatten()
        return _last(0, flat, flat.flip(0).argmax())
    return _last(dim, tensor, tensor.flip(dim).argmax(dim, keepdim=keepdim))


def _max(tensor: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    values, indices = tensor.flip(dim).max(dim, keepdim=keepdim)
    return values, _last(dim, tensor, indices)


def _topk(tensor: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    values, indices = tensor.flip(dim).topk(k, dim, largest, sorted)
    return values, _last(dim, tensor, indices)


_TIES: Mapping[str, Run] = MappingProxyType({"aten::argmax": _argmax, "aten::max.dim": _max, "aten::topk": _topk})


def divergent_implementation(kinds: frozenset[str], name: str, run: Run) -> Run | None:
    """Return the function that runs operator `name` on a device with divergences `kinds`, or None for the usual function."""
    found = _TIES.get(name) if "tie" in kinds else None
    if "ulp" in kinds and name.partition(".")[0] in PRODUCTS:
        found = _larger(run)
    return found


def _larger(run: Run) -> Run:
    def larger(*args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = run(*args, **kwargs)
        return torch.nextafter(result, torch.full_like(result, float("inf"))) if result.dtype.is_floating_point else result

    return larger
