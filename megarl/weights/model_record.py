"""``model.json`` beside a Megatron checkpoint: which model it is of, so that it can be read without a recipe."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.errors import CheckpointError, explain
from megarl.weights.dtypes import DTYPES

FILE = "model.json"
_FORMAT = 1


@dataclass(frozen=True)
class ModelRecord:
    """One model, as its checkpoint holds it."""

    hf_config: Mapping[str, Any]  # config.json
    head: str  # "lm" | "value"
    dtype: str  # of most tensors
    tensor_dtypes: Mapping[str, str] = field(default_factory=dict)  # Hugging Face tensor -> its dtype, where it is another one
    converted: bool = False  # from a Hugging Face directory, whose configuration and dtypes these are; else a run stored it as it computed

    def dtype_of(self, tensor: str) -> str | None:
        """The dtype of a Hugging Face tensor where it came from; None for a run's: each is as it was stored."""
        return self.tensor_dtypes.get(tensor, self.dtype) if self.converted else None

    def write(self, directory: Path) -> None:
        """Write ``directory/model.json``, durably."""
        content = {
            "format": _FORMAT,
            "head": self.head,
            "dtype": self.dtype,
            "tensor_dtypes": dict(self.tensor_dtypes),
            "converted": self.converted,
            "hf_config": dict(self.hf_config),
        }
        with open(directory / FILE, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())


def read_record(directory: Path) -> ModelRecord:
    """What :meth:`ModelRecord.write` wrote. Raises CheckpointError where it is missing, damaged, or of a later format."""
    path = directory / FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            explain(
                "the checkpoint doesn't say which model it is of",
                where=str(directory),
                expected=f"{FILE}, which megarl writes into each checkpoint of a model",
                do="name the directory that holds it, as RUN/checkpoints/step_N/actor",
            )
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, error) from error
    expected = {"hf_config": dict, "head": str, "dtype": str, "tensor_dtypes": dict, "converted": bool}
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise _damaged(path, f"format {found.get('format')!r}" if isinstance(found, dict) else type(found).__name__)
    found.setdefault("converted", bool(found.get("tensor_dtypes")))  # records of earlier builds: runs note no dtypes of tensors
    for key, kind in expected.items():
        if not isinstance(found.get(key), kind):
            raise _damaged(path, f"{key}: {found.get(key)!r}")
    names = [found["dtype"], *found["tensor_dtypes"].values()]
    if found["head"] not in ("lm", "value") or any(not isinstance(name, str) or name not in DTYPES for name in names):
        raise _damaged(path, f"head {found['head']!r}, dtypes {', '.join(sorted(set(map(str, names)))[:8])}")
    return ModelRecord(**{key: found[key] for key in expected})


def _damaged(path: Path, got: object) -> CheckpointError:
    return CheckpointError(
        explain(
            "not a record of a model that this megarl can read",
            where=str(path),
            got=got,
            expected=f"JSON of format {_FORMAT}",
            do="convert the model again, or use the megarl that wrote it",
        )
    )
