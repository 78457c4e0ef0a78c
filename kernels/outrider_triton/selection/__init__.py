"""Selection of tokens: sampling, verification of drafts, and grammar masks."""
