"""Prefill/decode disaggregation: one engine prefills, another decodes, and a link transfers KV pages and recurrent
states between them.
"""
