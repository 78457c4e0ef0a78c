"""Fixed cases of the bookkeeping and probe kernels. Integer results are compared for equality, copies of floats within
rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.device import KernelSet, RequestInputs, RequestRows
from outrider_conformance.fixed_case import Call, FixedKernelCase, Operands

_STATE = ("rows", "lens", "last_tokens", "seeds", "temperature", "tables")
_OWN = tuple(f"own_{name}" for name in _STATE)


def _requests(dtype: torch.dtype) -> dict[str, Tensor]:
    del dtype
    rows, pages = 6, 5
    state = {
        "rows": torch.tensor([4, 0, 2, 0]),
        "lens": torch.tensor([7, 0, 19, 0]),
        "last_tokens": torch.arange(rows) * 11,
        "seeds": torch.arange(rows) * (2**35 + 1),
        "temperature": torch.arange(rows) * 0.3,
        "tables": torch.arange(rows * pages, dtype=torch.int32).view(rows, pages),
    }
    own = {f"own_{name}": torch.full((4, *value.shape[1:]), 77, dtype=value.dtype) for name, value in state.items()}
    return {**state, **own, "found": torch.zeros(4, 9, dtype=torch.int64)}


def _gathered(*, by_row: bool) -> Call:
    def call(kernels: KernelSet, o: Operands) -> tuple[Tensor, ...]:
        state = RequestRows(o["last_tokens"], o["seeds"], o["temperature"], o["tables"])
        own = RequestInputs(*(o[name] for name in _OWN))
        lens = o["last_tokens"] if by_row else o["lens"]
        kernels.gather_requests(o["rows"], lens, state, own, o["found"][:, 2:8], lens_by_row=by_row)
        return (*own, o["found"])

    return call


def _numbers(dtype: torch.dtype) -> dict[str, Tensor]:
    numbers = torch.randn((6, 3, 700), generator=torch.Generator().manual_seed(1)).to(dtype)
    numbers[2, 1, 5] = float("nan")
    numbers[4, 0, 0] = numbers[4, 2, 699] = float("nan")
    numbers[5, 0, 3] = float("inf")
    return {
        "source": numbers,
        "rows": torch.tensor([2, 0, 4, 5, 0]),
        "out": torch.zeros((5, 3, 700), dtype=dtype),
        "found": torch.full((5, 4), 9),
    }


def _tokens(dtype: torch.dtype) -> dict[str, Tensor]:
    del dtype
    tokens = torch.tensor([[0, 0, 0], [5, 9, 10], [11, -1, 3], [1, 2, 3], [4, 2**40, 5]])
    return {
        "source": tokens,
        "rows": torch.tensor([2, 0, 4]),
        "out": torch.zeros((5, 3), dtype=torch.int64),
        "found": torch.full((5, 4), 9),
    }


def _checked(*, bounds: tuple[int, int] | None, some: bool) -> Call:
    def call(kernels: KernelSet, o: Operands) -> tuple[Tensor, ...]:
        rows = o["rows"] if some else None
        count = o["rows"].shape[0] if some else o["source"].shape[0]
        out, found = o["out"][:count], o["found"][:count]
        kernels.gather_checked(o["source"], rows, out, found[:, 1:3], bounds=bounds)
        return torch.where(out.isnan(), -77, out), found

    return call


def _nowhere(kernels: KernelSet, o: Operands) -> tuple[Tensor, ...]:
    kernels.find_nan(o["source"][:5].flatten(1), o["found"][:, 1:3])
    return (o["found"],)


def _placing(dtype: torch.dtype) -> dict[str, Tensor]:
    del dtype
    return {
        "lens": torch.tensor([0, 3, 6, 11, 30]),
        "tables": torch.arange(1, 16, dtype=torch.int32).view(5, 3),
        "positions": torch.zeros(5, 4, dtype=torch.int64),
        "slots": torch.zeros(4, 5, dtype=torch.int64),
        "seq_lens": torch.zeros(5, 2, dtype=torch.int32),
    }


def _placed(kernels: KernelSet, o: Operands) -> tuple[Tensor, ...]:
    kernels.place_tokens(o["lens"], o["tables"], 4, 12, o["positions"], o["slots"].t(), o["seq_lens"])
    return o["positions"], o["slots"], o["seq_lens"]


def _deciding(dtype: torch.dtype) -> dict[str, Tensor]:
    del dtype
    return {
        "rows": torch.tensor([4, 0, 2, 0]),
        "lens": torch.tensor([7, 5, 19, 0]),
        "tokens": torch.tensor([[8, 6, -1], [9, -1, -1], [1, 2, 3], [4, 5, -1]]),
        "accepted": torch.tensor([1, 0, 2, 1]),
        "lengths": torch.arange(6),
        "last_tokens": torch.arange(6),
        "results": torch.full((4, 7), 77),
        "own_tokens": torch.zeros(4, 3, dtype=torch.int64),
        "own_accepted": torch.zeros(4, dtype=torch.int64),
        "following": torch.full((4, 3), 77),
        "last": torch.zeros(4, dtype=torch.int64),
        "positions": torch.zeros(4, dtype=torch.int64),
    }


_PUBLISHED = ("lengths", "last_tokens", "results", "own_tokens", "own_accepted")


def _published(kernels: KernelSet, o: Operands) -> tuple[Tensor, ...]:
    lengths, last_tokens, results, *own = (o[name] for name in _PUBLISHED)
    decided, copies = (o["tokens"], o["accepted"]), (own[0], own[1])
    kernels.publish_accepted(o["rows"], o["lens"], decided, lengths, last_tokens, results[:, :4], copies)
    # Padding writes the same values to the reserved row in each run.
    return tuple(o[name] for name in _PUBLISHED)


_EXTENDED = ("following", "last", "positions")


def _extended(kernels: KernelSet, o: Operands) -> tuple[Tensor, ...]:
    kernels.place_accepted(o["lens"], o["tokens"], o["accepted"], *(o[name] for name in _EXTENDED))
    return tuple(o[name] for name in _EXTENDED)


def _beside(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        "tokens": torch.tensor([3, 0, 3, 9]),
        "weight": torch.randn((10, 24), generator=generator).to(dtype),
        "hidden": torch.randn((4, 40), generator=generator).to(dtype),
    }


_LOOKED = ("out", "found")
BOOKKEEPING = (
    FixedKernelCase("gather_requests", _requests, _gathered(by_row=False), exact=True, changed=(*_OWN, "found")),
    FixedKernelCase(
        "gather_requests, lengths by row", _requests, _gathered(by_row=True), exact=True, changed=(*_OWN, "found")
    ),
    FixedKernelCase("gather_checked, numbers of some rows", _numbers, _checked(bounds=None, some=True), changed=_LOOKED),
    FixedKernelCase(
        "gather_checked, whole numbers", _tokens, _checked(bounds=(0, 10), some=False), exact=True, changed=_LOOKED
    ),
    FixedKernelCase(
        "gather_checked, of some rows", _tokens, _checked(bounds=(0, 10), some=True), exact=True, changed=_LOOKED
    ),
    FixedKernelCase("find_nan", _numbers, _nowhere, changed=("found",)),
    FixedKernelCase("place_tokens", _placing, _placed, exact=True, changed=("positions", "slots", "seq_lens")),
    FixedKernelCase("publish_accepted", _deciding, _published, exact=True, changed=_PUBLISHED),
    FixedKernelCase("place_accepted", _deciding, _extended, exact=True, changed=_EXTENDED),
    FixedKernelCase("embed_beside", _beside, lambda k, o: (k.embed_beside(o["tokens"], o["weight"], o["hidden"]),)),
)
