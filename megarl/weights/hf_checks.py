"""Do a directory's tensors belong to its config.json, and are they numbers? Asked once, before any rank reads its part."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megarl.weights.families import model_family
from megarl.weights.hf_reader import HfReader
from megarl.weights.hf_stored import examine
from megarl.weights.regions import Region, whole

READ_AT_MOST = 16 << 30  # bytes: some seconds, and the ranks find them in memory afterwards. Ranks look at larger models themselves


def check_tensors(directory: str | Path, hf_config: Mapping[str, Any], head: str, *, read: bool) -> None:
    """Raise ModelError for tensors that are missing or of another shape, that the model has no place for, are no plain numbers,
    contradict a tie, or are not finite.

    ``head``: "lm" or "value"; a value head may be missing. ``read``: look at the numbers too, where all files together have no more
    than ``READ_AT_MOST`` bytes.
    """
    value_head = model_family(hf_config).table(hf_config).value_head.hf[0].name
    model = examine(Path(directory), hf_config, head, optional=(value_head,))
    if model.scan.problems:
        raise model.scan.problems[0]
    if not read or sum(model.scan.files.values()) > READ_AT_MOST:
        return
    with ExitStack() as files:
        reader = HfReader(directory, files)
        for name, shape in model.shapes.items():
            reader.read(Region(name, whole(shape)))
