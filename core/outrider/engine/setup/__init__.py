"""Checkpoints, settings and checks: what an engine decides before it allocates memory."""
