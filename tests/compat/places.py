"""A small model, its data and a reward function, and the arguments of a trainer on them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from megarl.compat.pools import RayResourcePool
from megarl.compat.trainer import RayPPOTrainer

ROOT = Path(__file__).parents[2]
SMALL = ["data.max_prompt_tokens=16", "rollout.max_response_tokens=8", "rollout.kv_cache_mib=64"]


def make_place(out: Path) -> Path:
    """The demo's random model and data, and a reward that a random model gets some of."""
    spec = importlib.util.spec_from_file_location("demo_prepare", ROOT / "recipes" / "demo" / "prepare.py")
    assert spec is not None and spec.loader is not None
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    recipe.write_model(out / "model", seed=0)
    recipe.write_data(out, seed=0)
    return out


def trainer(place: Path, **changes: Any) -> RayPPOTrainer:
    """A trainer with all three roles, one process each unless ``changes`` say otherwise; it starts nothing."""
    model = {"model_name_or_path": place / "model"}
    values: dict[str, Any] = {
        "actor_rollout_config": model,
        "critic_config": model,
        "ref_policy_config": model,
        "actor_rollout_resource_pool": RayResourcePool([1]),
        "critic_resource_pool": RayResourcePool([1]),
        "ref_policy_resource_pool": RayResourcePool([1]),
        "train_dataset": place / "train.parquet",
        "reward_fn": ROOT / "tests" / "compat" / "easy_reward.py",
        "overrides": SMALL,
    }
    return RayPPOTrainer(**(values | changes))
