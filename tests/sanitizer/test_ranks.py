"""Scripts with torch.distributed, run as ranks on simulated devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.main import main

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

def run():
    dist.init_process_group("nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    assert (rank, size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    assert torch.sim.current_device() == rank == int(os.environ["LOCAL_RANK"])
    x = torch.full((4,), rank + 1.0, device="sim")
    dist.all_reduce(x)
    work = dist.all_reduce(x, async_op=True)
    if "no-wait" not in sys.argv:
        work.wait()
    y = x + 1
    if "no-wait" in sys.argv:
        return
    assert y.tolist() == [size * size * (size + 1) / 2 + 1] * 4
    out = [torch.empty(4, device="sim") for _ in range(size)]
    dist.all_gather(out, x)
    part = torch.empty(4, device="sim")
    dist.reduce_scatter(part, out)
    assert torch.equal(part.cpu(), size * x.cpu())
    host = torch.tensor([rank])
    dist.all_reduce(host, op=dist.ReduceOp.MAX)
    assert host.item() == size - 1
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": n} for n in range(size)]
    pair = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(x, group=pair)
        dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
    summed = functional.all_reduce(torch.ones(2, device="sim"), "sum", dist.group.WORLD) + 1
    assert summed.tolist() == [size + 1.0] * 2
    dist.barrier()
    if "other-call" in sys.argv and rank == 1:
        dist.broadcast(x, 0)
    elif not ("ends" in sys.argv and rank == 1):
        dist.all_reduce(x)
    sys.argv.pop()
    torch.sim.synchronize()

if __name__ == "__main__":
    run()
"""


def sanitize(capsys: pytest.CaptureFixture[str], path: Path, ranks: int, *arguments: str) -> tuple[int, Any]:
    code = main(["sanitize", "--json", "--ranks", str(ranks), "--", str(path), *arguments])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_right_script_is_clean(capsys: pytest.CaptureFixture[str], script: Path, ranks: int) -> None:
    code, data = sanitize(capsys, script, ranks)
    assert (code, data["script_error"], data["clean"]) == (0, None, True), data


@pytest.mark.parametrize(
    ("wrong", "title", "line"),
    [
        ("no-wait", "read after write", "y = x + 1"),
        ("other-call", "ranks call different collectives", "dist.broadcast(x, 0)"),
        ("ends", "collective that a rank never makes", "dist.all_reduce(x)"),
    ],
)
def test_a_wrong_one_is_named_with_its_lines(
    capsys: pytest.CaptureFixture[str], script: Path, wrong: str, title: str, line: str
) -> None:
    code, data = sanitize(capsys, script, 2, wrong)
    assert code == 1
    found = {finding["title"]: finding for report in data["reports"] for finding in report["findings"]}
    assert title in found, data
    numbers = {number for number, text in enumerate(SCRIPT.splitlines(), 1) if text.strip().startswith(line)}
    sites = [found[title]["first"], found[title]["second"]]
    assert any(int(site["location"].rpartition(":")[2]) in numbers for site in sites if site), found[title]
    if wrong == "ends":
        assert "has ended" in data["script_error"]
