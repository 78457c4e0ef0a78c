"""CompiledBlocks: products and halves of layers with block-quantized weights, by functions that llvmlite compiles at load."""

from __future__ import annotations

import ctypes
import struct
import weakref
from array import array
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.device import AttentionBlock, AttentionTokens, KernelSet, MlpBlock, ResidualStream, SeparateInput
from outrider_cpu.packed_weights import GROUP, TILE, BlockWeight, is_observed, pack_blocks

_OPENMP = ("omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier", "GOMP_parallel")
_MIN_ELEMENTS = 1 << 16
"""Minimum number of elements of a weight that is kept in blocks."""
_MAX_NEW_TOKENS = 64
"""Maximum number of new tokens of a request whose attention is compiled. The library's attention reads keys once for all of
a prompt's tokens.
"""
VECTOR_ELEMENTS = 16
"""Number of elements of the longest vector, of which the compiled functions of rows read whole ones."""
_SCORE_PADDING = 16
"""Elements after a query's scores that the vectors of the compiled attention may write."""


class _PackedBlocks(NamedTuple):
    weight: weakref.ref[Tensor]
    version: int
    blocks: BlockWeight | None


class _SharedArguments(NamedTuple):
    """The arguments of a function that all layers of a pass share."""

    key: tuple[object, ...]
    """Identities and sizes that the arguments are valid for."""
    arguments: list[int]
    function: str
    owners: object
    """Objects that own the identities and addresses."""


class _Functions:
    """The compiled functions and the team of threads that runs them."""

    def __init__(self) -> None:
        from outrider_cpu.block_functions import BlockFunctions

        library = ctypes.CDLL(torch._C.__file__)  # its dependencies include the OpenMP runtime of torch
        found = {
            name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in _OPENMP if hasattr(library, name)
        }
        self._openmp = {name: address for name, address in found.items() if address}
        self._parallel: Any = None
        if len(self._openmp) == len(_OPENMP):
            self._parallel = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(
                self._openmp["GOMP_parallel"]
            )
        self._writer = partial(BlockFunctions, self._openmp if self._parallel else None)
        self._owners: list[Any] = []
        writer = self._writer()
        self._max_shared_heads = writer.max_shared_heads
        self._products = self._compile(writer.write_products())
        names = ("multiply", "mlp", "normalize", "choose", "place")
        self._calls: dict[str, Any] = {name: self._call(self._products[name]) for name in names}

    def _compile(self, writer: Any) -> dict[str, int]:
        owner, addresses = writer.compile()
        self._owners.append(owner)
        return addresses  # type: ignore[no-any-return]

    def _call(self, address: int) -> tuple[int, Any]:
        return address, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

    def compile_attention(self, head_size: int, heads_per_key: int) -> tuple[str, int]:
        """Compile the attention half of a layer for heads of this size, unless it is compiled.

        Return its name and the number of query heads whose scores it holds at a time.
        """
        shared = max(number for number in range(1, self._max_shared_heads + 1) if heads_per_key % number == 0)
        name = f"attention{head_size}x{shared}"
        if name not in self._calls:
            addresses = self._compile(self._writer().write_attention(head_size, shared, self._products))
            self._calls[name] = self._call(addresses["attention"])
        return name, shared

    @property
    def threads(self) -> int:
        """The number of threads of a call."""
        return torch.get_num_threads() if self._parallel else 1

    def run_function(self, name: str, arguments: list[int], threads: int) -> None:
        """Run a function on a team of threads and wait for its end."""
        memory = array("q", arguments)
        address, call = self._calls[name]
        if threads == 1:
            call(memory.buffer_info()[0])
        else:
            self._parallel(address, memory.buffer_info()[0], threads, 0)

    def run_on_rows(self, name: str, *arguments: int) -> array[int]:
        """Run a function on this thread. Return its arguments, where it may leave a result."""
        memory = array("q", arguments)
        self._calls[name][1](memory.buffer_info()[0])
        return memory


@cache
def _functions_of_process() -> _Functions:
    return _Functions()


def compiled_functions() -> _Functions | None:
    """Return the functions if some model of this process needed them, else None: compilation takes a second."""
    return _functions_of_process() if _functions_of_process.cache_info().currsize else None


class CompiledBlocks:
    """Weights in blocks, and the compiled functions, for one kernel set."""

    def __init__(self) -> None:
        self._entries: dict[int, _PackedBlocks] = {}
        self._functions: _Functions | None = None
        self._shared = _SharedArguments((), [], "", None)
        self._is_available = find_spec("llvmlite") is not None
        self.heads: tuple[int, int] | None = None
        """Head size and number of query heads per key head of the layers to come, if they are known."""

    def pack(self, weight: Tensor) -> None:
        """Pack a weight at load that :meth:`linear` would pack in the first product."""
        if weight.dtype is torch.float32 and self._find(weight) is not None:
            self._compiled()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return ``x @ weight.T + bias``, or None if the weight isn't one of blocks."""
        if x.dtype is not torch.float32 or is_observed() or not x.numel():
            return None
        blocks = self._find(weight)
        if blocks is None:
            return None
        functions = self._compiled()
        threads = functions.threads
        rows = x.contiguous()
        count = rows.numel() // weight.shape[1]
        made = rows.new_empty((*x.shape[:-1], weight.shape[0]))
        stride = _scratch_elements(count, blocks.groups)
        scratch = rows.new_empty(threads * stride)
        operands = [blocks.bits, blocks.data.data_ptr(), blocks.groups, blocks.tiles, rows.data_ptr(), count]
        functions.run_function("multiply", [*operands, made.data_ptr(), scratch.data_ptr(), stride * 4], threads)
        return made if bias is None else made.add_(bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        """Return the norm of each row, or None if no weight is in blocks or the rows don't fit the function."""
        width = x.shape[-1]
        if self._functions is None or width % VECTOR_ELEMENTS or not _is_plain(x) or not _is_plain(weight) or is_observed():
            return None
        made = torch.empty_like(x)
        numbers = x.numel() // width, width, _bits_of(eps)
        self._functions.run_on_rows("normalize", x.data_ptr(), weight.data_ptr(), made.data_ptr(), *numbers)
        return made

    def attention_block(
        self, kernels: KernelSet, block: AttentionBlock, composed: Callable[..., ResidualStream]
    ) -> Callable[..., ResidualStream] | None:
        """Return the compiled function of the block, or None. ``composed`` computes calls that it doesn't support."""
        blocks = self._both(block.qkv, block.output)
        if blocks is None or block.norm is None or block.ranks.reduces or block.gated:
            return None
        others = (block.qkv_bias, block.output_bias, block.head_norms, block.input_scales, block.output_scales, block.sinks)
        if any(each is not None for each in others) or not _is_plain(block.norm):
            return None
        functions = self._compiled()  # at load, not for the first token
        if self.heads is not None and self.heads[0] % GROUP == 0:
            functions.compile_attention(*self.heads)
        return partial(self._attend, kernels, block, composed, _bits_of(block.eps), _bits_of(block.scale))

    def mlp_block(
        self, kernels: KernelSet, block: MlpBlock, composed: Callable[..., ResidualStream]
    ) -> Callable[..., ResidualStream] | None:
        """Return the compiled function of the block, or None. ``composed`` computes calls that it doesn't support."""
        blocks = self._both(block.gate_up, block.down)
        is_simple = not block.ranks.reduces and block.gate_up_bias is None and block.down_bias is None
        if blocks is None or not is_simple or not _is_plain(block.norm) or blocks[0].groups != blocks[1].tiles:
            return None
        return partial(self._compute_mlp, kernels, block, composed, _bits_of(block.eps))

    def _attend(
        self,
        kernels: KernelSet,
        block: AttentionBlock,
        composed: Callable[..., ResidualStream],
        eps: int,
        scale: int,
        x: ResidualStream,
        _: AttentionBlock,
        tokens: AttentionTokens,
        *,
        attend: Any = None,
    ) -> ResidualStream:
        weights = self._both(block.qkv, block.output)
        if weights is None or attend is not None or tokens.query_scales is not None or is_observed():
            return composed(x, block, tokens, attend=attend)
        shared = self._share_attention(x, tokens, *weights)
        if shared is None:
            return composed(x, block, tokens, attend=attend)
        rows = tokens.rows.continued(kernels, x.add())
        norm = None if isinstance(x.pending, SeparateInput) else block.norm
        own = [rows.data_ptr(), 0 if norm is None else norm.data_ptr()]
        own += [number for each in weights for number in (each.bits, each.data.data_ptr())]
        own += [each.data_ptr() for each in tokens.rotary[2:4]]
        own += [block.window, eps, scale, *shared.arguments]
        functions = self._compiled()
        functions.run_function(shared.function, own, functions.threads)
        return ResidualStream(kernels, rows)

    def _share_attention(
        self, x: ResidualStream, tokens: AttentionTokens, qkv: BlockWeight, output: BlockWeight
    ) -> _SharedArguments | None:
        """Return the arguments of attention for a pass, or None if it isn't supported."""
        rotary, batch, kept, threads = tokens.rotary, tokens.attention, tokens.rows.kept, self._compiled().threads
        source = x.pending.normed if isinstance(x.pending, SeparateInput) else x.rows
        owners = (x.rows, source, batch, rotary.cos, rotary.slots, kept)
        shapes = (*qkv[1:], *output[1:], rotary.k_cache.shape, rotary.k_cache.dtype, threads)
        key = (*map(id, owners), shapes)
        if self._shared.key == key:
            return self._shared
        cos, sin, (page_size, kv_heads, size) = rotary.cos, rotary.sin, rotary.k_cache.shape[1:]
        is_chain = batch.tree_mask is None and batch.max_query <= _MAX_NEW_TOKENS
        is_rotated = cos.shape[1] == size and cos.dtype is torch.float32 and cos.stride() == sin.stride()
        fits = source.shape[1] == qkv.groups * GROUP and x.rows.shape[1] == output.tiles * TILE
        plain = all(map(_is_plain, (x.rows, source, *rotary[2:4])))
        if not is_chain or not is_rotated or not fits or not plain or size % GROUP or cos.stride(1) != 1:
            return None
        count, heads, table = source.shape[0], qkv.tiles * TILE // size - 2 * kv_heads, batch.block_table
        name, heads_at_a_time = self._compiled().compile_attention(size, heads // kv_heads)
        scores = heads_at_a_time * (size + table.shape[1] * page_size + _SCORE_PADDING)
        stride = max(_scratch_elements(count, max(qkv.groups, output.groups)), scores)
        made = count * qkv.tiles * TILE
        memory = source.new_empty(threads * stride + made + count * heads * size)
        scratch = memory.data_ptr()
        index = torch.arange(count) if kept is None else kept
        arguments = [source.data_ptr(), count, qkv.groups, scratch, stride * 4, scratch + threads * stride * 4]
        arguments += [scratch + (threads * stride + made) * 4]
        arguments += [each.data_ptr() for each in (cos, sin, rotary.slots, batch.query_start, batch.seq_lens, table)]
        arguments += [table.stride(0), batch.seq_lens.shape[0], heads, kv_heads, page_size, cos.stride(0) * 4]
        arguments += [index.data_ptr(), index.shape[0], output.tiles]
        self._shared = shared = _SharedArguments(key, arguments, name, (owners, sin, memory, index))
        return shared

    def _compute_mlp(
        self,
        kernels: KernelSet,
        block: MlpBlock,
        composed: Callable[..., ResidualStream],
        eps: int,
        x: ResidualStream,
        _: MlpBlock,
    ) -> ResidualStream:
        weights = self._both(block.gate_up, block.down)
        if weights is None or is_observed() or not _is_plain(x.rows):
            return composed(x, block)
        rows = x.add()
        functions = self._compiled()
        threads = functions.threads
        gate_up, down = weights
        count, inner = rows.shape[0], down.groups * GROUP
        stride = _scratch_elements(count, max(gate_up.groups, down.groups))
        memory = rows.new_empty(threads * stride + 3 * count * inner)
        scratch = memory.data_ptr()
        both = scratch + threads * stride * 4
        arguments = [rows.data_ptr(), count, block.norm.data_ptr(), gate_up.groups, gate_up.bits, gate_up.data.data_ptr()]
        arguments += [down.groups, down.bits, down.data.data_ptr()]
        arguments += [scratch, stride * 4, both, both + 2 * count * inner * 4, eps]
        functions.run_function("mlp", arguments, threads)
        return ResidualStream(kernels, rows)

    def _compiled(self) -> _Functions:
        if self._functions is None:
            self._functions = _functions_of_process()
        return self._functions

    def _both(self, first: object, second: object) -> tuple[BlockWeight, BlockWeight] | None:
        if not isinstance(first, Tensor) or not isinstance(second, Tensor):
            return None
        one, other = self._find(first), self._find(second)
        return None if one is None or other is None else (one, other)

    def _find(self, weight: Tensor) -> BlockWeight | None:
        """Return the weight in blocks, or None if its values aren't those of blocks. The first call packs."""
        version = 0 if weight.is_inference() else weight._version
        entry = self._entries.get(id(weight))
        if entry is None or entry.version != version:
            if not self._is_available or weight.numel() < _MIN_ELEMENTS:
                return None
            key = id(weight)
            blocks = pack_blocks(weight)
            entry = _PackedBlocks(weakref.ref(weight, lambda _: self._entries.pop(key, None)), version, blocks)
            self._entries[key] = entry
        return entry.blocks


def _scratch_elements(rows: int, groups: int) -> int:
    """Return the number of elements of one thread's rounded x and of the scales and sums of its groups."""
    return rows * groups * (GROUP // 2 + 2)  # of float32: 16-bit x, then a scale and a sum of each group


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.is_contiguous()


def _bits_of(number: float) -> int:
    """Return the bits of ``number`` as float32."""
    return int(struct.unpack("<I", struct.pack("<f", number))[0])
