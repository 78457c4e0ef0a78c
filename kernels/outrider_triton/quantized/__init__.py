"""Products with quantised weights: formats, activations, bit planes, and the library's products."""
