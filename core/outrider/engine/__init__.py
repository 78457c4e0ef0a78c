"""The engine: scheduler, step, caches and the fences between them."""
