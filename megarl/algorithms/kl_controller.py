"""The controller of the KL coefficient, and the penalty that it goes with."""

from megarl.compat.functions import apply_kl_penalty
from megarl.compat.kl_controller import AdaptiveKLController

__all__ = ["AdaptiveKLController", "apply_kl_penalty"]
