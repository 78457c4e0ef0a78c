"""Proposers: who drafts the tokens that the target verifies."""
