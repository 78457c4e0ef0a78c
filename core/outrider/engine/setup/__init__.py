"""Start of an engine: checkpoints, chosen settings, and checks before memory is allocated."""
