"""A stream's last read is followed by ten thousand of another's, and then by a write: every read is remembered."""

import sys

import torch

racy = "right" not in sys.argv
reads = 10_000
side = torch.cuda.Stream()
x = torch.zeros(16, device="cuda")
out = torch.zeros_like(x)
torch.cuda.synchronize()
with torch.cuda.stream(side):
    y = x + 1
for _ in range(reads):
    torch.mul(x, 2, out=out)
if not racy:
    torch.cuda.current_stream().wait_stream(side)
x.add_(1)
torch.cuda.synchronize()
