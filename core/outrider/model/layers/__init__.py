"""Decoders: layers, their weights, inputs, the KV cache, and the ranks that share them."""
