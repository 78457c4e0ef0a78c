"""One host thread waits for the writer; another, which doesn't, launches the reader."""

import sys
import threading
import time

import torch

racy = "right" not in sys.argv
side = torch.cuda.Stream()
x = torch.zeros(1 << 16, device="cuda")
torch.cuda.synchronize()
x.add_(1)
done = torch.cuda.Event()
done.record()
waited = threading.Event()
sums = []


def waits() -> None:
    done.synchronize()
    waited.set()


def launches() -> None:
    time.sleep(0.3)  # the other has waited by now, and nothing says so
    if not racy:
        waited.wait()
    with torch.cuda.stream(side):
        sums.append(x.sum())


one, two = threading.Thread(target=waits), threading.Thread(target=launches)
one.start()
two.start()
one.join()
two.join()
torch.cuda.synchronize()
