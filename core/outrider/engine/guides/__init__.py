"""Guides of requests: the texts that they allow, grammars that the host walks, and token masks."""
