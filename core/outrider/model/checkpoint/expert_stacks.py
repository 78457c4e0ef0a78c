"""Stacks of experts in the layouts of published checkpoints, read in the layout of the model.

The model's stacks are [E, 2 I, H], with the gate's rows of an expert before those of up, and [E, H, I]. A stack of another
layout is computed from the stored tensors while it is read, one expert at a time.

Letters: E experts, H hidden size, I intermediate size of an expert, G groups of 32 columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from outrider.device.kernels.formats import FP4
from outrider.errors import CheckpointError, shown
from outrider.model.checkpoint.files import CheckpointFiles, TensorFile, TensorSlice
from outrider.model.config.model_config import ModelConfig
from outrider.model.quantization.storages import E8M0_NAN, PACKED, MicroscalingStorage

STACKS = ("gate_up_proj", "down_proj")
"""Names of the two stacks of a layer's experts; with the suffix ``_bias``, of their biases."""
_BIAS, _BLOCKS, _SCALES = "_bias", "_blocks", "_scales"
_GROUP_BYTES = 16
"""Bytes of a group of 32 columns, which share a scale, in MXFP4."""


class _ComputedStack(TensorFile):
    """A tensor [E, rows, columns] that is computed from other tensors of the file at ``file.path``, one matrix at a time.

    ``matrix`` returns the matrix [rows, columns] of an expert, which ``dtype`` represents exactly.
    """

    def __init__(
        self,
        file: TensorFile,
        name: str,
        shape: tuple[int, int, int],
        dtype: torch.dtype | None,
        matrix: Callable[[int], Tensor],
    ) -> None:
        super().__init__(file.path, {name: shape})
        self._dtype, self.matrix = dtype, matrix

    def read_tensor(self, name: str, tensor_slice: TensorSlice | None = None) -> Tensor:
        count, rows, _ = self.shapes[name]
        part = tensor_slice or TensorSlice(0, 0, rows)
        if part.matrix is not None:
            return self.matrix(part.matrix)[part.start : part.stop].unsqueeze(0)
        return torch.stack([self.matrix(expert)[part.slices(2)] for expert in range(count)])

    def dtype(self, name: str) -> torch.dtype | None:
        del name
        return self._dtype


def with_model_stacks(config: ModelConfig, files: CheckpointFiles, *, packed: bool = False) -> CheckpointFiles:
    """Return ``files`` with the experts' stacks in the layout of the model. ``packed``: stacks of MXFP4 stay so.

    Published Qwen3-VL-MoE checkpoints store each matrix of a stack transposed; those that transformers saves do not. All
    gpt-oss checkpoints do unless they store MXFP4, and all alternate the columns of gate and up. Raises
    :class:`CheckpointError` for tensors of MXFP4 that don't fit together.
    """
    if config.experts is not None and config.family == "qwen3_vl_moe":
        return _with_transposed_pairs(config, files)
    if config.experts is None or config.family != "gpt_oss":
        return files
    transposed = [key for key in files.tensors if key.endswith(STACKS) and len(files.shape(key)) == 3]
    stacks: dict[str, _ComputedStack] = {key: _transposed(files, key) for key in transposed}
    files = _model_tensors(files, _packed if packed else _dequantized)
    stacks |= {key: file for key, file in files.tensors.items() if isinstance(file, _ComputedStack)}
    for key in files.tensors:
        if key.endswith(tuple(f"{name}{_BIAS}" for name in STACKS)) and len(files.shape(key)) == 2:
            stacks[key] = _column(files, key)
    for key in (key for key in stacks if STACKS[0] in key):
        stacks[key] = _halved(stacks[key], key)
    return replace(files, tensors={**files.tensors, **stacks})


def dequantized_stacks(files: CheckpointFiles) -> CheckpointFiles:
    """Return ``files`` with a dequantized stack in place of each pair of MXFP4 blocks and scales."""
    return _model_tensors(files, _dequantized)


def _model_tensors(
    files: CheckpointFiles, replacement: Callable[[CheckpointFiles, str], Mapping[str, _ComputedStack]]
) -> CheckpointFiles:
    """Return ``files`` with ``replacement(files, name)`` in place of each pair of MXFP4 blocks and scales.

    Blocks are uint8 [E, rows, G, 16], with the lower column of two in the lower half of a byte. Scales are uint8 [E, rows,
    G], the exponents of powers of two with a bias of 127. Raises :class:`CheckpointError` for other shapes and dtypes, and
    for blocks or scales alone.
    """
    tensors = dict(files.tensors)
    for key in files.tensors:
        stem = key.removesuffix(_BLOCKS).removesuffix(_SCALES)
        if stem == key or not stem.endswith(STACKS) or stem in tensors:
            continue
        pair = [f"{stem}{suffix}" for suffix in (_BLOCKS, _SCALES)]
        missing = [each for each in pair if each not in files.tensors]
        if missing:
            raise CheckpointError(f"{files.origin}: has {shown(key)} and no {shown(missing[0])}; expected both (MXFP4)")
        blocks, scales = (files.shape(each) for each in pair)
        is_stored_so = all(files.dtype(each) == torch.uint8 for each in pair)
        if not is_stored_so or len(blocks) != 4 or blocks != (*scales, _GROUP_BYTES):
            found = " and ".join(f"{files.dtype_name(each)} {list(files.shape(each))}" for each in pair)
            raise CheckpointError(
                f"{files.tensors[key].path}: {shown(pair[0])} and its scales are {found}; expected uint8 [E, rows, G, 16] "
                "and uint8 [E, rows, G] (MXFP4)"
            )
        tensors |= replacement(files, stem)
        tensors = {key: file for key, file in tensors.items() if key not in pair}
    return replace(files, tensors=tensors)


def _packed(files: CheckpointFiles, stem: str) -> Mapping[str, _ComputedStack]:
    """Return the bytes [E, rows, columns / 2] and the exponents [E, rows, G] of the stack ``stem``, by their names."""
    blocks, scales = f"{stem}{_BLOCKS}", f"{stem}{_SCALES}"
    (count, rows, groups, _), file = files.shape(blocks), files.tensors[blocks]

    def bytes_of(expert: int) -> Tensor:
        return file.read_tensor(blocks, TensorSlice(0, 0, rows, expert))[0].flatten(1)

    packed, exponents = f"{stem}.{PACKED}", f"{stem}.{MicroscalingStorage().scale}"
    return {
        packed: _ComputedStack(file, packed, (count, rows, groups * _GROUP_BYTES), torch.uint8, bytes_of),
        exponents: _ComputedStack(file, exponents, (count, rows, groups), torch.uint8, partial(_exponents, files, scales)),
    }


def _exponents(files: CheckpointFiles, scales: str, expert: int) -> Tensor:
    """Return the exponents [rows, G] of an expert. Raises :class:`CheckpointError` for one that is no number."""
    exponents = files.tensors[scales].read_tensor(scales, TensorSlice(0, 0, files.shape(scales)[1], expert))[0]
    if bool((exponents == E8M0_NAN).any()):
        raise CheckpointError(
            f"{files.tensors[scales].path}: tensor {shown(scales)} has a scale that is no number ({E8M0_NAN})"
        )
    return exponents


def _dequantized(files: CheckpointFiles, stem: str) -> Mapping[str, _ComputedStack]:
    blocks, scales = f"{stem}{_BLOCKS}", f"{stem}{_SCALES}"
    (count, rows, groups, _), pairs_of_bytes = files.shape(blocks), _pairs_of_bytes()

    def matrix(expert: int) -> Tensor:
        exponents = _exponents(files, scales, expert)
        stored = files.tensors[blocks].read_tensor(blocks, TensorSlice(0, 0, rows, expert)).flatten().to(torch.int32)
        numbers = pairs_of_bytes.index_select(0, stored).view(torch.bfloat16).view(rows, groups, -1)
        factors = exponents.view(torch.float8_e8m0fnu).to(torch.bfloat16)  # powers of two: the products are exact
        return numbers.mul_(factors.unsqueeze(-1)).flatten(1)

    shape = count, rows, groups * 2 * _GROUP_BYTES
    return {stem: _ComputedStack(files.tensors[blocks], stem, shape, torch.bfloat16, matrix)}


def _pairs_of_bytes() -> Tensor:
    """Return the two numbers of each byte, that of the lower half first, in bfloat16 in one int32 [256]."""
    every = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    return FP4.decode(every, 2, torch.bfloat16).view(torch.int32).flatten()


def _transposed(files: CheckpointFiles, key: str) -> _ComputedStack:
    """Return the stack ``key`` with each matrix transposed."""
    file, (count, columns, rows) = files.tensors[key], files.shape(key)

    def matrix(expert: int) -> Tensor:
        return file.read_tensor(key, TensorSlice(0, 0, columns, expert))[0].T

    return _ComputedStack(file, key, (count, rows, columns), files.dtype(key), matrix)


def _column(files: CheckpointFiles, key: str) -> _ComputedStack:
    """Return the biases ``key`` [E, rows] as a stack [E, rows, 1], which is sliced like the rows of a stack of weights."""
    file, (count, rows) = files.tensors[key], files.shape(key)

    def matrix(expert: int) -> Tensor:
        return file.read_tensor(key, TensorSlice(0, expert, expert + 1)).reshape(-1, 1)

    return _ComputedStack(file, key, (count, rows, 1), files.dtype(key), matrix)


def _halved(stack: _ComputedStack, key: str) -> _ComputedStack:
    """Return ``stack``, whose rows of gate and up alternate, with all rows of the gate before those of up."""

    def matrix(expert: int) -> Tensor:
        rows = stack.matrix(expert)
        return torch.cat((rows[::2], rows[1::2]))

    count, rows, columns = stack.shapes[key]
    return _ComputedStack(stack, key, (count, rows, columns), stack.dtype(key), matrix)


def _with_transposed_pairs(config: ModelConfig, files: CheckpointFiles) -> CheckpointFiles:
    """Return ``files`` with both stacks of a layer transposed if their shapes are those of transposed ones."""
    experts = config.experts
    assert experts is not None  # the caller has checked
    hidden, inner = config.hidden_size, experts.intermediate_size
    shapes = [(experts.count, hidden, 2 * inner), (experts.count, inner, hidden)]  # one of the two isn't square
    transposed = dict(files.tensors)
    for key in files.tensors:
        pair = [key.removesuffix(STACKS[0]) + stack for stack in STACKS]
        if key == pair[0] and pair[1] in files.tensors and [files.shape(each) for each in pair] == shapes:
            transposed |= {each: _transposed(files, each) for each in pair}
    return replace(files, tensors=transposed)
