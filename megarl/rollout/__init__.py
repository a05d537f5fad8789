"""The generation engine: vLLM, and the receiving side of resharding."""
