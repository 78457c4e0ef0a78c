"""The torch references, which define what each kernel computes, and their operators."""
