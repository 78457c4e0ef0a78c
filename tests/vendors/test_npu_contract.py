"""Every name of torch_npu that the plugin uses exists in torch_npu 2.13.0, and every call binds to its signature.

From the wheel's files alone: nothing of it is imported and nothing runs. So this says nothing about what a call does.
"""

import ast
import functools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vendors.surface import Mismatch
from vendors.uses import Use, Vocabulary, bind_uses, check_changes, check_record, collect

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ROOT / "backends" / "npu" / "outrider_npu"
BASE = ROOT / "core" / "outrider" / "device" / "torch_backend.py"
STREAM, EVENT, FLAG, GRAPH = (f"torch_npu.npu.{name}" for name in ("Stream", "Event", "ExternalEvent", "NPUGraph"))
WORDS = Vocabulary(
    roots={"torch_npu": "torch_npu"},
    module="torch_npu.npu",
    natives={
        "TorchStream": STREAM,
        "_StreamScope": STREAM,
        "stream": STREAM,
        "TorchEvent": EVENT,
        "NpuFlag": FLAG,
        "TorchGraph": GRAPH,
    },
    made={"_new_graph": GRAPH, "current_stream": STREAM},
)
OTHER_VERSION = [
    ("actual_seq_lengths_kv", "actual_seq_kvlen"),  # names of the operator's second version
    ("num_heads", "num_query_heads"),
    ("scale", "softmax_scale"),
    ("out", "attention_out"),  # the YAML's name, which isn't the registered one
]


def plugin_uses() -> list[Use]:
    """Of the plugin, and of the base class that runs on torch_npu's module when the plugin uses it."""
    return [use for file in (*sorted(PLUGIN.glob("*.py")), BASE) for use in collect(file, WORDS, ROOT)]


USES = plugin_uses()


def test_the_collector_sees_the_plugin():
    """Names that the plugin must use; a collector that loses its way would check nothing and pass."""
    found = {use.path for use in USES}
    for path in (
        "torch_npu.npu_fused_infer_attention_score.out",
        "torch_npu._npu_fused_infer_attention_score_get_max_workspace",
        "torch_npu.npu_rotary_mul",
        "torch_npu.npu.graph_task_group_begin",
        "torch_npu.npu.graph_task_group_end",
        "torch_npu.npu.graph_task_update_begin",
        "torch_npu.npu.graph_task_update_end",
        "torch_npu.npu.ExternalEvent",
        "torch_npu.npu.NPUGraph",
        f"{FLAG}.reset",
        f"{GRAPH}.capture_begin",
        f"{GRAPH}.replay",
        f"{STREAM}.wait_event",
        f"{EVENT}.elapsed_time",
        "torch_npu.npu.mem_get_info",
    ):
        assert path in found, path
    capture = next(use for use in USES if use.path == f"{GRAPH}.capture_begin")
    assert set(capture.call.keywords) == {"capture_error_mode", "pool"}
    turned = next(use for use in USES if use.path == "torch_npu.npu_rotary_mul")
    assert turned.call.positional == 3


def test_no_use_hides_from_the_collector():
    """Each mention of torch_npu in the plugin's code is an import, or part of a use that was collected."""
    for file in sorted(PLUGIN.glob("*.py")):
        tree = ast.parse(file.read_text())
        mentions = sum(isinstance(node, ast.Name) and node.id == "torch_npu" for node in ast.walk(tree))
        if file.name == "plugin.py":
            continue  # holds the module as a value; what it asks of it is checked below
        roots = [
            use for use in collect(file, WORDS, ROOT) if not use.path.startswith("torch_npu.npu.") or "utils" in use.path
        ]
        assert mentions == len(roots), file.name
        assert not re.search(r"getattr\(\s*torch_npu|torch\.npu\b|torch\.ops\.npu\b", file.read_text()), file.name


def test_every_name_resolves_and_every_call_binds(torch_npu_surface, record_property):
    found, problems = bind_uses(torch_npu_surface, USES)
    assert problems == []
    figures = {
        "names": len({use.path for use in USES}),
        "calls bound": sum(kind != "extension" and use.call is not None for use, kind in found),
        "operators": len({use.path for use, kind in found if kind == "operator"}),
        "names of the compiled library": len(compiled_names(torch_npu_surface)),
        "negative controls": sum(3 + len(use.call.keywords) for use in USES if use.call is not None) + len(OTHER_VERSION),
    }
    check_record("npu-static.json", figures, record_property)


def compiled_names(torch_npu_surface):
    """One layer down: the names of the compiled library behind each Python function that the plugin calls."""
    names = set()
    for use in USES:
        node = torch_npu_surface.resolve(use.path).node
        for inner in ast.walk(node) if isinstance(node, ast.FunctionDef) else ():
            match inner:
                case ast.Attribute(value=ast.Attribute(value=ast.Name(id="torch_npu"), attr="_C"), attr=name):
                    names.add(name)
                case ast.Call(func=ast.Name(id=name)) if re.match(r"_graph_|_npu_", name):
                    names.add(name)
                case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=name) if not name.startswith("__"):
                    names.add(name)
    return names


def test_what_python_shims_call_is_compiled(torch_npu_surface, wheel):
    names = compiled_names(torch_npu_surface)
    assert {"_graph_task_update_begin", "capture_begin", "_npu_sleep"} <= names
    assert [name for name in sorted(names) if not wheel.has_symbol(name)] == []
    # A name that isn't there, and one that is there only as a part of others.
    assert not wheel.has_symbol("_graph_task_update_begin_v9")
    assert not wheel.has_symbol("_graph_task_updat")


@pytest.mark.sample(8)
@pytest.mark.parametrize("use", [use for use in USES if use.call is not None], ids=lambda use: f"{use.path}@{use.where}")
def test_a_changed_call_is_caught(torch_npu_surface, use):
    check_changes(torch_npu_surface, use)


@pytest.mark.parametrize(("old", "new"), OTHER_VERSION)
def test_names_of_another_version_are_caught(torch_npu_surface, old, new):
    path = "torch_npu.npu_fused_infer_attention_score.out"
    call = next(use.call for use in USES if use.path == path)
    torch_npu_surface.bind(path, call)
    with pytest.raises(Mismatch, match=new):
        torch_npu_surface.bind(path, replace(call, keywords=tuple(new if k == old else k for k in call.keywords)))


def test_operators_that_the_plugin_asks_for_are_those_that_it_uses():
    from outrider_npu.plugin import OPERATORS

    used = {use.path.split(".")[1] for use in USES if use.path.count(".") <= 2 and not use.path.startswith("torch_npu.npu.")}
    assert set(OPERATORS) == used - {"__version__"}


def test_schemas_that_the_plugin_rests_on(wheel):
    """What the plugin assumes of the operators beyond names."""
    (out,) = wheel.schemas("npu_fused_infer_attention_score.out")
    schema = torch._C.parse_schema(out)
    assert all(argument.alias_info is None for argument in schema.arguments), "it declares its writes now: drop the wrapper"
    kinds = {argument.name: str(argument.type) for argument in schema.arguments}
    assert kinds["actual_seq_lengths_kv"] == "Optional[List[int]]", "lengths are a list of the host"
    assert kinds["workspace"] == "Optional[Tensor]"
    (turn,) = wheel.schemas("npu_rotary_mul")[-1:]
    assert [a.name for a in torch._C.parse_schema(turn).arguments][3] == "rotary_mode"


def test_documented_limits_of_attention(wheel):
    """The numbers that the plugin decides by stand in the operator's documentation."""
    text = wheel.text("torch_npu/_op_plugin_docs.py")
    start = text.index('"npu_fused_infer_attention_score",')
    page = text[start : text.index("_npu_fused_infer_attention_score_get_max_workspace", start)]
    assert re.search(r"block_size最小为128, 最大为512, 且要求是128的倍数", page)
    assert (
        page.count("blocknum不能小于根据actual_seq_lengths_kv和blockSize计算的每个batch的block数量之和") == 2
    )  # Q_S of 1, and more
    assert "比值不能大于64" in page
    assert "N*D小于65535" in page
    assert "所有维度相乘不能超过int32的表示范围" in page
    assert re.search(r"最大不超过512, key、value输入类型为float16、bfloat16时需要16对齐", page)
    assert re.search(r"sparse_mode为3时, 代表rightDownCausal模式", page)
    assert "(2048*2048)" in page
    assert re.search(r"query: Tensor类型, attention结构的Query输入, 数据类型支持float16、bfloat16、int8", page)


LIST = Path(__file__).parent / "operators_of_stages.txt"
X = torch.rand(2, 3)
COMPOSED = {  # operators that torch itself puts together for a device without a kernel of its own; with operands
    "_safe_softmax": (X, -1),
    "full_like": (X, 2.0),
    "masked_fill.Scalar": (X, X > 1, 0.0),
    "new_empty": (X, [2]),
    "new_full": (X, [2], 1.0),
    "new_zeros": (X, [2]),
    "scalar_tensor": (1.0,),
    "zeros_like": (X,),
}


class Asked(TorchDispatchMode):
    """The operators that something is put together from."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name().removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def parts(name):
    """What torch makes an operator of; None where nothing but the CPU could compute it for the device."""
    has = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, f"aten::{name}")
    if has("CompositeExplicitAutogradNonFunctional"):
        packet, _, overload = name.partition(".")
        return {f"{packet}.{overload}_out" if overload else f"{packet}.out"}
    if not has("CompositeExplicitAutograd"):
        return None
    packet, _, overload = name.partition(".")
    function = getattr(getattr(torch.ops.aten, packet), overload or "default")
    with Asked() as asked:
        # A KeyError here: give the operator operands in COMPOSED.
        function._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *COMPOSED[name])
    return asked.names


def resolved(name, registered):
    """Whether the device computes an operator: by itself, or by what torch makes of it."""
    if name in registered:
        return True
    made_of = parts(name)
    return made_of is not None and name not in made_of and all(resolved(part, registered) for part in made_of)


def test_operators_of_the_stages_run_on_the_device(wheel):
    """Registered by torch_npu, or put together by torch from such; any other would be computed on the CPU, with a warning."""
    names = [line for line in LIST.read_text().splitlines() if not line.startswith("#")]
    own = [name for name in names if name in wheel.registered]
    on_the_cpu = [name for name in names if not resolved(name, wheel.registered)]
    assert on_the_cpu == []
    assert len(names) > 80
    assert b"will fall back to run on the CPU" in wheel.library
    page = (ROOT / "docs" / "npu.md").read_text()
    says = f"The stages use {len(names)} operators of torch. torch_npu registers {len(own)} of them"
    assert says in " ".join(page.split()), f"docs/npu.md should say: {says}"


def test_an_operator_that_the_device_lacks_is_found(wheel):
    registered = wheel.registered - {"index_select", "argmax.out", "masked_fill_.Scalar"}
    assert {"index_select", "argmax.out", "masked_fill_.Scalar"} < wheel.registered
    assert [n for n in ("index_select", "argmax", "masked_fill.Scalar", "mm") if resolved(n, registered)] == ["mm"]


def test_sticky_errors_have_the_numbers_of_the_header(wheel):
    header = wheel.text("torch_npu/include/acl/error_codes/rt_error_codes.h")
    tree = ast.parse((PLUGIN / "backend.py").read_text())
    (table,) = [
        node.value.args[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "STICKY_ERRORS"
    ]
    pairs = {key.value: value.value for key, value in zip(table.keys, table.values, strict=True)}
    assert len(pairs) > 5
    for number, name in pairs.items():
        assert re.search(rf"#define\s+{name}\s+{number}\b", header), name


def test_texts_that_errors_are_known_by(wheel):
    for text in (b"NPU out of memory", b"error code is ", b"ACL stream synchronize failed, error code:"):
        assert text in wheel.library
    assert "Two accelerators cannot be used" in wheel.text("torch_npu/__init__.py")


def test_its_streams_are_torchs_streams(wheel):
    """torch.accelerator, which makes a stream current, takes torch's own class; so streams must derive from it."""
    assert "struct THNPStream : THPStream {" in wheel.text("torch_npu/include/torch_npu/csrc/npu/Stream.h")
    assert wheel.has_symbol("device_index")


def test_the_wheel_is_for_the_torch_that_the_plugin_says(wheel):
    from outrider_npu.plugin import version_mismatch

    metadata = wheel.text("torch_npu-2.13.0.dist-info/METADATA")
    assert "Requires-Dist: torch==2.13.0.*" in metadata
    assert version_mismatch("2.13.0+cpu", "2.13.0") is None
    assert version_mismatch("2.12.1", "2.13.0") is not None
