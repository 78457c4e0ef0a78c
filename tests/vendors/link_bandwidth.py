"""How fast a link writes pages of an 8B shape from process to process: link_bandwidth.py TRANSPORT FROM TO [TOKENS...]

Prints a line of JSON for each number of tokens: milliseconds of one write of all their pages, best of five, and GB/s.
"""

import json
import multiprocessing
import sys
import time

import torch

from outrider.registry import get_backend
from outrider.registry.engine_plugins import get_transport

LAYERS, PAGE, BYTES = 32, 16, 16 * 8 * 128 * 2


def side(name, device, accepts, pipe, tokens):
    backend = get_backend(device)
    pages = max(tokens) // PAGE
    regions = [torch.zeros(pages, BYTES, dtype=torch.uint8, device=backend.device) for _ in range(2 * LAYERS)]
    backend.synchronize()
    link = get_transport(name).open(regions, backend, accepts=accepts, host="127.0.0.1")
    pipe.send(link.offer())
    link.connect(pipe.recv())
    for number, count in enumerate(tokens):
        chosen = list(range(count // PAGE))
        best = float("inf")
        for turn in range(6):
            notice = b"%d %d" % (number, turn)
            if accepts:
                began = time.perf_counter()
                transfer = link.start_write(chosen, chosen, notice)
                while not transfer.done():
                    pass
                best = min(best, time.perf_counter() - began) if turn else best
                pipe.send("next")
            else:
                while link.notices() != [notice]:
                    pass
                pipe.recv()
        if accepts:
            size = len(chosen) * BYTES * len(regions)
            row = {"transport": name, "tokens": count, "MB": size / 1e6, "ms": best * 1e3, "GB_per_s": size / best / 1e9}
            print(json.dumps(row), flush=True)
    link.close()


if __name__ == "__main__":
    name, giver, taker, *counts = sys.argv[1:]
    tokens = [int(each) for each in counts] or [2048]
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    other = spawn.Process(target=side, args=(name, taker, False, there, tokens))
    other.start()
    side(name, giver, True, here, tokens)
    other.join(5)
    sys.exit(other.exitcode)
