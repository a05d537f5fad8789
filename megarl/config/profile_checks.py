"""What can be wrong with the windows that a recipe wants profiled."""

from __future__ import annotations

from megarl.config.load import nearest
from megarl.config.schema import Config, LayoutConfig
from megarl.errors import ConfigError, explain

PROFILED_GROUPS = ("actor", "critic", "rollout")


def check_profile(config: Config) -> None:
    """Raise ConfigError for steps that never come, and for groups and ranks that nobody has. Without steps nothing is profiled."""
    profile = config.profile
    for group in profile.groups:
        if group not in PROFILED_GROUPS:
            near = nearest(group, PROFILED_GROUPS)
            do = f"did you mean {near}?" if near else "choose some of them"
            raise ConfigError(
                explain("no such worker group", where="profile.groups", got=group, expected=" | ".join(PROFILED_GROUPS), do=do)
            )
    if profile.steps and not profile.groups:
        raise ConfigError(explain("steps to profile, and no worker group", where="profile.groups", expected=" | ".join(PROFILED_GROUPS)))
    never = [step for step in profile.steps if not 1 <= step <= config.run.total_steps]
    if never:
        expected = f"from 1 to {config.run.total_steps} = run.total_steps"
        raise ConfigError(explain("steps that never come can't be profiled", where="profile.steps", got=never, expected=expected))
    counts = {
        "actor": _ranks(config.actor.layout),
        "critic": _ranks(config.critic.layout),
        "rollout": config.rollout.engines,
    }
    most = max((counts[group] for group in profile.groups), default=0)
    missing = [rank for rank in profile.ranks if not 0 <= rank < most]
    if missing:
        named = ", ".join(f"{group}: {counts[group]}" for group in profile.groups)
        expected = f"from 0 to {most - 1} ({named or 'profile.groups is empty'})"
        raise ConfigError(explain("ranks that no worker group has", where="profile.ranks", got=missing, expected=expected))


def _ranks(layout: LayoutConfig) -> int:
    return layout.tensor * layout.pipeline * layout.context * layout.data
