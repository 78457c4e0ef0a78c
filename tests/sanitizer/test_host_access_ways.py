"""Every way in which the host reads or writes pinned memory counts: with a copy in flight a finding, after it silence."""

from __future__ import annotations

import pytest
import torch

from outrider_sanitizer import FindingKind, watch
from outrider_sanitizer.cuda_names import map_cuda_names
from outrider_sim.backend import SimBackend

READS = """
p.tolist() | p[0].item() | float(p[1]) | p.clone() | p + 1 | p.sum() | bool(p[0] > 0) | repr(p) | torch.equal(p, p)
p.numpy().tolist() | a[0] | a[1:3].copy() | a.sum() | a.max() | a + 1 | a.tolist() | a.item(2) | a.astype('i4')
a.tobytes()
np.array(a) | np.asarray(a).tobytes() | np.ascontiguousarray(a)[0] | np.cumsum(a) | np.sort(a)
np.concatenate([a, a])
torch.from_numpy(a).sum() | torch.tensor(a) | torch.as_tensor(a).tolist() | torch.from_dlpack(a).sum()
np.from_dlpack(p).sum()
memoryview(a)[0] | memoryview(a).tobytes() | bytes(memoryview(a)) | a.data[0] | list(a.flat) | a.flat[1] | bytes(a)
float(a[0])
a.argmax() | a.take([0]) | a.dot(a) | a.any() | a.copy() | 1.0 in a | str(a) | list(a) | a.reshape(2, -1)[0, 0]
a[[0, 1]]
np.split(a, 2)[0].sum() | np.where(a > 0) | np.array_equal(a, a) | copy.deepcopy(a) | pickle.dumps(a)
np.asarray(p)[0]
np.asarray(a, dtype='f8').sum() | a.T.sum() | np.isnan(a) | np.add.reduce(a) | sum(a) | np.frombuffer(a, 'f4')[0]
"""
WRITES = """
p.fill_(2) | p[0] = 2 | p.copy_(torch.ones(8)) | p.add_(1) | torch.add(p, 1, out=p) | p.zero_() | p[1:3].fill_(2)
p.random_()
a[0] = 2 | a[:] = 2 | a += 1 | a.fill(2) | a.put([0], 2) | a.sort() | a.flat[0] = 2 | a.flat = 2 | a.partition(2)
a.data[0] = 2.0 | np.copyto(a, 2) | np.put(a, [0], 2) | np.place(a, a > -1, 2) | np.putmask(a, a > -1, 2)
np.add(a, 1, out=a)
np.cumsum(np.ones(7), out=a[1:]) | np.cumsum(np.ones(8), None, None, a) | a.byteswap(inplace=True)
np.add.at(a, [0], 1)
torch.from_numpy(a).fill_(2) | torch.as_tensor(a).add_(1) | torch.from_dlpack(a).fill_(2) | memoryview(a)[0] = 2.0
np.reshape(a, (2, 4))[0] = 2 | np.split(a, 2)[0][:] = 2 | a.view('i4')[0] = 2 | np.asarray(p)[0] = 2
np.from_dlpack(p)[0] = 2 | np.ravel(a)[1] = 2 | np.take([2.0] * 8, [0] * 8, out=a) | np.clip(np.ones(8), 0, 1, out=a)
a.clip(0, 1, out=a) | a.resize(8)
np.matmul(np.ones((8, 8)), np.ones(8), out=a) | np.fill_diagonal(a.reshape(2, 4), 2) | a.setfield(2, 'f4')
np.require(a)[0] = 2
"""


def split(text: str) -> list[str]:
    return [part.strip() for line in text.strip().splitlines() for part in line.split(" | ")]


def report_of(statement: str, writes: bool, racy: bool) -> object:
    source = f"""
import copy, pickle
import numpy as np, torch
p = torch.ones(8, pin_memory=True)
a = p.numpy()
x = torch.ones(8, device="cuda")
side = torch.cuda.Stream()
torch.cuda.synchronize()
with torch.cuda.stream(side):
    {"x.copy_(p, non_blocking=True)" if writes else "p.copy_(x, non_blocking=True)"}
{"" if racy else "side.synchronize()"}
{statement}
torch.cuda.synchronize()
"""
    backend = SimBackend()
    with watch(backend) as report, map_cuda_names(backend):
        exec(compile(source, "script.py", "exec"), {"__name__": "__main__"})
    return report


@pytest.mark.parametrize(
    ("statements", "writes", "kind"),
    [(READS, False, FindingKind.READ_AFTER_WRITE), (WRITES, True, FindingKind.WRITE_AFTER_READ)],
    ids=["reads", "writes"],
)
def test_each_way_is_an_access(statements: str, writes: bool, kind: FindingKind) -> None:
    missed, flagged = [], []
    for statement in split(statements):
        racy = report_of(statement, writes, racy=True)
        right = report_of(statement, writes, racy=False)
        if not any(finding.kind is kind and finding.second.location == "script.py:12" for finding in racy):
            missed.append(statement)
        if not right.clean:
            flagged.append(statement)
    assert (missed, flagged) == ([], [])


def test_the_names_are_torchs_again_after_the_run() -> None:
    before = (torch.from_numpy, torch.as_tensor, memoryview)
    with watch(SimBackend()):
        assert torch.from_numpy is not before[0]
    assert (torch.from_numpy, torch.as_tensor, memoryview) == before
