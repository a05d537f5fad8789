"""Pure functions on ragged tensors: advantages, policy and value losses, KL, and the weights that make a loss a mean.

Legend of shapes: B samples, N response tokens of all samples end to end, ``offsets`` [B + 1] int64.
"""
