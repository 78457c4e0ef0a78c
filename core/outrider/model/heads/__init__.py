"""Draft heads: their weights, their published formats, and the output head that drafts are sampled with."""
