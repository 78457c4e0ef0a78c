"""SwiGLU of one token inside the following product of :mod:`outrider_triton.quantized.jit.nibble_planes_streamed`.

With one token, a separate SwiGLU kernel reads 57 KB and computes little: its launch dominates its time. Here each program
computes SwiGLU for the columns that it multiplies, in the warps that multiply them. The results are bit-identical to
:func:`outrider_triton.jit.rows.silu_mul` in nibble-plane layout. With more tokens each program would repeat it for each.

A warp handles one unit of 128 columns at a time, so the maximum needs no exchange between warps. It loads two columns as one
32-bit word; the int8 components have even columns before odd ones.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from outrider_triton.products.jit.matmul import swiglu
from outrider_triton.quantized.jit.nibble_planes import grain_and_times, nearest_whole

COLUMNS = gl.constexpr(512)
"""Number of columns per step: four units, one for each warp of a warpgroup."""
STEPS_AT_MOST = gl.constexpr(8)
"""Maximum number of steps per warpgroup: all loads of a group are in flight at once, and each needs registers."""
_UNIT = gl.constexpr(128)
_WORDS = gl.constexpr(64)
"""Number of 32-bit words per unit; each holds two columns."""


@gluon.jit
def _number(words, high, TYPE: gl.constexpr):
    """Return the low half of each 32-bit word as TYPE, or with ``high`` the high half."""
    return gl.where(high, words >> 16, words).to(gl.int16).to(TYPE, bitcast=True)


@gluon.jit
def _components_of(gate, up, TYPE: gl.constexpr, layout: gl.constexpr):
    """Compute SwiGLU of a step [COLUMNS]; return low and high components, int32, and its units' grains, float32 [4].

    The format is that of :func:`outrider_triton.quantized.jit.nibble_planes.store_in_planes`.
    """
    units = swiglu(gate, up, TYPE).to(gl.float32).reshape((COLUMNS // _UNIT, _UNIT))
    grain, times = grain_and_times(gl.max(units.to(gl.int32, bitcast=True) & 0x7FFFFFFF, axis=1))
    integers = nearest_whole(units * times.expand_dims(1)).reshape((COLUMNS,))
    integers = gl.convert_layout(integers, layout, assert_trivial=True)
    return integers, (integers + 128) >> 8, grain


@gluon.jit
def lay_gated(both, tokens, grains, have, WHICH: gl.constexpr, GROUPS: gl.constexpr, STEPS: gl.constexpr):
    """Apply SwiGLU to ``both [2 k]``, one token's gate and up, after the wait for the preceding kernel.

    Store the components of the program's columns to ``tokens`` and their grains to ``grains [units, tokens]``. Warpgroup
    WHICH handles every GROUPSth step from WHICH on, and synchronises its own warps by the barrier ``have`` of that index.
    """
    COMPONENTS: gl.constexpr = tokens.shape[1]
    TOKENS: gl.constexpr = grains.shape[1]
    UNITS: gl.constexpr = COLUMNS // _UNIT
    TYPE: gl.constexpr = both.dtype.element_ty
    component_layout: gl.constexpr = gl.BlockedLayout([COMPONENTS, 4], [1, 32], [1, 4], [1, 0])
    column: gl.constexpr = gl.SliceLayout(0, component_layout)
    grain_layout: gl.constexpr = gl.BlockedLayout([1, TOKENS], [1, 32], [4, 1], [1, 0])
    digit = gl.arange(0, COMPONENTS, gl.SliceLayout(1, component_layout))[:, None]
    place = gl.arange(0, COLUMNS, column)
    odd = place // _WORDS % 2 > 0
    word = gl.program_id(1) * (STEPS * (COLUMNS // 2)) + place // _UNIT * _WORDS + place % _WORDS
    first = both.to(gl.pointer_type(gl.int32), bitcast=True)
    up_offset = gl.num_programs(1) * (STEPS * (COLUMNS // 2))
    words = ()
    for step in gl.static_range(WHICH, STEPS, GROUPS):  # start all loads before the first use
        address = first + (step * (COLUMNS // 2) + word)
        words += (gl.load(address), gl.load(address + up_offset))
    for step in gl.static_range(WHICH, STEPS, GROUPS):
        gate = _number(words[(step - WHICH) // GROUPS * 2], odd, TYPE)
        up = _number(words[(step - WHICH) // GROUPS * 2 + 1], odd, TYPE)
        low, high, grain = _components_of(gate, up, TYPE, column)
        low = gl.where(digit == 0, low.expand_dims(0), gl.zeros([COMPONENTS, COLUMNS], gl.int32, component_layout))
        tokens.index(step).store(gl.where(digit == 1, high.expand_dims(0), low).to(gl.int8))
        grain = gl.convert_layout(grain, gl.SliceLayout(1, grain_layout), assert_trivial=True).expand_dims(1)
        grains.slice(step * UNITS, UNITS, 0).store(grain + gl.zeros([UNITS, TOKENS], gl.float32, grain_layout))
    fence_async_shared()
    mbarrier.arrive(have.index(WHICH), count=1)
    mbarrier.wait(have.index(WHICH), 0)
