"""A graph is replayed, and its input is overwritten on another stream."""

import sys

import torch

racy = "right" not in sys.argv
side = torch.cuda.Stream()
x = torch.ones(1 << 16, device="cuda")
out = torch.zeros_like(x)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    torch.mul(x, 2, out=out)
torch.cuda.synchronize()
graph.replay()
if not racy:
    side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    x.fill_(3)
torch.cuda.synchronize()
