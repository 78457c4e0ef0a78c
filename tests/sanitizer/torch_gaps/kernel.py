"""A Triton kernel, launched past the dispatcher, reads what another stream writes."""

import sys

import torch
import triton
import triton.language as tl


@triton.jit
def double(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)


racy = "right" not in sys.argv
side = torch.cuda.Stream()
x = torch.zeros(1 << 12, device="cuda")
out = torch.zeros_like(x)
torch.cuda.synchronize()
x.add_(1)
if not racy:
    side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    double[(4,)](x, out, x.numel(), BLOCK=1024)
torch.cuda.synchronize()
