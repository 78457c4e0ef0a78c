"""Prefill/decode disaggregation: one engine prefills, another decodes, and a link transfers KV pages between them."""
