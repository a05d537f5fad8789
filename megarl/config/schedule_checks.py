"""What can be wrong with a learning-rate schedule."""

from __future__ import annotations

from megarl.config.schema import OptimConfig
from megarl.errors import ConfigError, explain


def check_schedule(optim: OptimConfig, where: str) -> None:
    """Raise ConfigError for a schedule that has no end, ends inside its warm-up, or doesn't fall."""
    if optim.schedule == "constant":
        unused = [name for name in ("schedule_steps", "lr_min") if getattr(optim, name)]
        if unused:
            raise ConfigError(
                explain(
                    "a constant learning rate has nowhere to fall",
                    where=f"{where}.{unused[0]}",
                    got=getattr(optim, unused[0]),
                    expected=0,
                    do=f"set {where}.schedule to linear or cosine",
                )
            )
        return
    if optim.schedule_steps <= optim.lr_warmup_steps:
        raise ConfigError(
            explain(
                f"a {optim.schedule} schedule must say at which PPO step it ends",
                where=f"{where}.schedule_steps",
                got=optim.schedule_steps,
                expected=f"more than {optim.lr_warmup_steps}, where the warm-up ends",
                do="set it to run.total_steps; it is a key of its own, so that a run that is extended later keeps its rates",
            )
        )
    if not optim.lr_min < optim.lr:
        raise ConfigError(
            explain(
                "a learning rate that falls must end below where it begins",
                where=f"{where}.lr_min",
                got=optim.lr_min,
                expected=f"less than {optim.lr}",
            )
        )
