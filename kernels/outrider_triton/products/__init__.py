"""Products with unquantized weights for few tokens, and their fusions."""
