"""Memory is released while another stream reads it, and handed out again on the stream that it came from."""

import sys

import torch

racy = "right" not in sys.argv
side = torch.cuda.Stream()
x = torch.ones(1 << 16, device="cuda")
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    y = x * 2
if not racy:
    x.record_stream(side)
del x
z = torch.zeros(1 << 16, device="cuda")
torch.cuda.synchronize()
