"""The training side: one engine on megatron-core that serves actor, critic and reference; a role is a value, not a class."""

import warnings

# megatron-core warns nine times on import that it falls back to torch. Which back end is used is megarl's to report, once.
warnings.filterwarnings("ignore", message=r".*(Transformer Engine|Apex|transformer_engine|dynamic_context)", module=r"megatron\.")
