"""Products with quantised weights: storage formats, quantised activations, nibble planes, and the products of torch's
library.
"""
