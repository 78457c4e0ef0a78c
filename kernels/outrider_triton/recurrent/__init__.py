"""Recurrent layers: the short convolution and the gated delta rule, by steps and by chunks."""
