"""What the trainer checks before a process starts, besides what every start checks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.cluster.placement import cluster_has_gpus
from megarl.compat.pools import RayResourcePool
from megarl.compat.settings import Roles
from megarl.config.schema import Config
from megarl.controller.prepare import load_tokenizer
from megarl.controller.roles import needs_critic
from megarl.data.vocabularies import compare_vocabularies
from megarl.errors import ConfigError, DataError, ModelError, PlacementError, explain


def check_roles(config: Config, roles: Roles) -> None:
    """The roles given are those that the algorithm has. Raises ConfigError."""
    estimator, where = config.algorithm.advantage_estimator, config.algorithm.kl.where
    for name, given, wanted, why in (
        ("critic", roles.critic is not None, needs_critic(config), f"algorithm.advantage_estimator is {estimator}"),
        ("ref_policy", roles.reference is not None, where != "none", f"algorithm.kl.where is {where}"),
    ):
        if given != wanted:
            what = f"{name} is needed, and there is none" if wanted else f"{name} would do nothing"
            verb = "pass" if wanted else "leave out"
            raise ConfigError(explain(what, got=why, do=f"{verb} {name}_config and {name}_resource_pool, or change that key by overrides"))


def check_reference_vocabulary(config: Config) -> None:
    """The reference reads the actor's token ids; first differing tokens are named. (The critic is checked with all models.)

    Raises ModelError. A directory without ``tokenizer.json`` can't be compared; its size is, with those of all models.
    """
    actor, reference = Path(config.model), Path(config.reference or config.model)
    if not all((directory / "tokenizer.json").is_file() for directory in (actor, reference)):
        return
    difference = compare_vocabularies(actor, reference)
    if difference is not None:
        raise ModelError(
            explain(
                "the actor's token ids mean other tokens to the reference",
                where=f"ref_policy_config['model_name_or_path'] = {reference}",
                got=f"vocabularies of {actor} and {reference}: {difference}",
                expected="one vocabulary",
                do="use a reference with the actor's tokenizer",
            )
        )


def check_tokenizer(dataset: Any, model: str, where: str) -> None:
    """The dataset's tokenizer, where it has one, is the actor's: its token ids go to the actor as they are. Raises DataError."""
    tokenizer = getattr(dataset, "tokenizer", None)
    if tokenizer is None:
        return
    actors = load_tokenizer(model)
    for what, ours, theirs in (
        ("vocabulary", actors.get_vocab(), tokenizer.get_vocab()),
        ("chat template", actors.chat_template, tokenizer.chat_template),
    ):
        if ours != theirs:
            do = f"make the dataset with AutoTokenizer.from_pretrained({model!r})"
            raise DataError(explain(f"the dataset's tokenizer has another {what} than the actor's", where=where, do=do))


def check_devices(pools: Sequence[RayResourcePool]) -> None:
    """What the pools say of GPUs is what the cluster has. Raises PlacementError."""
    has = cluster_has_gpus()
    for pool in pools:
        if pool.use_gpu is not None and pool.use_gpu != has:
            what = (
                "a pool asks for GPUs, and the cluster has none" if pool.use_gpu else "a pool asks for no GPU, and models go to GPUs here"
            )
            do = "use_gpu=False computes on the CPU" if pool.use_gpu else "start Ray with num_gpus=0, or leave use_gpu out"
            got = f"RayResourcePool({list(pool.process_on_nodes)}, use_gpu={pool.use_gpu})"
            raise PlacementError(explain(what, got=got, do=do))
