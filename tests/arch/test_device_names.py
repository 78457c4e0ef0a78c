"""The core names no device: not as a string, not as an attribute, not in an identifier. Docstrings may.

There is no list of exceptions. What depends on a device goes into a backend or into data.
"""

import ast
import re

import pytest

from arch.parsing import nodes

VENDORS = frozenset(
    [
        "cuda",
        "rocm",
        "hip",
        "npu",
        "xpu",
        "mps",
        "musa",
        "hpu",
        "mlu",
        "tpu",
        "xla",
        "ascend",
        "cann",
        "acl",
        "nvidia",
        "amd",
        "hccl",
        "nccl",
        "rccl",
    ]
)
PACKAGES = frozenset(
    ["torch_npu", "torch_xla", "torch_musa", "triton", "flashinfer", "flash_attn", "cupy", "pynvml", "amdsmi"]
)
WORD = re.compile(rf"(?<![a-z0-9])({'|'.join(sorted(VENDORS | PACKAGES))})(?![a-z0-9])", re.IGNORECASE)


def offences(source: str) -> list[str]:
    """``line: what`` for each place that names a device."""
    docstrings = {
        id(node.value) for node in nodes(source) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return [
        f"{getattr(node, 'lineno', 0)}: {match.group()} in {text!r}"
        for node in nodes(source)
        for text in _texts(node, docstrings)
        if (match := WORD.search(text))
    ]


def _texts(node: ast.AST, docstrings: set[int]) -> list[str]:
    match node:
        case ast.Constant(value=str(text)) if id(node) not in docstrings:
            return [text]
        case ast.Constant(value=bytes(data)):
            return [data.decode("latin-1")]
        case ast.Attribute(attr=name) | ast.Name(id=name) | ast.arg(arg=name):
            return [name]
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.alias(name=name, asname=other):
            return [name, other or ""]
        case ast.ImportFrom(module=name):
            return [name or ""]
        case ast.keyword(arg=name):
            return [name or ""]
    return []


def test_no_device_names(core_files):
    assert {name: found for name, text in core_files.items() if (found := offences(text))} == {}


@pytest.mark.parametrize(
    "snippet",
    [
        "import torch.cuda",
        "from torch import cuda",
        "import torch_npu",
        "from torch_npu.contrib import x",
        "import triton.language as tl",
        "torch.cuda.synchronize()",
        "torch.version.hip",
        "x = torch.device('cuda')",
        "x = torch.device('cuda:1')",
        "x = torch.device(f'npu:{i}')",
        "getattr(torch, 'cuda')",
        "if x.device.type == 'npu': pass",
        "t.cuda()",
        "t.npu()",
        "t.is_cuda",
        "def is_npu(): pass",
        "_is_hip = True",
        "class CudaGraph: pass\nclass cuda_graph: pass",
        "f(cuda_stream=1)",
        "def f(npu_stream): pass",
        "try:\n    pass\nexcept ImportError:\n    raise RuntimeError('needs CUDA')",
        "x = b'rocm'",
        "from x import y as is_xpu",
    ],
)
def test_catches(snippet):
    assert offences(snippet)


@pytest.mark.parametrize(
    "snippet",
    [
        '"""Runs on cuda and npu."""',
        'def f():\n    """As torch.cuda does."""',
        'class A:\n    x: int = 0\n    """npu alone."""',
        "# cuda",
        "x = torch.device('cpu')",
        "t = 'chips and ships, scuba, input, npu2'",
    ],
)
def test_passes(snippet):
    assert offences(snippet) == []
