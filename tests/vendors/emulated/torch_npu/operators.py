"""Operators of the namespace ``npu``, computed on the host. The schemas are those that libtorch_npu.so registers."""

import torch
from torch import Tensor

_LENGTHS = "SymInt[]? actual_seq_lengths=None, SymInt[]? actual_seq_lengths_kv=None, "
_ATTENTION = (
    "Tensor query, Tensor key, Tensor value, *, Tensor? pse_shift=None, Tensor? atten_mask=None, " + _LENGTHS + "Tensor? "
    "dequant_scale1=None, Tensor? quant_scale1=None, Tensor? dequant_scale2=None, Tensor? quant_scale2=None, Tensor? "
    "quant_offset2=None, Tensor? antiquant_scale=None, Tensor? antiquant_offset=None, Tensor? key_antiquant_scale=None, "
    "Tensor? key_antiquant_offset=None, Tensor? value_antiquant_scale=None, Tensor? value_antiquant_offset=None, Tensor? "
    "block_table=None, Tensor? query_padding_size=None, Tensor? kv_padding_size=None, Tensor? key_shared_prefix=None, "
    "Tensor? value_shared_prefix=None, SymInt[]? actual_shared_prefix_len=None, Tensor? query_rope=None, Tensor? "
    "key_rope=None, Tensor? key_rope_antiquant_scale=None, int num_heads=1, float scale=1.0, int pre_tokens=2147483647, "
    'int next_tokens=2147483647, str input_layout="BSH", int num_key_value_heads=0, int sparse_mode=0, int '
    "inner_precise=0, int block_size=0, int antiquant_mode=0, int key_antiquant_mode=0, int value_antiquant_mode=0, bool "
    "softmax_lse_flag=False"
)
SCHEMAS = (
    f"npu_fused_infer_attention_score({_ATTENTION}) -> (Tensor, Tensor)",
    f"npu_fused_infer_attention_score.out({_ATTENTION}, Tensor? workspace=None, Tensor[] out) -> (Tensor, Tensor)",
    f"_npu_fused_infer_attention_score_get_max_workspace({_ATTENTION}) -> Tensor",
    "npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half', Tensor? rotate=None) -> Tensor",
)
_WORKSPACE_BYTES = 4096
# The operators' limits, which a test may lift where it's about something else (emulation.lift_limits).
LIMITS = {
    "attention": {torch.float16, torch.bfloat16},
    "rotation": {torch.float16, torch.bfloat16, torch.float32},
    "head": 16,
    "page": 128,
    "page of one": 16,
}
_LIBRARY = torch.library.Library("npu", "DEF")
for _schema in SCHEMAS:
    _LIBRARY.define(_schema)


def _rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None) -> Tensor:
    _check(rotary_mode == "half" and rotate is None, "the emulation rotates halves")
    _check(input.dim() == 4 and r1.dim() == 4, "npu_rotary_mul takes four dimensions")
    _check(input.dtype in LIMITS["rotation"], f"npu_rotary_mul doesn't take {input.dtype}")
    _check(r1.shape == (1, input.shape[1], 1, input.shape[3]), f"r1 {tuple(r1.shape)} isn't 1S1D beside BSND")
    first, second = input.chunk(2, dim=-1)
    return r1 * input + r2 * torch.cat((-second, first), dim=-1)


def _max_workspace(query: Tensor, key: Tensor, value: Tensor, **_: object) -> Tensor:
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)


def _attention_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_lengths_kv: list[int] | None = None,
    block_table: Tensor | None = None,
    num_heads: int = 1,
    num_key_value_heads: int = 0,
    scale: float = 1.0,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    softmax_lse_flag: bool = False,
    workspace: Tensor | None = None,
    out: list[Tensor],
    **rest: object,
) -> tuple[Tensor, Tensor]:
    """Paged attention within the operator's documented limits; what is outside them raises, as aclnn does."""
    stray = [name for name, value in rest.items() if value not in (None, 0, 2147483647)]
    _check(not stray and not softmax_lse_flag, f"the emulation doesn't do {stray}")
    _check(input_layout == "BSND", f"the emulation does BSND, not {input_layout}")
    _check(query.dtype in LIMITS["attention"], f"query is {query.dtype}: float16, bfloat16 are taken")
    _check(block_table is not None and actual_seq_lengths_kv is not None, "pages need a table and the lengths")
    assert block_table is not None
    assert actual_seq_lengths_kv is not None
    batch, width, heads, size = query.shape
    _check(heads == num_heads and size % LIMITS["head"] == 0 and size <= 512, f"{heads} heads of {size}")
    _check(key.shape == value.shape and key.shape[2] == num_key_value_heads * size, f"pages of {tuple(key.shape)}")
    _check(key.shape[1] == block_size, f"block_size {block_size} beside pages of {key.shape[1]}")
    unit = LIMITS["page of one" if width == 1 else "page"]
    _check(block_size % unit == 0 and 0 < block_size <= 512, f"block_size {block_size} with {width} new tokens each")
    _check(block_table.dtype == torch.int32 and block_table.shape[0] == batch, "block_table is int32 [B, pages]")
    _check(len(actual_seq_lengths_kv) == batch, f"{len(actual_seq_lengths_kv)} lengths for a batch of {batch}")
    _check(
        heads <= 64 * num_key_value_heads and heads * size < 65535, f"{heads} heads of {size}, {num_key_value_heads} of keys"
    )
    blocks = sum(-(-length // block_size) for length in actual_seq_lengths_kv)
    _check(blocks <= key.shape[0], f"blocknum {key.shape[0]} is less than the {blocks} blocks of the batch")
    for tensor in (query, key, value, *([] if atten_mask is None else [atten_mask])):
        _check(tensor.is_contiguous(), "an operand isn't contiguous")
    span = block_table.shape[1] * block_size
    _check(inner_precise in ((0, 1) if width == 1 else (0, 1, 2, 3)), f"inner_precise {inner_precise}")
    if sparse_mode == 3 and width > 1:
        _check(atten_mask is not None and atten_mask.shape == (2048, 2048), "sparse mode 3 takes a mask of 2048 x 2048")
        assert atten_mask is not None
        # 1 hides: the part above the diagonal. A corner says so; all four million cells would take their time.
        corner = atten_mask[:2, :2].bool().tolist()
        _check(corner == [[False, True], [False, False]], f"the mask's corner is {corner}, 1 hides")
    elif atten_mask is not None:
        _check(atten_mask.dtype in (torch.bool, torch.int8, torch.uint8), f"the mask is {atten_mask.dtype}")
        _check(atten_mask.shape == (batch, 1, width, atten_mask.shape[3]), f"a mask of {tuple(atten_mask.shape)}")
        _check(atten_mask.shape[3] >= span, f"the mask reaches {atten_mask.shape[3]} of {span}")
    for row, length in enumerate(actual_seq_lengths_kv):
        _check(0 <= length <= span, f"length {length} doesn't fit in {span}")
        hidden = _hidden(sparse_mode, atten_mask, row, width, length)
        fixed = bool(inner_precise & 2)
        out[0][row] = _attend(query[row], key, value, block_table[row], length, num_key_value_heads, scale, hidden, fixed)
    out[1].zero_()
    return out[0], out[1]


def _hidden(sparse_mode: int, mask: Tensor | None, row: int, width: int, length: int) -> Tensor:
    """What each new token doesn't see of the first ``length`` tokens."""
    if sparse_mode == 3 and width > 1:
        _check(length >= width, f"{width} new tokens in a sequence of {length}")
        return torch.arange(length) > torch.arange(width).unsqueeze(1) + (length - width)
    if mask is not None:
        return mask[row, 0, :, :length].bool()
    return torch.zeros((width, length), dtype=torch.bool)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    length: int,
    kv_heads: int,
    scale: float,
    hidden: Tensor,
    fixed: bool,
) -> Tensor:
    """One sequence, in float32, or float64 where the query is. Reads the pages up to ``length`` and not a token more.
    ``fixed``: a row that sees nothing gives zeros, else whatever comes out.
    """
    heads, size = query.shape[1:]
    pages = table[: (length + key.shape[1] - 1) // key.shape[1]].long()
    wide = torch.promote_types(query.dtype, torch.float32)
    keys, values = (c[pages].flatten(0, 1)[:length].view(length, kv_heads, size).to(wide) for c in (key, value))
    keys, values = (c.repeat_interleave(heads // kv_heads, dim=1) for c in (keys, values))
    scores = torch.einsum("whd,lhd->hwl", query.to(wide), keys) * scale
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf") if fixed else -10000.0), dim=-1)
    return torch.einsum("hwl,lhd->whd", weights.nan_to_num(0.0) if fixed else weights, values).to(query.dtype)


def _check(holds: bool, text: str) -> None:
    if not holds:
        raise RuntimeError(f"call aclnnFusedInferAttentionScoreV3 failed, detail: {text}; error code is 161002")


_LIBRARY.impl("npu_rotary_mul", _rotary_mul, "CompositeExplicitAutograd")
_LIBRARY.impl("_npu_fused_infer_attention_score_get_max_workspace", _max_workspace, "CompositeExplicitAutograd")
_LIBRARY.impl("npu_fused_infer_attention_score.out", _attention_out, "CompositeExplicitAutograd")
