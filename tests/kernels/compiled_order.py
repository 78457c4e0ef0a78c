"""The order in which a compiled kernel waits for the one ahead, lets the next one start, reads and writes."""

import re
import subprocess
import tempfile

import triton

LATE = {"linear_silu_mul", "streamed_silu_mul", "linear_planes", "linear_quantized"}
LATE |= {"expert_gates", "tall_silu_mul", "tall_experts", "gather_pairs", "multiply_scaled_blocks"}
LATE |= {"prefill_silu_mul"}
"""One of them is in each layer: what starts behind it may read what was written before it (docs/kernels.md)."""
READS_WEIGHTS = {
    "norm_rope_write_cache",
    "head_linear",
    "router_logits",
    "all_reduce_rms_norm",
    "rms_norm",
    "add_rms_norm",
    "linear_add",
    "streamed_linear_add",
}
READS_WEIGHTS |= {"add_rms_norm_quantize", "linear_quantized", "linear_planes", "streamed_planes"}
READS_WEIGHTS |= {"add_gated", "add_parts_rope_write_cache", "delta_rule", "delta_rule_shared"}
READS_WEIGHTS |= {"gate_quantize", "gated_rms_norm", "short_convolution"}
"""Before the wait: weights, which no kernel writes."""
READS_SETTLED = {"expert_outputs"}
"""Before the wait: what was written ahead of a kernel that begins late and that it always follows."""


def check_order(name: str, ptx: str, *, settled: bool) -> None:
    """What a kernel does before it waits for the one ahead: nothing is written, and only what is settled is read."""
    wait, launch = ptx.index("griddepcontrol.wait"), ptx.index("griddepcontrol.launch_dependents")
    before = ptx[:wait]
    assert (wait < launch) is (name in LATE), f"{name}: waits and lets the next one start in the wrong order"
    written = [access for access in ("st.global", "red.global", "atom.global") if access in before]
    assert not written, f"{name}: {written} before the wait"
    read = "ld.global" in before or "cp.async.ca" in before or "cp.async.cg" in before
    assert not read or settled or name in READS_WEIGHTS | READS_SETTLED, f"{name}: reads before the wait"
    assert read or not settled, f"{name}: reads nothing before the wait, though it could"


USES_SHARED = ("wgmma.wait_group", "ldmatrix", "stmatrix", "ld.shared", "st.shared")


def check_order_of_both(name: str, ptx: str, *, late: bool = False) -> None:
    """The same of a kernel one warp of which brings what the others, whose code comes first, multiply."""
    others, brings = ptx[: ptx.index("cp.async.bulk.tensor")], ptx[ptx.index("cp.async.bulk.tensor") :]
    before = others[: others.index("griddepcontrol.wait")]
    assert "st.global" not in before, f"{name}: writes before the wait"
    assert ("ld.global" in before) <= (name in READS_WEIGHTS), f"{name}: reads before the wait"
    assert "launch_dependents" not in others, f"{name}: lets the next one start where others still wait"
    until = brings[: brings.rindex("launch_dependents")]  # behind this may lie what others do last
    assert "st.global" not in until, f"{name}: the warp that brings writes"
    assert "ld.global" not in brings, f"{name}: the warp that brings reads"
    check_arrivals(name, others)
    order = re.findall("griddepcontrol.(wait|launch_dependents)", brings)
    expected = ["wait", "launch_dependents"] if late or name in LATE else ["launch_dependents", "wait"]
    assert order, f"{name}: the warp that brings doesn't wait"
    assert order == expected * (len(order) // 2), f"{name}: waits and lets the next one start in the wrong order"


def check_order_beside_a_weight(name: str, ptx: str, *, groups: int = 0) -> None:
    """The same of a kernel one warp of which brings the weight alone, ahead of the wait: others wait, and bring the rest. So
    many ``groups`` of warps read it, each behind a wait of its own.
    """
    order = re.findall("griddepcontrol.(wait|launch_dependents)", ptx)
    waits = ["wait"] * (groups - 1)
    assert order == ["wait", "launch_dependents", *waits], f"{name}: waits and lets the next one start as {order}"
    before, behind = ptx.split("griddepcontrol.wait", 1)
    for own in behind.split("griddepcontrol.wait") if groups else ():
        assert "ld.global" in own, f"{name}: a group reads no gate behind its wait"
        assert own.index("ld.global") < own.index("fence.proxy.async"), f"{name}: the engine isn't told of what was written"
    assert "st.global" not in before, f"{name}: writes before the wait"
    assert "cp.async.bulk.tensor" not in before, f"{name}: brings tokens before the wait"
    weight = behind[max(behind.rindex("st.global"), behind.rindex("wgmma.wait_group")) :]
    assert "cp.async.bulk.tensor" in weight, f"{name}: nobody brings the weight"
    assert "ld.global" not in weight, f"{name}: the warp that brings reads"
    check_arrivals(name, ptx)


def check_order_of_groups(name: str, ptx: str, groups: int) -> None:
    """The same of a kernel whose groups of warps each wait, and one warp beside that brings tokens; another the weight."""
    order = re.findall("griddepcontrol.(wait|launch_dependents)", ptx)
    assert order == ["wait"] * groups + ["wait", "launch_dependents"], f"{name}: waits and lets the next one start as {order}"
    before, *each, tokens = ptx.split("griddepcontrol.wait")
    assert not {access for access in ("st.global", "cp.async.bulk.tensor") if access in before}, f"{name}: before the wait"
    assert all("st.global" in own for own in each), f"{name}: a group writes nothing"
    assert "cp.async.bulk.tensor" in tokens, f"{name}: nobody brings tokens"
    assert "st.global" not in tokens, f"{name}: a warp that brings writes"
    assert "ld.global" not in ptx, f"{name}: reads otherwise"
    check_arrivals(name, ptx)


def check_order_of_tiles(name: str, ptx: str, groups: int) -> None:
    """The same of a kernel whose code the compiler lays out otherwise: stores of a group come last."""
    order = re.findall("griddepcontrol.(wait|launch_dependents)", ptx)
    last = ["wait", "launch_dependents"] if name in LATE else ["launch_dependents", "wait"]
    assert order == ["wait"] * groups + last, f"{name}: waits and lets the next one start as {order}"
    before, *_ = ptx.split("griddepcontrol.wait")
    accesses = {access for access in ("st.global", "ld.global", "cp.async.bulk.tensor") if access in before}
    assert not accesses, f"{name}: {accesses} before the wait"
    stores = [ptx.count(store) for store in ("st.global", "cp.async.bulk.tensor.2d.global")]
    assert max(stores) >= groups, f"{name}: a group writes nothing"
    check_arrivals(name, ptx)


def check_order_beside_pages(name: str, ptx: str, *, settled: bool) -> None:
    """The same of a kernel one warp of which brings pages: settled ones ahead of the wait."""
    order = re.findall("griddepcontrol.(wait|launch_dependents)", ptx)
    assert order == ["launch_dependents", "wait", "wait"], f"{name}: waits and lets the next one start as {order}"
    before, between, behind = ptx.split("griddepcontrol.wait")
    assert "st.global" not in before, f"{name}: writes before the wait"
    assert ("ld.global" in before) is settled, f"{name}: reads before the wait: {not settled}"
    assert "cp.async.bulk.tensor" not in before, f"{name}: those who attend bring pages"
    assert ("cp.async.bulk.tensor" in between) is settled, f"{name}: brings pages before the wait: {not settled}"
    assert "cp.async.bulk.tensor" in behind, f"{name}: nobody brings the newest pages"
    check_arrivals(name, ptx)


def check_arrivals(name: str, ptx: str) -> None:
    arrivals = list(re.finditer(r"mbarrier\.arrive\.shared", ptx))
    assert arrivals, f"{name}: nobody says that a tile is used up"
    for arrival in arrivals:
        used = max(ptx.rfind(access, 0, arrival.start()) for access in USES_SHARED)
        assert "bar.sync" in ptx[used : arrival.start()], (
            f"{name}: one warp says that all are done with what others still use"
        )


def one_by_one(made) -> bool | None:
    """Whether each instruction of the matrix unit waits for the one before, as the compiler has it where it can't tell that
    sums aren't read too early, or has no registers for them. None: there are none of Hopper's.
    """
    if "wgmma" not in made.asm.get("ptx", ""):
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.nvdisasm.path
        code = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
    products, begun = len(re.findall(r"\b[HQI]GMMA\b", code)), code.count("WARPGROUP.ARRIVE")
    assert products, "the disassembler names the matrix unit's instructions otherwise"
    return begun * 2 > products
