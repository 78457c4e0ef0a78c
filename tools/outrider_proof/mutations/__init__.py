"""What the engine's proof is worth: the engine is changed in one place at a time, and host programs must tell."""
