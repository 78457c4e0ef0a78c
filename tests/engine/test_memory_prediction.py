"""The memory that headers predict: that of the loaded engine, and errors that name the part to reduce."""

from dataclasses import replace

import pytest
import torch

from model.hybrid_checkpoints import MtpOracle, random_model, save
from outrider import Engine
from outrider.device import OutOfDeviceMemory
from outrider.engine.config import EngineConfig
from outrider.engine.setup import facts as setup_facts
from outrider.engine.setup.checks import predict_memory
from outrider.engine.setup.facts import CacheMemory, collect_facts
from outrider.model import DecoderPlan, ModelRanks, Shard, Shards, plan_decoder
from outrider.model.config.shapes import shape_config
from outrider.speculative.proposer import NonSpeculativeProposer
from outrider_proof import tiny
from outrider_proof.tiny import plain_config
from tiny_checkpoints import write_checkpoint

CONFIG = plain_config(max_requests=3, max_context=64, page_size=4, prefill_chunk=16, state_checkpoints=2)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hybrid")
    save(random_model("qwen3_5", 3, tie_word_embeddings=False), directory)
    return directory


def tensors_of(value):
    """The tensors of nested records."""
    if isinstance(value, torch.Tensor):
        return {value.data_ptr(): value}
    parts = value if isinstance(value, tuple) else [getattr(value, name) for name in getattr(value, "__slots__", ())]
    return {address: tensor for part in parts for address, tensor in tensors_of(part).items()}


def size(tensors):
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def test_the_prediction_is_what_the_engine_takes(hybrid):
    plan = plan_decoder(hybrid, backend=tiny.BACKEND, dtype=torch.float32)
    predicted = predict_memory(plan, tiny.BACKEND, CONFIG)
    model = plan.load()
    assert predicted.weights == size(tensors_of(model.weights).values())
    engine = Engine(model, tiny.BACKEND, config=CONFIG)
    cache = engine._parts.cache
    assert engine.config.num_pages == predicted.config.num_pages
    assert predicted.pages == size(each for pair in cache.layers for each in pair)
    assert predicted.states == size(each for layer in cache.states for each in layer) > 0
    assert len(predicted.lines()) == 4


def test_the_work_of_a_prompt_counts_recurrent_layers(hybrid):
    """A mixture's inner width is small, and a recurrent layer then holds more."""
    shape = shape_config("qwen3.5-35b-a3b")
    assert shape.recurrent.prompt_values > 3 * shape.inner_width
    plan = plan_decoder(hybrid, backend=tiny.BACKEND, dtype=torch.float32)
    wide = replace(plan, config=replace(plan.config, recurrent=replace(plan.config.recurrent, value_size=1024)))
    less, more = (collect_facts(tiny.BACKEND, each, NonSpeculativeProposer()) for each in (plan, wide))
    assert more.prompt_token_bytes > less.prompt_token_bytes


def test_the_work_of_a_prompt_counts_expanded_keys_and_values(tmp_path):
    """Queries and results of four heads of 64, and keys and values, thrice, of four tokens for each new one."""
    write_checkpoint(tmp_path, "deepseek_v3", qk_nope_head_dim=56, v_head_dim=32)
    plan = plan_decoder(tmp_path, backend=tiny.BACKEND, dtype=torch.float32)
    assert plan.weight_bytes == size(tensors_of(plan.load().weights).values())
    work = 4 * (2 * 64 + 4 * (4 * 64 + 56 + 32))
    facts = collect_facts(tiny.BACKEND, plan, NonSpeculativeProposer())
    assert facts.prompt_token_bytes == 4 * (6 * plan.config.hidden_size + work)


def test_the_memory_of_states_counts_the_windows_of_requests(hybrid):
    engine = Engine.from_checkpoint(hybrid, tiny.BACKEND, speculate="ngram", config=replace(CONFIG, draft_tokens=3))
    facts, cache = collect_facts(tiny.BACKEND, engine.model, engine.proposer), engine._parts.cache
    rows = cache.pending.shape[0]
    assert rows == engine.config.max_requests + 1
    assert facts.window_bytes == 4 * engine.model.config.recurrent.window_bytes(engine.model.dtype)
    assert size(each for window in cache.windows for each in window) == rows * facts.window_bytes > 0
    assert collect_facts(tiny.BACKEND, engine.model, NonSpeculativeProposer()).window_bytes == 0


@pytest.mark.parametrize("divides", [False, True], ids=["slices", "divided"])
def test_a_rank_counts_its_part_of_the_experts_of_a_head(tmp_path, divides):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    model = random_model("qwen3_5_moe", 3, **sizes)
    save(model, tmp_path, head=MtpOracle(model, 4))
    ranks = ModelRanks(Shards(mlp=Shard(1, 2), divides_experts=divides))
    plans = [plan_decoder(tmp_path, backend=tiny.BACKEND, dtype=torch.float32, ranks=each) for each in (None, ranks)]
    whole, part = (predict_memory(plan, tiny.BACKEND, CONFIG, tmp_path).weights - plan.weight_bytes for plan in plans)
    assert whole - part == 4 * 3 * 8 * model.config.hidden_size * 4 // 2


@pytest.mark.parametrize(
    ("free", "config", "message"),
    [
        (0.5, {}, "reduce the weights: the weights take"),
        (1.02, {}, "reduce the weights: the weights take"),
        (3, {"max_requests": 64, "state_checkpoints": 900}, "lower max_requests or state_checkpoints"),
        (3, {"kv_memory": 1e-6}, "raise kv_memory"),
        (3, {"page_size": 4096, "max_requests": 1}, "reduce the KV cache"),
    ],
)
def test_too_little_memory_is_an_error_before_loading(hybrid, free, config, message, monkeypatch):
    """``free``: as a multiple of the weights."""
    weights = plan_decoder(hybrid, backend=tiny.BACKEND, dtype=torch.float32).weight_bytes
    memory = CacheMemory(1 << 40, int(free * weights))
    monkeypatch.setattr(setup_facts, "find_cache_memory", lambda backend: memory)
    monkeypatch.setattr(DecoderPlan, "load", lambda plan, progress: pytest.fail("it was loaded"))
    sizes = {"dtype": "float32", "prefill_chunk": 1, "max_requests": 1, "state_checkpoints": 0}
    with pytest.raises(OutOfDeviceMemory, match=message):
        Engine.from_checkpoint(hybrid, tiny.BACKEND, config=EngineConfig(**sizes | config))
