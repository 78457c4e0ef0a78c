"""One token's gate and up, gated and laid out in two digits by the product behind (:mod:`outrider_triton.jit.planes_ring`).

With one token the kernel between gate and up and the product behind SwiGLU reads 57 KB and computes little: what it takes is
being a kernel. Here each program computes SwiGLU for the columns that it multiplies, in the warps that multiply them; the
bits are those of :func:`outrider_triton.jit.rows.silu_mul` with planes. With more tokens each program would do so for each.

A warp has one unit of 128 columns at a time, so that none asks another for the largest number. It reads two columns as one
word of 32 bits: digits have even columns before odd ones.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from outrider_triton.jit.matmul import gated
from outrider_triton.jit.planes import grain_and_times, nearest_whole

COLUMNS = gl.constexpr(512)
"""Of a step: four units, one for each warp of a group."""
STEPS_AT_MOST = gl.constexpr(8)
"""Of a group: as many as it has registers for what all of them read, which is on its way at once."""
_UNIT = gl.constexpr(128)
_WORDS = gl.constexpr(64)
"""Of a unit, two columns each."""


@gluon.jit
def _number(words, high, TYPE: gl.constexpr):
    """The low or the high half of each word."""
    return gl.where(high, words >> 16, words).to(gl.int16).to(TYPE, bitcast=True)


@gluon.jit
def _digits_of(gate, up, TYPE: gl.constexpr, layout: gl.constexpr):
    """SwiGLU of a step [COLUMNS]: the low and the high digits, int32, and the grains of its units, float32 [4].

    As :func:`outrider_triton.jit.planes.keep_in_planes` has them.
    """
    units = gated(gate, up, TYPE).to(gl.float32).reshape((COLUMNS // _UNIT, _UNIT))
    grain, times = grain_and_times(gl.max(units.to(gl.int32, bitcast=True) & 0x7FFFFFFF, axis=1))
    whole = nearest_whole(units * times.expand_dims(1)).reshape((COLUMNS,))
    whole = gl.convert_layout(whole, layout, assert_trivial=True)
    return whole, (whole + 128) >> 8, grain


@gluon.jit
def lay_gated(both, tokens, grains, have, WHICH: gl.constexpr, GROUPS: gl.constexpr, STEPS: gl.constexpr):
    """Of ``both [2 k]``, gate and up of one token: digits of the program's columns to ``tokens``, and their grains to
    ``grains [units, tokens]``. Behind the wait for the kernel ahead.

    This group of warps has every GROUPSth step, from WHICH on, and waits for itself by ``have`` of that one.
    """
    DIGITS: gl.constexpr = tokens.shape[1]
    TOKENS: gl.constexpr = grains.shape[1]
    UNITS: gl.constexpr = COLUMNS // _UNIT
    TYPE: gl.constexpr = both.dtype.element_ty
    spread: gl.constexpr = gl.BlockedLayout([DIGITS, 4], [1, 32], [1, 4], [1, 0])
    column: gl.constexpr = gl.SliceLayout(0, spread)
    held: gl.constexpr = gl.BlockedLayout([1, TOKENS], [1, 32], [4, 1], [1, 0])
    digit = gl.arange(0, DIGITS, gl.SliceLayout(1, spread))[:, None]
    place = gl.arange(0, COLUMNS, column)
    odd = place // _WORDS % 2 > 0
    word = gl.program_id(1) * (STEPS * (COLUMNS // 2)) + place // _UNIT * _WORDS + place % _WORDS
    first = both.to(gl.pointer_type(gl.int32), bitcast=True)
    behind = gl.num_programs(1) * (STEPS * (COLUMNS // 2))
    words = ()
    for step in gl.static_range(WHICH, STEPS, GROUPS):  # all on their way before one is taken
        at = first + (step * (COLUMNS // 2) + word)
        words += (gl.load(at), gl.load(at + behind))
    for step in gl.static_range(WHICH, STEPS, GROUPS):
        gate = _number(words[(step - WHICH) // GROUPS * 2], odd, TYPE)
        up = _number(words[(step - WHICH) // GROUPS * 2 + 1], odd, TYPE)
        low, high, grain = _digits_of(gate, up, TYPE, column)
        low = gl.where(digit == 0, low.expand_dims(0), gl.zeros([DIGITS, COLUMNS], gl.int32, spread))
        tokens.index(step).store(gl.where(digit == 1, high.expand_dims(0), low).to(gl.int8))
        grain = gl.convert_layout(grain, gl.SliceLayout(1, held), assert_trivial=True).expand_dims(1)
        grains.slice(step * UNITS, UNITS, 0).store(grain + gl.zeros([UNITS, TOKENS], gl.float32, held))
    fence_async_shared()
    mbarrier.arrive(have.index(WHICH), count=1)
    mbarrier.wait(have.index(WHICH), 0)
