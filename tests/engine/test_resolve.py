"""What an engine decides for its user, from records alone; and that commands and engines say it."""

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider import EngineConfig
from outrider.device import Capabilities, ConfigError, OutOfDeviceMemory, StepMode
from outrider.engine.config import DecidedConfig
from outrider.engine.ranks.ranks import common_config
from outrider.engine.setup.facts import CacheMemory, DeviceModelFacts, collect_facts
from outrider.engine.setup.resolve import GIB, choose_dtype, resolve
from outrider.speculative.proposer import NonSpeculativeProposer
from outrider_sim.plugin import create_backend

GPU = Capabilities(
    asynchronous=True,
    captures_graphs=True,
    memory_limit=True,
    dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
)
NPU = replace(
    GPU,
    updates_graph_params=True,
    dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    preferred_dtypes=(torch.bfloat16, torch.float16),
    page_size=128,
)
LLAMA_8B = DeviceModelFacts(
    capabilities=GPU,
    step_modes=frozenset(StepMode),
    dtype=torch.bfloat16,
    context=131072,
    slots=5,
    token_bytes=33 * 4096,
    prompt_token_bytes=135168,
    drafted_token_bytes=24 * 128256,
    request_bytes=4 * 128256,
    memory=CacheMemory(140 * GIB, 123 * GIB),
)
HOST = replace(
    LLAMA_8B, capabilities=Capabilities(), memory=CacheMemory(24 * GIB, 20 * GIB, shared=True), context=2048, token_bytes=4096
)


def decided(known=LLAMA_8B, **config):
    return resolve(EngineConfig(**config), known)


def why(made, name):
    return next(choice.why for choice in made.chosen if choice.name == name)


def test_a_large_gpu_runs_fused_overlapped_with_the_models_context():
    made = decided()
    assert (made.mode, made.graphs, made.overlap, made.dtype) == ("fused", False, True, "bfloat16")
    assert (made.prefill_chunk, made.max_requests, made.page_size, made.max_context) == (8192, 256, 16, 131072)
    tokens = made.num_pages * made.page_size
    assert 0.85 * 123 * GIB < tokens * LLAMA_8B.token_bytes <= 0.9 * 123 * GIB
    assert "0.9 of the 123.0 GiB" in why(made, "num_pages")


@pytest.mark.parametrize(
    ("gib", "chunk", "requests"), [(141, 8192, 256), (80, 8192, 256), (48, 2048, 64), (24, 2048, 64), (8, 512, 16)]
)
def test_sizes_follow_the_memory(gib, chunk, requests):
    made = decided(replace(LLAMA_8B, memory=CacheMemory(gib * GIB, gib * GIB)))
    assert (made.prefill_chunk, made.max_requests) == (chunk, requests)
    assert f"{gib} GiB" in why(made, "prefill_chunk")


def test_the_context_is_what_the_memory_holds():
    """8 GiB beside the weights: less than one request of 131,072 tokens. The work of a prompt is left room, twice: for calls
    and for graphs.
    """
    made = decided(replace(LLAMA_8B, memory=CacheMemory(24 * GIB, 8 * GIB)))
    assert made.max_context < 131072
    assert (made.num_pages - 1) * made.page_size >= made.max_context + LLAMA_8B.slots
    assert "holds no more" in why(made, "max_context")
    work = 2 * 2048 * LLAMA_8B.prompt_token_bytes + 64 * (5 * LLAMA_8B.drafted_token_bytes + LLAMA_8B.request_bytes)
    assert made.num_pages * made.page_size * LLAMA_8B.token_bytes <= 8 * GIB - work


def test_a_memory_that_holds_no_request_is_an_error():
    with pytest.raises(OutOfDeviceMemory, match="room for no request"):
        decided(replace(LLAMA_8B, memory=CacheMemory(24 * GIB, GIB)))
    with pytest.raises(OutOfDeviceMemory, match=r"max_context is 131072: 16\.5 GiB"):
        decided(replace(LLAMA_8B, memory=CacheMemory(24 * GIB, 8 * GIB)), max_context=131072)


def test_a_share_of_the_memory_is_that_share():
    made = decided(kv_memory=0.5)
    assert made.num_pages == int(0.5 * 123 * GIB) // (16 * LLAMA_8B.token_bytes)
    assert made.kv_memory is None  # it's decided: another engine takes the config as it is
    few = decided(max_requests=1, max_context=100)
    assert few.num_pages == -(-(100 + 5) // 16) + 1  # chosen: no more than all requests need
    assert decided(max_requests=1, max_context=100, kv_memory=0.5).num_pages == made.num_pages


def test_a_share_of_the_hosts_memory_leaves_some_for_others():
    """Nothing refuses an allocation there: the system ends a process instead."""
    work = 512 * HOST.prompt_token_bytes + 8 * (5 * HOST.drafted_token_bytes + HOST.request_bytes)
    most = 0.9 - work / (20 * GIB)
    made = decided(HOST, kv_memory=most)
    assert made.num_pages == int(20 * GIB * most) // (16 * HOST.token_bytes)
    for share in (1, 0.9, most + 0.001):
        with pytest.raises(OutOfDeviceMemory, match=r"kv_memory is .* host has free.* lower it to 0\.89"):
            decided(HOST, kv_memory=share)
    with pytest.raises(OutOfDeviceMemory, match="leave it out, or free memory"):
        decided(replace(HOST, memory=CacheMemory(24 * GIB, work, shared=True)), kv_memory=0.5)
    assert decided(kv_memory=1).num_pages == 123 * GIB // (16 * LLAMA_8B.token_bytes)  # a device says itself what doesn't fit


def test_a_share_that_holds_no_request_is_to_be_raised():
    with pytest.raises(OutOfDeviceMemory, match=r"room for no request; free memory, or raise kv_memory"):
        decided(kv_memory=1e-9)


@pytest.mark.parametrize("wrong", [0, -0.1, 1.01, True, "0.5", float("nan")])
def test_a_share_is_above_0_and_at_most_1(wrong):
    with pytest.raises(ConfigError, match="kv_memory"):
        EngineConfig(kv_memory=wrong)


def test_a_share_and_a_number_of_pages_exclude_each_other():
    with pytest.raises(ConfigError, match="give one"):
        EngineConfig(kv_memory=0.5, num_pages=9)


def test_pages_that_are_given_decide_nothing_else():
    made = decided(num_pages=9)
    assert (made.num_pages, made.max_context) == (9, 131072)
    assert "num_pages" not in [choice.name for choice in made.chosen]


def test_a_context_beyond_the_models_is_an_error():
    with pytest.raises(ConfigError, match="max_context is 131073, the model was made for 131072 at most"):
        decided(max_context=131073)


@pytest.mark.parametrize(
    ("changes", "mode", "graphs", "reason"),
    [
        ({"step_modes": frozenset({StepMode.STAGED})}, "staged", True, "declares no other"),
        ({"capabilities": replace(GPU, captures_graphs=False)}, "staged", False, "captures no graphs"),
        ({"no_fused": "the kernels plan"}, "staged", True, "the kernels plan"),
        ({"no_fused": "foreign", "no_graphs": "foreign"}, "staged", False, "foreign"),
        ({"step_modes": frozenset({StepMode.FUSED}), "no_fused": "x"}, "fused", False, "declares it"),
    ],
)
def test_the_best_mode_that_is_declared(changes, mode, graphs, reason):
    made = decided(replace(LLAMA_8B, **changes))
    assert (made.mode, made.graphs) == (mode, graphs)
    assert reason in why(made, "mode")


def test_modes_that_are_given_stay():
    assert decided(graphs=False).mode == "staged"
    assert decided(mode="staged").graphs
    assert not decided(mode="staged", graphs=False, overlap=False).overlap
    assert decided(replace(LLAMA_8B, no_overlap_fused=True)).overlap is False
    assert decided(replace(LLAMA_8B, no_overlap_fused=True), mode="staged").overlap is True


def test_the_reason_for_graphs_is_what_the_device_declares():
    assert why(decided(mode="staged"), "graphs") == "the device captures them"
    assert why(decided(HOST), "graphs") == "the device captures none"


def test_the_host_keeps_small_sizes_and_a_quarter_of_its_memory():
    made = decided(HOST)
    assert (made.mode, made.graphs, made.overlap) == ("staged", False, False)
    assert (made.max_requests, made.prefill_chunk, made.max_context) == (8, 512, 2048)
    assert made.num_pages == 8 * -(-(2048 + 5) // 16) + 1  # every request at full context, as such a model is small
    long = decided(replace(HOST, context=1 << 17))
    assert long.max_context == 1 << 17
    assert long.num_pages == -(-((1 << 17) + 5) // 16) + 7 * -(-(4096 + 5) // 16) + 1  # one of them at full context
    assert decided(replace(HOST, context=1 << 22)).max_context < 5 * GIB // 4096  # and never more than the quarter


def test_nothing_known_of_the_memory_keeps_the_context_small():
    made = decided(replace(LLAMA_8B, memory=None), max_requests=2)
    assert made.max_context == 4096
    assert made.num_pages == 2 * 257 + 1


def test_buckets_say_how_many_requests():
    assert decided(buckets=(1, 6)).max_requests == 6


@pytest.mark.parametrize(
    ("capabilities", "checkpoint", "dtype", "reason"),
    [
        (GPU, torch.bfloat16, "bfloat16", "the checkpoint's"),
        (GPU, torch.float32, "float32", "the checkpoint's"),
        (GPU, None, "float32", "names no dtype"),
        (GPU, torch.float8_e4m3fn, "float32", "the checkpoint is in float8_e4m3fn, in which nothing is computed"),
        (NPU, torch.float16, "float16", "the checkpoint's"),
        (
            NPU,
            torch.float32,
            "bfloat16",
            "the checkpoint is in float32, and the device's own kernels run in bfloat16, float16",
        ),
        (
            replace(GPU, preferred_dtypes=(torch.bfloat16, torch.float32)),
            torch.float16,
            "float32",
            "run in bfloat16, float32",
        ),
        (NPU, torch.float64, "bfloat16", "run in bfloat16, float16"),
        (Capabilities(), torch.float64, "float32", "in which the device doesn't compute"),
        (Capabilities(), torch.bfloat16, "float32", "in which the device doesn't compute"),
    ],
)
def test_the_checkpoints_dtype_where_the_kernels_have_it(capabilities, checkpoint, dtype, reason):
    choice = choose_dtype(capabilities, checkpoint)
    assert (choice.name, choice.value) == ("dtype", dtype)
    assert reason in choice.why


def test_no_dtype_that_is_known_is_an_error():
    with pytest.raises(ConfigError, match="name one of these"):
        choose_dtype(Capabilities(dtypes=frozenset({torch.float8_e5m2})), torch.bfloat16)


def test_a_page_size_is_that_of_the_kernels():
    assert decided(replace(LLAMA_8B, capabilities=NPU)).page_size == 128
    assert decided(replace(LLAMA_8B, capabilities=NPU), page_size=16).page_size == 16


OPEN = {
    "mode": st.sampled_from(["staged", "fused"]),
    "graphs": st.booleans(),
    "overlap": st.booleans(),
    "dtype": st.sampled_from(["float32", "bfloat16"]),
    "prefill_chunk": st.integers(1, 8192),
    "max_requests": st.integers(1, 256),
    "page_size": st.sampled_from([1, 16, 128]),
    "max_context": st.integers(2, 8192),
    "num_pages": st.integers(2, 4096),
}
SITUATIONS = [LLAMA_8B, HOST, replace(LLAMA_8B, capabilities=NPU), replace(LLAMA_8B, memory=None)]


@given(st.fixed_dictionaries({}, optional=OPEN), st.sampled_from(SITUATIONS))
def test_what_is_given_stays_and_the_rest_is_decided(config, known):
    """And each open end has one choice with a reason, whatever else is given; a decided config is decided for good."""
    config = config if config.get("max_context", 0) <= known.context else config | {"max_context": known.context}
    made = decided(known, **config)
    assert {name: getattr(made, name) for name in config} == config
    names = [choice.name for choice in made.chosen]
    assert len(set(names)) == len(names)
    silent = {"graphs"} if made.mode == "fused" else set()  # the whole iteration is one
    assert set(OPEN) - set(config) - silent <= set(names) <= set(OPEN) - set(config)
    assert all(choice.why for choice in made.chosen)
    assert all(getattr(made, field.name) is not None for field in fields(DecidedConfig) if field.name in OPEN)
    assert resolve(made, known) is made


STATE = 154 << 20
HYBRID_27B = replace(LLAMA_8B, token_bytes=65536, state_bytes=STATE, context=262144, memory=CacheMemory(140 * GIB, 86 * GIB))


def test_recurrent_states_share_the_memory_with_the_cache():
    """States of requests and of the prefix cache, and pages: together what pages alone take of other models."""
    made = decided(HYBRID_27B)
    assert (made.max_requests, made.state_checkpoints) == (int(86 * GIB * 0.25) // STATE - 1, int(8.6 * GIB) // STATE)
    rows = made.max_requests + made.state_checkpoints + 1
    used = rows * STATE + made.num_pages * made.page_size * HYBRID_27B.token_bytes
    assert 0.85 * 86 * GIB < used <= 0.9 * 86 * GIB
    assert "recurrent states of 154 MiB each" in why(made, "max_requests")
    assert "GiB of recurrent states" in why(made, "num_pages")
    assert decided(HYBRID_27B, prefix_cache=False).state_checkpoints == 0
    asked = decided(HYBRID_27B, max_requests=16, state_checkpoints=4, kv_memory=0.5)
    used = 21 * STATE + asked.num_pages * asked.page_size * HYBRID_27B.token_bytes
    assert (asked.max_requests, asked.state_checkpoints) == (16, 4)
    assert 0.49 * 86 * GIB < used <= 0.5 * 86 * GIB


def test_ranks_report_the_checkpoints_that_all_of_them_hold():
    first = decided(HYBRID_27B)
    least = replace(first, state_checkpoints=first.state_checkpoints - 3)
    common = common_config(SimpleNamespace(exchange=lambda subject, config, kind: [first, least]), first)
    assert common.state_checkpoints == least.state_checkpoints
    assert [each.value for each in common.chosen if each.name == "state_checkpoints"] == [least.state_checkpoints]
    assert "least memory" in why(common, "state_checkpoints")
    assert why(common, "num_pages") == why(first, "num_pages")


def test_too_little_memory_for_states_says_what_to_lower():
    with pytest.raises(OutOfDeviceMemory, match=r"recurrent states take .* GiB: lower max_requests or state_checkpoints"):
        decided(replace(HYBRID_27B, memory=CacheMemory(24 * GIB, 4 * GIB)), max_requests=64)
    both = (
        r"2\.0 GiB of KV cache for one request and 8\.6 GiB of recurrent states.* lower max_context, max_requests or state_ch"
    )
    with pytest.raises(OutOfDeviceMemory, match=both):
        decided(
            replace(HYBRID_27B, memory=CacheMemory(24 * GIB, 10 * GIB)),
            max_requests=50,
            state_checkpoints=6,
            max_context=32768,
        )
    with pytest.raises(ConfigError, match="the model has no recurrent layers"):
        decided(state_checkpoints=3)


def test_an_engine_uses_no_graphs_where_they_hold_only_a_part_of_a_model(tiny64):
    backend = create_backend(0, {"native": "mm"})
    made = resolve(EngineConfig(), collect_facts(backend, tiny64.target, NonSpeculativeProposer()))
    assert (made.mode, made.graphs) == ("staged", False)
    assert why(made, "graphs") == "the device's graphs can't hold every operator of a model"
