"""L1: copies move the right bytes in stream order, without blocking the host."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from outrider.device import Backend, Stream
from outrider_conformance.lab import CALLS, WIDTH, Lab, expect, in_every_order
from outrider_conformance.programs.language import pattern
from outrider_conformance.promises import needs, promise
from outrider_conformance.random_kernels.problem import MANY
from outrider_conformance.reporting.verdict import not_applicable

_DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]
_VIEW_DTYPES = [torch.int8, torch.int16, torch.float8_e4m3fn]
"""Further dtypes, of which only bytes are moved: no kernel of the device needs to know them."""
_LENGTHS = (WIDTH, 1 << 14, 1 << 18, (1 << 18) + 1, (1 << 22) + 1)
"""Numbers of float32 elements of copies, of 256 bytes, 64 KiB, 1 MiB, and slightly more than 1 and 16 MiB: drivers use other
implementations there.
"""
_FEW_COPIES = 1 << 18
"""Number of elements from which on one copy is made instead of several."""
_FAR = 2**24 + 1
"""An offset in bytes and elements beyond the limits of 24-bit registers and of integers in float32."""
_KINDS = ("to the host", "on the device", "to the device")
_VIEWS = 160
"""Number of random copies: half of them on the device, a quarter to the host and a quarter to the device."""
_PENDING_VIEWS = 16
_PERIOD = 4093
"""Number of elements after which the contents of a tensor repeat; a prime."""
_VIEW_SIZES = (0, 1, 2, 2, 3, 3, 5, 8)


@promise(
    "Backend.empty_pinned", "Allocate page-locked host memory with undefined contents. ``owner`` names the memory in reports."
)
def test_pinned_memory_is_host_memory(backend: Backend) -> None:
    """Pinned buffers have the requested shape and dtype, are contiguous, and do not overlap."""
    buffers = [backend.empty_pinned(f"buffer {number}", (3, 5), torch.int64) for number in range(4)]
    for number, buffer in enumerate(buffers):
        expect(buffer.owner, f"buffer {number}", "the owner")
        expect((tuple(buffer.tensor.shape), buffer.tensor.dtype), ((3, 5), torch.int64), "shape and dtype")
        expect(buffer.tensor.device.type, torch.ones(1).device.type, "where the host sees it")
        assert buffer.tensor.is_contiguous()
        buffer.tensor.fill_(number)
    expect([buffer.tensor.unique().tolist() for buffer in buffers], [[0], [1], [2], [3]], "contents of four buffers")
    assert all(backend.is_pinned(buffer.tensor) for buffer in buffers), "is_pinned is False for memory from empty_pinned"
    for shape in ((), (0,), (3, 0), (2, 1, 3), (2, 3, 4, 5)):
        for dtype in (*_DTYPES, *_VIEW_DTYPES):
            tensor = backend.empty_pinned("shaped", shape, dtype).tensor
            expect((tuple(tensor.shape), tensor.dtype), (shape, dtype), "shape and dtype")
            assert tensor.is_contiguous(), f"a pinned buffer of shape {shape} in {dtype} isn't contiguous"


@promise("Backend.is_pinned")
def test_pinned_and_pageable_are_told_apart(backend: Backend) -> None:
    """A slice of pinned memory counts as pinned, and ordinary host memory does not."""
    buffer = backend.empty_pinned("buffer", (8,), torch.float32)
    assert backend.is_pinned(buffer.tensor[2:6]), "a slice of pinned memory isn't recognised"
    if not backend.is_host(torch.ones(1)):
        not_applicable("the device computes in host memory: all of it is reached without a detour")
    assert not backend.is_pinned(torch.ones(8)), "pageable memory is taken for pinned"


@promise("Backend.copy_async", "The bytes of the source are read, and those of the destination written, in stream order")
@in_every_order()
def test_a_copy_to_the_host_reads_in_stream_order(lab: Lab) -> None:
    """A copy to the host contains a late earlier write, and not a later write."""
    backend = lab.backend
    a, b = lab.streams("a", "b")
    x = lab.full(a, 0)
    down = backend.empty_pinned("down", (WIDTH,), torch.float32)
    down.tensor.fill_(-1)
    lab.fill_late(a, x, 1)
    b.wait(lab.record(a, "written"))
    backend.copy_async(down.tensor, x, stream=b)
    copied = lab.record(b, "copied")
    a.wait(copied)
    lab.fill(a, x, 2)
    copied.synchronize()
    expect(lab.current_values(down.tensor), 1.0, "the copy between two writes")


@promise("Backend.copy_async", "The bytes of the source are read, and those of the destination written, in stream order")
@in_every_order()
def test_a_copy_to_the_device_writes_in_stream_order(lab: Lab) -> None:
    """A copy to the device overwrites a late earlier write, and following work reads the copy."""
    backend = lab.backend
    (a,) = lab.streams("a")
    x, y = lab.full(a, 0), lab.full(a, 0)
    up = backend.empty_pinned("up", (WIDTH,), torch.float32)
    up.tensor.fill_(5)
    lab.fill_late(a, x, 1)
    backend.copy_async(x, up.tensor, stream=a)
    lab.expect_read(a, y, x, 5.0, "what the copy wrote over a late write")


@promise("Backend.copy_async", "Copy on ``stream`` without blocking the host")
@in_every_order()
def test_a_copy_goes_to_its_stream_and_leaves_the_scope(lab: Lab) -> None:
    """A copy inside the scope of another stream runs on its own stream, and the scope stays unchanged."""
    backend = lab.backend
    a, b = lab.streams("a", "b")
    x, y, z = lab.full(a, 0), lab.full(b, 0), lab.full(b, 0)
    down = backend.empty_pinned("down", (WIDTH,), torch.float32)
    down.tensor.fill_(-1)
    for stream in (a, b, b):  # so that work on the wrong stream comes too early on a, too late on b
        lab.slow(stream)
    with backend.on(a):
        x.fill_(1)
    with backend.on(b):
        y.fill_(3)
        backend.copy_async(down.tensor, x, stream=a)
        z.copy_(y)
    a.synchronize()
    expect(lab.current_values(down.tensor), 1.0, "a copy after work of its own stream")
    expect(lab.read_tensor(b, z), 3.0, "work in the scope, after a copy on another stream")


@needs("asynchronous")
@promise("Backend.copy_async", "Copy on ``stream`` without blocking the host")
@pytest.mark.parametrize("direction", _KINDS)
def test_a_copy_does_not_block_the_host(lab: Lab, direction: str) -> None:
    """The call of a copy after slow work returns while that work runs, for short, long and empty copies."""

    def is_pending(width: int) -> bool:
        (a,) = lab.streams("a")
        x, y = lab.full(a, 0, width=width), lab.full(a, 0, width=width)
        pinned = lab.backend.empty_pinned("pinned", (width,), torch.float32)
        pinned.tensor.fill_(1)
        lab.slow(a)
        busy = lab.record(a, "busy")
        pair = {"to the host": (pinned.tensor, x), "to the device": (x, pinned.tensor), "on the device": (y, x)}
        for _ in range(CALLS if width < _FEW_COPIES else 1):
            lab.backend.copy_async(*pair[direction], stream=a)
        return not busy.query()

    for width in (*_LENGTHS, *([0] if direction == "on the device" else [])):
        words = f"earlier work was always done after a copy of {width} numbers {direction}: the copy is synchronous"
        lab.check_in_some_order(partial(is_pending, width), words)


@promise("Backend.copy_async", "The bytes of the source are read, and those of the destination written, in stream order")
def test_a_copy_between_columns_of_many_rows(lab: Lab) -> None:
    """A column of 65,539 rows is copied to another column of its tensor, and to one of another tensor. A simulated device,
    which records each row's access, gets fewer rows.
    """
    (stream,) = lab.streams("s")
    rows = MANY if lab.backend.control is None else WIDTH
    wanted = torch.arange(3 * rows, dtype=torch.int32).view(rows, 3)
    tensors = lab.upload(stream, {"one": wanted, "other": wanted})
    lab.backend.copy_async(tensors["one"][:, 0], tensors["one"][:, 2], stream=stream)
    lab.backend.copy_async(tensors["other"][:, :2], tensors["one"][:, 1:], stream=stream)
    stream.synchronize()
    for name, order in (("one", [2, 1, 2]), ("other", [1, 2, 2])):
        expect(bool((tensors[name].cpu() == wanted[:, order]).all()), True, f"that the columns of {name!r} are {order} now")


_View = tuple["partial[Tensor]", Tensor]
"""A function that returns a view of a tensor with one dimension, and the contents of that tensor."""


def _view(shape: Sequence[int], strides: Sequence[int], offset: int, count: int, seed: int, dtype: torch.dtype) -> _View:
    """Return a view of a tensor of ``count`` elements."""
    repeated = pattern(seed, min(count, _PERIOD), dtype).repeat(-(-count // _PERIOD))[:count]
    return partial(torch.as_strided, size=shape, stride=strides, storage_offset=offset), repeated


def _check_copies(lab: Lab, stream: Stream, copies: Sequence[tuple[str, _View, _View]]) -> bool:
    """Enqueue copies of these kinds to and from these views after slow work, and check each byte of the written tensors.
    Return True if the earlier work was pending after the calls.
    """
    backend = lab.backend

    def allocate(contents: Tensor, pinned: bool) -> Tensor:
        if pinned:
            return backend.empty_pinned("view", tuple(contents.shape), contents.dtype).tensor.copy_(contents)
        return lab.upload(stream, {"bytes": contents.view(torch.uint8)})["bytes"].view(contents.dtype)

    written = [allocate(contents, kind == "to the host") for kind, (_, contents), _ in copies]
    read = [allocate(contents, kind == "to the device") for kind, _, (_, contents) in copies]
    lab.slow(stream)
    busy = lab.record(stream, "busy")
    for (_, (to, _), (source, _)), destination, origin in zip(copies, written, read, strict=True):
        backend.copy_async(to(destination), source(origin), stream=stream)
    pending = not busy.query()
    stream.synchronize()
    for (kind, (to, before), (source, contents)), found in zip(copies, written, strict=True):
        to(wanted := before.clone()).copy_(source(contents))
        wrong = (found.view(torch.uint8).cpu() != wanted.view(torch.uint8)).nonzero().flatten().tolist()
        what = f"a copy {kind} in {found.dtype} from {source.keywords} to {to.keywords}"
        assert not wrong, f"{what}: {len(wrong)} bytes of the whole tensor are wrong, the first is byte {wrong[0]}"
    return pending


@promise("Backend.copy_async", "The bytes of the source are read, and those of the destination written, in stream order")
@pytest.mark.parametrize("kind", _KINDS)
def test_every_byte_of_a_long_copy_arrives(lab: Lab, kind: str) -> None:
    """Long copies, and a copy that begins far into a tensor, move every element and change no other."""
    (stream,) = lab.streams("s")
    for dtype, length, first in (*((torch.float32, length, 1) for length in _LENGTHS), (torch.uint8, 67, _FAR)):
        to, source = (_view((length,), (1,), first, first + length + 1, seed, dtype) for seed in range(2))
        _check_copies(lab, stream, [(kind, to, source)])


def _random_view(draw: random.Random, shape: Sequence[int], dtype: torch.dtype, *, repeats: bool, dense: bool) -> _View:
    """Return a random view. ``repeats``: dimensions may have stride 0. ``dense``: the view is contiguous."""
    strides, span, offset = [0] * len(shape), 1 if dense else draw.choice((1, 1, 1, 2)), draw.randrange(4)
    order = [*reversed(range(len(shape)))]
    for dimension in order if dense or draw.random() < 0.5 else draw.sample(order, len(order)):
        if not (repeats and draw.random() < 0.2):
            strides[dimension] = span
            span = span * max(shape[dimension], 1) + (0 if dense else draw.choice((0, 1, 1, 3)))
    return _view(shape, strides, offset, offset + span + draw.randrange(3), draw.randrange(_VIEWS), dtype)


@promise("Backend.copy_async", "The bytes of the source are read, and those of the destination written, in stream order")
def test_random_views_are_copied(lab: Lab) -> None:
    """Copies of views with random dtypes, shapes, strides and offsets move each element, and nothing else.

    No copy waits for earlier work. Host sides are contiguous.
    """
    backend = lab.backend
    draw = random.Random(lab.seed)
    dtypes = [*_DTYPES, *_VIEW_DTYPES, *({torch.float64} & backend.capabilities.dtypes)]
    (stream,) = lab.streams("s")
    copies = []
    for kind in ("on the device", *_KINDS) * (_VIEWS // 4):
        dtype, dense = draw.choice(dtypes), kind != "on the device"
        sizes = [draw.choice(_VIEW_SIZES) for _ in range(draw.choice((0, 1, 1, 2, 2, 2, 3, 4, 5)))]
        shape = [draw.choice((0, 1, 257, 1030))] if len(sizes) == 1 else sizes
        to = _random_view(draw, shape, dtype, repeats=False, dense=dense)
        copies.append((kind, to, _random_view(draw, shape, dtype, repeats=not dense, dense=dense)))
    words = "a copy always waited for earlier work: with strides or an offset, or in a rare dtype, it is synchronous"
    for first in range(0, _VIEWS, _PENDING_VIEWS):
        check = partial(_check_copies, lab, stream, copies[first : first + _PENDING_VIEWS])
        if lab.asynchronous and backend.control is None:
            lab.check_in_some_order(check, words)
        else:
            check()
