"""Hugging Face directories to Megatron distributed checkpoints and back: streaming, on one CPU, without building a model."""
