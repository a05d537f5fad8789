"""Run-level checkpoints: which directory is whole, which is newest, and what the controller wrote into it."""
