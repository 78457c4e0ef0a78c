"""Attention over the cache: kernels for few queries and for prefill, and the choice among them."""
