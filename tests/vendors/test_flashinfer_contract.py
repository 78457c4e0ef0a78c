"""Every name of FlashInfer that the plugin uses exists in 0.6.14, every call binds, and what else it rests on stands there.

From the wheel's files alone: nothing of it is imported and nothing runs. So this says nothing about what a call does.
"""

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest

from vendors.surface import Mismatch, Surface
from vendors.uses import Vocabulary, bind_uses, check_changes, collect

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ROOT / "kernels" / "outrider_flashinfer"
STAND_IN = Path(__file__).parent / "emulated_flashinfer" / "flashinfer"
WRAPPER = "flashinfer.BatchPrefillWithPagedKVCacheWrapper"
SPEC = "flashinfer.jit.JitSpec"
WORDS = Vocabulary(
    roots={
        "flashinfer": "flashinfer",
        "gen_batch_prefill_module": "flashinfer.jit.gen_batch_prefill_module",
        "BatchPrefillWithPagedKVCacheWrapper": WRAPPER,
        # The plugin's names for objects of FlashInfer's classes.
        "made": WRAPPER,
        "wrapper": WRAPPER,
        "spec": SPEC,
    },
    module="",
)
OTHER_VERSION = [("seq_lens", "seq_lens_kv"), ("window_left", "sliding_window"), ("sm_scale", "softmax_scale")]
USES = [use for file in sorted(PLUGIN.glob("*.py")) for use in collect(file, WORDS, ROOT)]
CALLS = [use for use in USES if use.call is not None]


@pytest.fixture(scope="module")
def surface(flashinfer_wheel):
    return Surface(flashinfer_wheel)


def test_the_collector_sees_the_plugin():
    """Names that the plugin must use; a collector that loses its way would check nothing and pass."""
    called = {use.path: use.call for use in CALLS}
    assert set(called) == {
        WRAPPER,
        f"{WRAPPER}.reset_workspace_buffer",
        f"{WRAPPER}.plan",
        f"{WRAPPER}.run",
        "flashinfer.jit.gen_batch_prefill_module",
        f"{SPEC}.build_and_load",
    }
    assert {"use_cuda_graph", "custom_mask_buf", "mask_indptr_buf", "backend"} <= set(called[WRAPPER].keywords)
    assert {"seq_lens", "max_token_per_sequence", "window_left"} <= set(called[f"{WRAPPER}.plan"].keywords)
    assert {"flashinfer.__version__", f"{SPEC}.is_compiled"} <= {use.path for use in USES}


def test_every_name_resolves_and_every_call_binds(surface):
    assert bind_uses(surface, USES)[1] == []


@pytest.mark.parametrize("use", CALLS, ids=lambda use: f"{use.path}@{use.where}")
def test_a_changed_call_is_caught(surface, use):
    check_changes(surface, use)


@pytest.mark.parametrize(("old", "new"), OTHER_VERSION)
def test_names_of_another_version_are_caught(surface, old, new):
    call = next(use.call for use in CALLS if use.path == f"{WRAPPER}.plan")
    with pytest.raises(Mismatch, match=new):
        surface.bind(f"{WRAPPER}.plan", replace(call, keywords=tuple(new if k == old else k for k in call.keywords)))


def test_the_stand_in_has_the_same_arguments_in_the_same_order(surface):
    tree = ast.parse((STAND_IN / "__init__.py").read_text())
    (stand_in,) = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for node in [node for node in stand_in.body if isinstance(node, ast.FunctionDef)]:
        path = WRAPPER if node.name == "__init__" else f"{WRAPPER}.{node.name}"
        real = list(surface.signature(path).parameters)
        plain = [argument.arg for argument in node.args.args[1:]]
        assert plain == real[: len(plain)], node.name
        assert {argument.arg for argument in node.args.kwonlyargs} <= set(real), node.name
    jit = ast.parse((STAND_IN / "jit.py").read_text())
    (build,) = [node for node in jit.body if isinstance(node, ast.FunctionDef)]
    real = list(surface.signature("flashinfer.jit.gen_batch_prefill_module").parameters)
    assert [argument.arg for argument in build.args.args] == real


# -- what the plugin rests on beyond names -------------------------------------------------------------------------


def method(wheel, name):
    text = wheel.text("flashinfer/prefill.py")
    (wrapper,) = [n for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name == WRAPPER.split(".")[1]]
    node = [n for n in wrapper.body if isinstance(n, ast.FunctionDef) and n.name == name][-1]
    return ast.unparse(node)


def test_planning_copies_without_waiting(flashinfer_wheel):
    """To fixed buffers on the current stream; lengths on the host are taken as they are."""
    plan = method(flashinfer_wheel, "plan")
    for buffer, value in (
        ("qo_indptr", "qo_indptr"),
        ("paged_kv_indptr", "paged_kv_indptr"),
        ("paged_kv_last_page_len", "paged_kv_last_page_len"),
    ):
        assert f"self._{buffer}_buf.copy_({value}, non_blocking=non_blocking)" in plan
    assert "synchronize" not in plan
    assert "qo_indptr_host = qo_indptr.to('cpu')" in plan
    assert "kv_lens_arr_host = seq_lens.cpu().flatten()" in plan
    assert "if max_token_per_sequence is not None" in plan


def test_masks_are_taken_from_the_buffers_of_the_constructor(flashinfer_wheel):
    """A plan without a mask leaves them, and a run goes by them: bits, the lowest first, from a byte of each request."""
    plan, run = method(flashinfer_wheel, "plan"), method(flashinfer_wheel, "run")
    fixed = plan[plan.index("if self.is_cuda_graph_enabled") : plan.index("self._qo_indptr_buf = qo_indptr.to")]
    assert "self._custom_mask_buf = " not in fixed
    assert "if self._custom_mask_buf is not None:\n        mask_mode = MaskMode.CUSTOM.value" in run
    variants = flashinfer_wheel.text("flashinfer/data/include/flashinfer/attention/variants.cuh")
    assert "custom_mask_ptr = params.maybe_custom_mask + params.maybe_mask_indptr[batch_idx];" in variants
    assert "const uint64_t offset = static_cast<uint64_t>(qo_idx) * kv_len + kv_idx;" in variants
    assert "mask &= (kv_idx + qo_len + window_left >= kv_len + qo_idx);" in variants
    assert "((custom_mask_ptr[offset / 8] >> (offset % 8)) & 1)" in variants


def test_a_run_takes_no_other_window_and_writes_where_it_is_told(flashinfer_wheel):
    run = method(flashinfer_wheel, "run")
    assert "if q.size(0) != self._qo_indptr_last" in run
    assert "out = torch.zeros(" in run  # which `out` saves
    assert "sm_scale = self._sm_scale" in run


def test_numbers_of_the_scheduler(flashinfer_wheel):
    """Those by which scratch memory is measured, and the copy of the tables: pinned, on the stream of the call."""
    from outrider_flashinfer import buffers  # the package is there; its plan needs FlashInfer to be imported

    assert buffers.mask_bytes(3, 5) == 2
    source = (PLUGIN / "plan.py").read_text()
    scheduler = flashinfer_wheel.text("flashinfer/data/include/flashinfer/attention/scheduler.cuh")
    prefill = scheduler[scheduler.index("inline cudaError_t PrefillPlan(") :]
    assert "int num_blocks_per_sm = 2;" in prefill
    assert "_PROGRAMS = 2\n" in source
    assert "cudaMemcpyAsync(int_buffer, page_locked_int_buffer, num_bytes_to_copy," in prefill
    assert "num_qo_heads * padded_batch_size * cta_tile_q * head_dim_vo * sizeof(float)" in prefill
    assert "enable_cuda_graph ? std::max(max_batch_size_if_split, total_num_tiles_q) : new_batch_size;" in scheduler
    assert "total_num_tiles_q = ceil_div(total_num_rows * gqa_group_size, cta_tile_q) + batch_size - 1;" in scheduler
    tiles = flashinfer_wheel.text("flashinfer/data/include/flashinfer/utils.cuh")
    body = tiles[tiles.index("inline uint32_t FA2DetermineCtaTileQ") :][:1100]
    small = body[body.index("if (avg_packed_qo_len > 64 && head_dim < 256)") :].split("\n}")[0]
    assert {int(n) for n in re.findall(r"return (\d+);", small)} == {16, 64, 128}
    assert "_TILES = (16, 64, 128)\n" in source


def test_head_sizes_below_64_are_refused_by_its_kernels(flashinfer_wheel):
    kernels = flashinfer_wheel.text("flashinfer/data/include/flashinfer/attention/prefill.cuh")
    assert "(NUM_MMA_D_VO < 4)" in kernels  # in steps of 16
    assert "HEAD_SIZES = (64, 128, 256)\n" in (PLUGIN / "kernelset.py").read_text()


def test_the_version_is_the_one_that_is_asked_for(flashinfer_wheel):
    from outrider_flashinfer import plugin

    assert "0.6.14".startswith(plugin._TESTED)
    metadata = flashinfer_wheel.text("flashinfer_python-0.6.14.dist-info/METADATA")
    assert "Requires-Dist: apache-tvm-ffi!=0.1.8,!=0.1.8.post0,<0.2,>=0.1.6" in metadata
