"""Batches of handles, prepared prompts, the order of the data, and packing. Sequences are ragged, never padded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.data.proto import DataProto
    from megarl.data.rlhf_dataset import RLHFDataset

__all__ = ["DataProto", "RLHFDataset"]


def __getattr__(name: str) -> Any:
    """The two classes that users import from here, loaded when asked for: the room itself has to import in no time."""
    if name == "DataProto":
        from megarl.data.proto import DataProto

        return DataProto
    if name == "RLHFDataset":
        from megarl.data.rlhf_dataset import RLHFDataset

        return RLHFDataset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
