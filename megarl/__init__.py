"""megarl: RLHF of large language models on Ray, Megatron and vLLM."""

__version__ = "0.1.0"
