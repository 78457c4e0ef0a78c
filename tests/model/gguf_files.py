"""Writes GGUF files of transformers' models, as llama.cpp's script does, and puts the stored values into the model."""

import json

import gguf
import numpy as np
import torch

PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
BLOCK_BYTES = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
SCALES_AT = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where a block of 256 values has its scales in float16; the rest is random."""


def interleaved(values, heads):
    """The rows of a head, the two of a rotated pair next to each other."""
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def in_halves(values, heads):
    """The rows of a head as transformers has them: undoes ``interleaved``."""
    return values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def quantized(values, kind):
    """Blocks of ``kind`` for ``values``; random ones where the library can't quantise."""
    if kind not in BLOCK_BYTES:
        return gguf.quantize(np.ascontiguousarray(values), gguf.GGMLQuantizationType[kind])
    shape = (*values.shape[:-1], values.shape[-1] // 256, BLOCK_BYTES[kind])
    blocks = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    for place in SCALES_AT[kind]:
        blocks[..., place : place + 2] = np.full(1, 2e-4 if kind == "Q6_K" else 1e-3, np.float16).view(np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


ROUNDED = ("Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


def stored(writer, name, values, kind):
    """Add a tensor and return the values that a reader has: of some types rounded to float16."""
    if values.ndim == 1 or kind == "F32":
        writer.add_tensor(name, np.ascontiguousarray(values))
        return values
    raw_kind = gguf.GGMLQuantizationType[kind]
    data = quantized(values, kind)
    writer.add_tensor(name, data, raw_dtype=raw_kind)
    values = gguf.dequantize(data, raw_kind)
    return values.astype(np.float16).astype(np.float32) if kind in ROUNDED else values


def gguf_name(name):
    stem, _, what = name.rpartition(".")
    if stem in WHOLE:
        return f"{WHOLE[stem]}.{what}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{PARTS[part]}.{what}"


def write_gguf(path, model, *, kind="F32", without=None, metadata=(), rope_freqs=None):
    """Write ``model`` to ``path`` with matrices of ``kind``; afterwards the model has the values of the file.

    ``metadata`` are functions that add to the writer, after the key ``without`` was dropped.
    """
    config = model.config
    arch = {"qwen3_moe": "qwen3moe", "mistral": "llama"}.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    if config.model_type == "qwen3_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if without is not None:
        del writer.kv_data[0][without]
    for add in metadata:
        add(writer)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs)
    state = model.state_dict()
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if ".mlp.experts." in name:
            layer = name.split(".")[2]
            halves = {"ffn_gate_exps": np.split(values, 2, 1)[0], "ffn_up_exps": np.split(values, 2, 1)[1]}
            stacks = halves if name.endswith("gate_up_proj") else {"ffn_down_exps": values}
            found = [stored(writer, f"blk.{layer}.{part}.weight", each, kind) for part, each in stacks.items()]
            tensor.copy_(torch.from_numpy(np.concatenate(found, 1)))
            continue
        heads = 0
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        found = stored(writer, gguf_name(name), interleaved(values, heads) if heads else values, kind)
        if heads:
            found = in_halves(found, heads)
        tensor.copy_(torch.from_numpy(np.array(found)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer, tokenizer, pre):
    """Add a byte-level tokenizer of ``tokenizers`` under the name ``pre`` of its way to split a text."""
    parts = json.loads(tokenizer.to_str())
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    special = {each["id"]: 3 if each["special"] else 4 for each in parts["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary)
    writer.add_token_types([special.get(number, 1) for number in range(len(vocabulary))])
    writer.add_token_merges([" ".join(merge) for merge in parts["model"]["merges"]])
    writer.add_eos_token_id(0)
