"""Training steps whose inputs arrive on a stream of their own; with `right` what they need is ordered."""

import sys

import torch

racy = "right" not in sys.argv
side = torch.cuda.Stream()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batches = [torch.randn(32, 64).pin_memory() for _ in range(3)]
torch.cuda.synchronize()
for batch in batches:
    with torch.cuda.stream(side):
        given = batch.to("cuda", non_blocking=True)
    if not racy:
        torch.cuda.current_stream().wait_stream(side)
        given.record_stream(torch.cuda.current_stream())
    loss = model(given).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torch.cuda.synchronize()
