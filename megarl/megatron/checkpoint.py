"""Save and load one engine as a Megatron distributed checkpoint, which any layout of the same model can load.

Only the content of a directory is written here; naming it, renaming it when whole, and deadlines are the caller's.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME

from megarl.errors import CheckpointError, explain
from megarl.megatron.cpu import on_compute_device
from megarl.megatron.engine import Engine
from megarl.megatron.model import unwrap
from megarl.weights.checkpoint_keys import key_within
from megarl.weights.families import model_family
from megarl.weights.model_record import ModelRecord
from megarl.weights.table import chunk_prefix

_EXTRA = "_extra_state"
# The default of the distributed optimizer ("fully_sharded_model_space") fails on megatron-core 0.16.1 without Transformer Engine.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": False}


def save_engine(engine: Engine, directory: Path) -> None:
    """Write weights and, where the engine is trained, optimizer state into ``directory``, which exists and is empty. Collective.

    ``model.json`` beside them says which model it is, for the converter.
    """
    with on_compute_device():
        dist_checkpointing.save(_sharded_state(engine, loading=False), str(directory), content_metadata=_METADATA)
    if engine.rank.index == 0:
        ModelRecord(engine.hf_config, engine.role.head, engine.role.dtype).write(directory)


def load_engine(engine: Engine, directory: Path) -> None:
    """Load what :func:`save_engine` wrote, from any layout. Collective.

    Raises CheckpointError where the directory holds no checkpoint, one that only a newer megatron-core can read, or a trained one
    whose experts are cut otherwise than the rest of the model where here they aren't, or the other way round.
    """
    if not dist_checkpointing.check_is_distributed_checkpoint(str(directory)):
        raise CheckpointError(explain("no Megatron distributed checkpoint", where=str(directory), do="resume from another checkpoint"))
    if not reads_common_state_inside() and not (directory / COMMON_STATE_FNAME).exists():
        raise CheckpointError(
            explain(
                "this megatron-core is too old for the checkpoint",
                where=str(directory),
                got=f"no {COMMON_STATE_FNAME}, as megatron-core 0.19 writes it",
                expected=f"{COMMON_STATE_FNAME}, as megatron-core 0.16 writes it (0.19 reads both)",
                do="resume with the Python and the megatron-core that wrote it",
            )
        )
    if engine.optimizer is not None:
        _check_experts(engine, directory)
    with on_compute_device():
        state = dist_checkpointing.load(_sharded_state(engine, loading=True), str(directory))
        for i, chunk in enumerate(engine.chunks):
            _copy_in_place(unwrap(chunk), state[f"model{i}"])
        if engine.optimizer is not None:
            _load_optimizer(engine.optimizer, state["optimizer"])


def _check_experts(engine: Engine, directory: Path) -> None:
    """Experts that are cut otherwise than the rest have an optimizer of their own, whose states have other names."""
    saved = any(key.startswith("chained_") for key in dist_checkpointing.load_tensors_metadata(str(directory)))
    wanted = len(engine.optimizer.chained_optimizers) > 1
    if saved != wanted:
        kinds = {True: "experts that are cut otherwise than the rest", False: "no such experts"}
        layout = engine.rank.layout
        raise CheckpointError(
            explain(
                "optimizer states of experts can't be loaded into a layout that cuts them otherwise",
                where=str(directory),
                got=f"a checkpoint with {kinds[saved]}",
                expected=f"{kinds[wanted]}: tensor {layout.tensor}, expert {layout.expert}, expert_tensor {layout.expert_tensor}",
                do=f"resume with {'' if saved else 'no '}expert or expert_tensor other than 1 and tensor, as in the run that wrote it",
            )
        )


def reads_common_state_inside() -> bool:
    """True for a megatron-core that keeps what is no tensor inside the sharded checkpoint; older ones keep a file beside it.

    Those die of a missing file with an AttributeError of their own. A strategy for that file is an argument of theirs alone.
    """
    return "common_strategy" not in inspect.signature(dist_checkpointing.load).parameters


def _sharded_state(engine: Engine, *, loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {f"model{i}": _sharded_chunk(engine, i) for i in range(len(engine.chunks))}
    if engine.optimizer is not None:
        state["optimizer"] = engine.optimizer.sharded_state_dict(dict(state), is_loading=loading, metadata=_METADATA)
    return state


def _sharded_chunk(engine: Engine, index: int) -> dict[str, Any]:
    """One chunk's tensors under keys that are the same for both layer specs, so that each loads what the other wrote.

    Without Transformer Engine's extra state: it is the history of FP8 scaling, and nothing here computes in FP8.
    """
    sharded = unwrap(engine.chunks[index]).sharded_state_dict()
    state = {name: value for name, value in sharded.items() if _EXTRA not in name}
    if engine.spec == "local":
        prefix = chunk_prefix(engine.rank.layout, index)
        for name, te_name in _te_names(engine).items():
            if name.startswith(prefix) and (value := state.get(name.removeprefix(prefix))) is not None:
                value.key = key_within(value.key, te_name.removeprefix(prefix))
    return state


def _te_names(engine: Engine) -> dict[str, str]:
    """Parameter of the local spec -> the same one of Transformer Engine's."""
    family = model_family(engine.hf_config)
    te = family.shard(engine.hf_config, engine.rank, head=engine.role.head, spec="te")
    return dict(zip(engine.shards, te, strict=True))


@torch.no_grad()
def _copy_in_place(model: torch.nn.Module, state: dict[str, Any]) -> None:
    # In place, since generation engines hold the parameters' memory open.
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or any(_EXTRA not in name for name in missing):
        raise CheckpointError(explain("the checkpoint is of another model", got=f"without {missing}, with {unexpected}"))


def _load_optimizer(optimizer: Any, state: dict[Any, Any]) -> None:
    """Load the optimizer, around three faults of megatron-core with torch's Adam.

    The distributed optimizer expects a saved ``step`` for each parameter although it saves one for all, so the moments are loaded while
    the steps are set aside. And the one step that was saved is shared as one tensor by all parameters, so that each increment would count
    for all of them. A step of 0 is not saved at all. Experts have an optimizer of their own.
    """
    parts = optimizer.chained_optimizers
    states = [state] if len(parts) == 1 else [state[i] for i in range(len(parts))]
    moments = [part_state.pop("param_state", None) for part_state in states]
    for part, part_state in zip(parts, states, strict=True):
        inner = part_state.get("optimizer", part_state)  # with master weights one level further in
        if isinstance(part.optimizer, torch.optim.AdamW) and "state" in inner:
            inner["state"].setdefault("common_step", torch.tensor(0.0))
    optimizer.load_state_dict(state)
    for part, moment in zip(parts, moments, strict=True):
        saved = [s for s in part.optimizer.state.values() if torch.is_tensor(s.get("step"))]
        steps = [s.pop("step") for s in saved]
        if moment is not None:
            part.load_parameter_state_from_fully_reshardable(moment)
        for s, step in zip(saved, steps, strict=True):
            s["step"] = step.clone()
