"""Draft heads and tokenizers that tests alone need, in addition to those of ``outrider_proof.checkpoints``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from outrider_proof.checkpoints import layer_products, save_head, tiny_config


def write_eagle3(
    directory: str | Path,
    *,
    draft_vocab: int = 40,
    seed: int = 2,
    layers: tuple[int, ...] | None = (0, 1, 2),
    depth: int = 1,
    fmt: str = "safetensors",
    vocab: int = 96,
    mask: int | None = None,
) -> dict[str, torch.Tensor]:
    """Write a random EAGLE-3 head in its published format; returns its tensors. ``layers``: whose inputs it reads; ``depth``:
    its own; ``mask``: the mask token of a parallel one (P-EAGLE).
    """
    torch.manual_seed(seed)
    config = tiny_config("llama", num_hidden_layers=depth)
    hidden, inner, kv = config.hidden_size, config.intermediate_size, config.num_key_value_heads * config.head_dim
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft_vocab, hidden),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        **layer_products("midlayer", hidden, inner, kv, reads=2 * hidden),
    }
    for index in range(1, depth):
        for key in [key for key in shapes if key.startswith("midlayer.") and "hidden_norm" not in key]:
            narrow = tuple(min(size, hidden) if "_proj" in key and "self_attn" in key else size for size in shapes[key])
            shapes[key.replace("midlayer", f"layers.{index}")] = narrow
    if mask is not None:
        config.mask_token_id = mask
        shapes["mask_hidden"] = (1, 1, 3 * hidden)
        shapes["embed_tokens.weight"] = (vocab, hidden)
    state = {key: torch.randn(shape) * 0.3 for key, shape in shapes.items()}
    kept = torch.randperm(vocab)[:draft_vocab].sort().values
    state["d2t"] = kept - torch.arange(draft_vocab)
    state["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, kept, True)
    config.architectures = ["LlamaForCausalLMEagle3"]
    config.draft_vocab_size = draft_vocab
    if layers is not None:
        config.eagle_config = {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers]}
    save_head(Path(directory), config, state, fmt)
    return state


def write_peagle(
    directory: str | Path, *, mask: int = 95, depth: int = 2, layers: tuple[int, ...] = (0, 1, 2), fmt: str = "safetensors"
) -> dict[str, torch.Tensor]:
    """Write a random P-EAGLE head in its published format; returns its tensors. As :func:`write_eagle3`."""
    return write_eagle3(directory, seed=9, layers=layers, depth=depth, fmt=fmt, mask=mask)


def write_mtp(directory: str | Path, *, heads: int = 2, seed: int = 5) -> dict[str, torch.Tensor]:
    """Write random heads of multi-token prediction in the format that MiMo publishes; returns their tensors."""
    torch.manual_seed(seed)
    config = tiny_config("llama")
    hidden, inner, kv = config.hidden_size, config.intermediate_size, config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    for index in range(heads):
        layer = f"model.mtp_layers.{index}"
        shapes |= {
            f"{layer}.token_layernorm.weight": (hidden,),
            f"{layer}.hidden_layernorm.weight": (hidden,),
            f"{layer}.input_proj.weight": (hidden, 2 * hidden),
            f"{layer}.final_layernorm.weight": (hidden,),
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            **layer_products(layer, hidden, inner, kv),
        }
    state = {key: torch.randn(shape) * 0.3 for key, shape in shapes.items()}
    config.num_nextn_predict_layers = heads
    save_head(Path(directory), config, state, "safetensors")
    return state


def write_dflash(
    directory: str | Path,
    *,
    block_size: int = 4,
    mask: int = 95,
    reads: tuple[int, ...] = (0, 1),
    layers: int = 2,
    seed: int = 5,
    fmt: str = "safetensors",
) -> dict[str, torch.Tensor]:
    """Write a random DFlash head in its published format; returns its tensors. ``reads``: layers whose output it reads."""
    torch.manual_seed(seed)
    config = tiny_config("qwen3", num_hidden_layers=layers)
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv = config.num_attention_heads * size, config.num_key_value_heads * size
    shapes = {"fc.weight": (hidden, len(reads) * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for index in range(layers):
        own = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (heads, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, heads),
            "self_attn.q_norm.weight": (size,),
            "self_attn.k_norm.weight": (size,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        shapes |= {f"layers.{index}.{key}": shape for key, shape in own.items()}
    state = {key: torch.randn(shape) * 0.3 for key, shape in shapes.items()}
    config.architectures = ["DFlashDraftModel"]
    config.block_size = block_size
    config.dflash_config = {"mask_token_id": mask, "target_layer_ids": list(reads)}
    save_head(Path(directory), config, state, fmt)
    return state


TEXT = ["the cat sat on the mat", "naïve café, déjà vu", "日本語のテキスト", "smile 🙂 and 👩‍👩‍👧", "a  b   c\n\td"]


def byte_level_tokenizer(size: int = 300) -> Tokenizer:
    """Return a byte-level BPE tokenizer with a start token, like those of Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    return tokenizer


def word_tokenizer(words: Sequence[str]) -> Tokenizer:
    """Return a tokenizer with one token per word, in the order of ``words``; the first is the unknown token."""
    tokenizer = Tokenizer(models.WordLevel({word: token for token, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def sentencepiece_tokenizer() -> Tokenizer:
    """Return a BPE tokenizer with byte fallback and sentencepiece spaces, like those of Llama 2 and Mistral."""
    words = ["▁", "▁the", "▁cat", "a", "b", "c", "t", "h", "e", "▁▁", "\n", "é", ".", "▁a", "日"]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocabulary |= {word: 259 + index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer
