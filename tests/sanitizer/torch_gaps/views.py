"""Views of one storage at other offsets: two streams write rows that overlap."""

import sys

import torch

racy = "right" not in sys.argv
side = torch.cuda.Stream()
x = torch.zeros(64, 64, device="cuda")
torch.cuda.synchronize()
x[:40].add_(1)
if not racy:
    side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    x[24:].add_(1)
torch.cuda.synchronize()
