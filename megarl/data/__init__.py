"""Batches of handles, prepared prompts, the order of the data, and packing. Sequences are ragged, never padded."""
