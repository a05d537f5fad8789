"""The trainer by hand: worker groups, batches and functions for a loop that the user writes. It has no algorithm of its own."""
