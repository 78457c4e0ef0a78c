"""Writes hybrid models as GGUF files by the rules of llama.cpp's ``conversion/qwen.py``."""

import gguf
import numpy as np

PARTS = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_qkvz.weight": "ssm_in.weight",
    "linear_attn.in_proj_ba.weight": "ssm_ba.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
    "mlp.experts.gate_proj": "ffn_gate_exps.weight",
    "mlp.experts.up_proj": "ffn_up_exps.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
}
WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
HEAD = {
    "fc.weight": "nextn.eh_proj.weight",
    "pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    "norm.weight": "nextn.shared_head_norm.weight",
}
ARCHITECTURES = {"qwen3_next": "qwen3next", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe"}


def tiled(values, dim, config, size):
    """Value heads of ``size`` in the order of ggml's broadcasts, along ``dim``."""
    keys = config.linear_num_key_heads
    shape = values.shape
    split = (*shape[:dim], keys, config.linear_num_value_heads // keys, size, *shape[dim + 1 :])
    return values.reshape(split).swapaxes(dim, dim + 1).reshape(shape)


def tail_tiled(values, config, size):
    start = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return np.concatenate([values[:start], tiled(values[start:], 0, config, size)])


REORDERED = {
    "in_proj_qkv": tail_tiled,
    "in_proj_z": lambda values, config, size: tiled(values, 0, config, size),
    "in_proj_a": lambda values, config, size: tiled(values, 0, config, 1),
    "in_proj_b": lambda values, config, size: tiled(values, 0, config, 1),
    "A_log": lambda values, config, size: tiled(values, 0, config, 1),
    "dt_bias": lambda values, config, size: tiled(values, 0, config, 1),
    "conv1d": tail_tiled,
    "out_proj": lambda values, config, size: tiled(values, 1, config, size),
}


def changed(name, values, config):
    """The values that the script stores for a tensor, apart from splits."""
    if name.endswith("conv1d.weight"):
        values = values.squeeze(1)
    part = name.rpartition("linear_attn.")[2].removesuffix(".weight")
    if config.model_type != "qwen3_next" and part in REORDERED:
        values = REORDERED[part](values, config, config.linear_value_head_dim)
    if name.endswith("A_log"):
        values = -np.exp(values)
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        values = values + 1
    return values


def split(name, values, config, *, fused):
    """Tensors that the script makes of one, by name."""
    if name.endswith("experts.gate_up_proj"):
        gate, up = np.split(values, 2, 1)
        return {name.replace("gate_up_proj", "gate_proj"): gate, name.replace("gate_up_proj", "up_proj"): up}
    if name.endswith("in_proj_qkvz.weight") and not fused:
        keys, group = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
        size, inner = config.linear_key_head_dim, group * config.linear_value_head_dim
        grouped = values.reshape(keys, -1, values.shape[-1])
        parts = np.split(grouped, np.cumsum([size, size, inner]), axis=1)
        q, k, v, z = (part.reshape(-1, values.shape[-1]) for part in parts)
        return {name.replace("qkvz", "qkv"): np.concatenate([q, k, v]), name.replace("qkvz", "z"): z}
    return {name: values}


def write_hybrid_gguf(path, model, *, head=None, fused=False, kv_heads=None, metadata=()):
    """Write ``model``, with the head of multi-token prediction if given.

    ``fused`` is for Qwen3-Next's projection in one tensor, as early files have it. ``kv_heads`` replaces the number of KV
    heads, for example by a list. ``metadata``: functions that add fields to the writer.
    """
    config = model.config
    arch = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, arch)
    layers = config.num_hidden_layers
    writer.add_block_count(layers + (head is not None))
    if head is not None:
        writer.add_nextn_predict_layers(1)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    if hasattr(config, "intermediate_size"):
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads if kv_heads is None else kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    if arch != "qwen3next":
        writer.add_rope_dimension_sections([*config.rope_parameters["mrope_section"], 0][:4])
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(4)
    for add in metadata:
        add(writer)
    if arch != "qwen35":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    tensors = dict(model.state_dict())
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    for name, tensor in (head.state_dict() if head is not None else {}).items():
        tensors[f"model.layers.{layers}.{HEAD.get(name) or name.removeprefix('layers.0.')}"] = tensor
    for name, tensor in tensors.items():
        values = changed(name, tensor.numpy(), config)
        for each, part in split(name, values, config, fused=fused).items():
            if each in WHOLE:
                stored = WHOLE[each]
            else:
                _, _, layer, rest = each.split(".", 3)
                stored = f"blk.{layer}.{PARTS.get(rest, rest)}"
            writer.add_tensor(stored, np.ascontiguousarray(part))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
