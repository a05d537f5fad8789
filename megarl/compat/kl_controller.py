"""The KL controller with the defaults of the quickstart, and the names of KL penalties."""

from __future__ import annotations

from megarl.algo import kl
from megarl.errors import ConfigError, explain

# Penalty name -> megarl's estimator of the KL of one token.
KL_PENALTIES = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


class AdaptiveKLController(kl.AdaptiveKLController):
    """A coefficient (``value``) that steers the KL, in nats per token, to ``target`` over ``horizon`` samples (arXiv:1909.08593)."""

    def __init__(self, init_kl: float = 0.01, target: float = 0.1, horizon: int = 10000):
        super().__init__(init_kl, target, horizon)


def estimator_of(kl_penalty: str) -> str:
    """megarl's name of a KL penalty. Raises ConfigError for one that it hasn't; ``full`` would need every token's whole distribution."""
    if kl_penalty in KL_PENALTIES:
        return KL_PENALTIES[kl_penalty]
    why = "the whole distributions of policy and reference are kept nowhere" if kl_penalty == "full" else "no such KL penalty"
    raise ConfigError(explain(why, where="kl_penalty", got=repr(kl_penalty), expected=" | ".join(KL_PENALTIES)))
