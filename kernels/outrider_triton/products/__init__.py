"""Products of few tokens with unquantized weights, alone and fused with the kernels around them."""
