"""Guides of requests: what a text may be, grammars that the host walks, and masks of tokens."""
