"""What a decoding loop does, in plain torch and without a race: how long a step takes. Argument: where to write it."""

import statistics
import sys
import time

import torch

LAYERS, HIDDEN, HEADS, BATCH, CONTEXT, VOCABULARY, STEPS, FIRST = 8, 512, 8, 8, 512, 4096, 60, 10
torch.manual_seed(0)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda") * 0.02


embedding, head = drawn(VOCABULARY, HIDDEN), drawn(HIDDEN, VOCABULARY)
weights = [[drawn(HIDDEN, 3 * HIDDEN), drawn(HIDDEN, HIDDEN), drawn(HIDDEN, 4 * HIDDEN), drawn(4 * HIDDEN, HIDDEN)]] * LAYERS
caches = [torch.zeros(2, BATCH, HEADS, CONTEXT, HIDDEN // HEADS, device="cuda") for _ in range(LAYERS)]
tokens = torch.zeros(BATCH, dtype=torch.int64, device="cuda")
host = torch.zeros(2, BATCH, dtype=torch.int64, pin_memory=True)
forward, copy = torch.cuda.Stream(), torch.cuda.Stream()
copied = [torch.cuda.Event(), torch.cuda.Event()]
torch.cuda.synchronize()
times = []
for step in range(STEPS):
    begun = time.perf_counter()
    length = step + 1
    with torch.cuda.stream(forward):
        hidden = embedding[tokens]
        for (qkv, out, up, down), cache in zip(weights, caches, strict=True):
            parts = (hidden @ qkv).view(BATCH, 3, HEADS, HIDDEN // HEADS)
            cache[:, :, :, step].copy_(parts[:, 1:].transpose(0, 1))
            seen = cache[:, :, :, :length]
            scores = (parts[:, 0].unsqueeze(2) @ seen[0].transpose(2, 3)).softmax(-1)
            hidden = hidden + (scores @ seen[1]).reshape(BATCH, HIDDEN) @ out
            hidden = hidden + torch.nn.functional.silu(hidden @ up) @ down
        chosen = (hidden @ head).argmax(-1)
        copy.wait_stream(forward)
        tokens.copy_(chosen)
    with torch.cuda.stream(copy):
        host[step % 2].copy_(chosen, non_blocking=True)
        chosen.record_stream(copy)
        copied[step % 2].record()
    if step:
        copied[(step - 1) % 2].synchronize()
        host[(step - 1) % 2].tolist()
    times.append(time.perf_counter() - begun)
torch.cuda.synchronize()
if len(sys.argv) > 1:
    with open(sys.argv[1], "w") as file:
        file.write(str(1e3 * statistics.median(times[FIRST:])))
