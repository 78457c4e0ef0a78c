"""Which of its pointers a Triton kernel reads and writes, from its intermediate representation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider_sanitizer.observation.compiled_launches import compiled_launches, pointers

pytest.importorskip("triton", reason="not run: triton isn't installed")


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """What the compiler makes of each kernel."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = [sys.executable, str(Path(__file__).with_name("ttir_kernels.py"))]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("name", "read", "written"),
    [("add", {0, 1}, {2}), ("loop", {0, 2}, {1, 2}), ("swaps", {2}, {0, 1}), ("picks", {2}, {0, 1, 2})],
)
def test_reads_and_writes_are_told_apart(name: str, read: set[int], written: set[int], texts: dict[str, str]) -> None:
    found = pointers(texts[name])
    assert found is not None
    assert (found.number, found.read, found.written) == (3, read, written)


def test_regions_beside_each_other_use_the_same_names_for_other_values(texts: dict[str, str]) -> None:
    assert pointers(texts["beside"]) == (3, {2}, {0, 1})
    text = """
    tt.func public @k(%x: !tt.ptr<f32>, %y: !tt.ptr<f32>, %z: !tt.ptr<f32>, %c: i1, %n: i32) {
      scf.if %c {
        %a = tt.addptr %x, %n : !tt.ptr<f32>, i32
        %v = tt.load %a : !tt.ptr<f32>
        tt.store %z, %v : !tt.ptr<f32>
      } else {
        %a = tt.addptr %y, %n : !tt.ptr<f32>, i32
        tt.store %a, %d : !tt.ptr<f32>
      }
      tt.return
    }
    """
    assert pointers(text) == (3, {0}, {1, 2})


def test_a_distance_is_no_pointer_and_results_are_told_apart() -> None:
    text = """
    tt.func public @k(%x: !tt.ptr<f32>, %y: !tt.ptr<f32>, %n: i32) {
      %r:2 = scf.for %i = %n to %n step %n iter_args(%p = %x, %at = %n) -> (!tt.ptr<f32>, i32) : i32 {
        %p_0 = tt.addptr %p, %n : !tt.ptr<f32>, i32
        %at_0 = arith.addi %at, %n : i32
        scf.yield %p_0, %at_0 : !tt.ptr<f32>, i32
      }
      %q = tt.addptr %y, %r#1 : !tt.ptr<f32>, i32
      %v = tt.load %r#0 : !tt.ptr<f32>
      tt.store %q, %v : !tt.ptr<f32>
      tt.return
    }
    """
    assert pointers(text) == (2, {0}, {1})


def test_what_cannot_be_followed_counts_as_unknown(texts: dict[str, str]) -> None:
    text = texts["add"]
    assert pointers(text.replace("tt.return", "tt.call @other() : () -> ()\n    tt.return")) is None
    assert pointers("") is None


def test_a_kernel_that_returns_early_is_followed(texts: dict[str, str]) -> None:
    """Engines' kernels leave programs of no request at once; their branches hand pointers on as loops do."""
    text = texts["leaves"]
    assert "cf.cond_br" in text
    found = pointers(text)
    assert found is not None
    assert (found.read, found.written) == ({0}, {1})
    handed = """
    tt.func public @k(%x: !tt.ptr<f32>, %y: !tt.ptr<f32>, %c: i1) {
      cf.cond_br %c, ^bb1(%x : !tt.ptr<f32>), ^bb1(%y : !tt.ptr<f32>)
    ^bb1(%0: !tt.ptr<f32>):  // 2 preds: ^bb0, ^bb0
      %1 = tt.load %0 : !tt.ptr<f32>
      tt.store %y, %1 : !tt.ptr<f32>
      tt.return
    }
    """
    assert pointers(handed) == (2, {0, 1}, {1})


@pytest.mark.parametrize("known", [True, False])
def test_a_launch_tells_its_tensors(known: bool, texts: dict[str, str], monkeypatch: Any) -> None:
    from triton.runtime.jit import JITFunction

    def add(x, y, out, n, BLOCK):
        pass

    compiled = type("Kernel", (), {"asm": {"ttir": texts["add"]} if known else {}})()
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **kwargs: compiled)
    told = []
    x, y, out = (torch.zeros(4) for _ in range(3))
    with compiled_launches(lambda name, tensors: told.append((name, tensors))) as there:
        assert there
        JITFunction(add)[(1,)](x, y, out=out, n=4, BLOCK=128)
    JITFunction(add)[(1,)](x, y, out, 4, BLOCK=128)
    ((name, tensors),) = told
    assert name == "triton::add"
    assert [tensor is given for (_, tensor, _, _), given in zip(tensors, (x, y, out), strict=True)] == [True] * 3
    ways = [(read, written) for _, _, read, written in tensors]
    assert ways == ([(True, False), (True, False), (False, True)] if known else [(True, True)] * 3)
