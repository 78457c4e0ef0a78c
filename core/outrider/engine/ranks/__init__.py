"""Ranks of one engine: their configuration, and the decision log that the first rank publishes for the others."""
