"""Device state of an engine: buffers, rows, staging, plans and results."""
