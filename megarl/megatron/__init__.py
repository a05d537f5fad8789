"""The training side: one engine on megatron-core that serves actor, critic and reference; a role is a value, not a class."""
