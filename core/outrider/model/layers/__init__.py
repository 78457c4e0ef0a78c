"""Decoders: layers, their weights and products, inputs, the KV cache, and the ranks that share them."""
