"""Device state of an engine: static buffers, request rows, input upload, plans and results."""
