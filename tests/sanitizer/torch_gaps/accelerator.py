"""The names of `torch.accelerator`, and streams and events that name no vendor."""

import sys

import torch

racy = "right" not in sys.argv
side, done = torch.Stream(), torch.Event()
x = torch.zeros(1 << 16, device="cuda")
torch.accelerator.synchronize()
x.add_(1)
done.record(torch.accelerator.current_stream())
if not racy:
    side.wait_event(done)
with side:
    y = x * 2
torch.accelerator.synchronize()
