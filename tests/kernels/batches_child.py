"""Compile kernels of an iteration for several batches, for a device that isn't here; print the number of variants as JSON."""

import json

import torch
import triton
from triton.backends.compiler import GPUTarget

from outrider_triton import bookkeeping as _bookkeeping  # noqa: F401  (registers the operators)
from outrider_triton import selection as _selection  # noqa: F401
from outrider_triton.launch import compile_only
from outrider_triton.tiles.selection import compiled

DRAFTED, VOCABULARY = 2, 64
ops = torch.ops.outrider


class Driver:
    """The part of a driver that a compilation asks."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0 * device

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


def place(count):
    """Positions lie token by token, so that their strides depend on the batch."""
    positions, slots = (torch.zeros(DRAFTED, count, dtype=torch.int64).T for _ in range(2))
    lens, tables = torch.zeros(count, dtype=torch.int64), torch.zeros(count, 4, dtype=torch.int32)
    ops.place_tokens.triton(lens, tables, 16, 60, positions, slots, torch.zeros(2, count, dtype=torch.int32).T, True)


def verify(count):
    """Positions begin where the batch's other integers end, at any multiple of 8 bytes."""
    rows, chances = (count, DRAFTED + 1), torch.ones(count)
    logits, drafted = torch.zeros(*rows, VOCABULARY), torch.zeros(count, DRAFTED, VOCABULARY)
    drafts, seeds = torch.zeros(count, DRAFTED, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)
    positions = torch.zeros(2 * count, dtype=torch.int64)[count:]
    ops.verify_chain.triton(logits, drafts, drafted, chances, seeds, positions, [0, 1], 1, True)


def main():
    triton.runtime.driver.set_active(Driver())
    with compile_only():
        for count in (3, 16, 32):
            place(count)
            verify(count)
    print(json.dumps(compiled()))


main()
