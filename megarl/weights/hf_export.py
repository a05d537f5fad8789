"""Write a Hugging Face directory from shards, without gathering: each rank writes its own elements into mapped files."""

from __future__ import annotations

import json
import mmap
import os
import shutil
from collections import defaultdict
from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch

from megarl.config.safetensors_header import Entry, read_header
from megarl.errors import CheckpointError, ModelError, explain
from megarl.types import Layout, Rank
from megarl.weights.casts import cast
from megarl.weights.families import model_family
from megarl.weights.hf_io import check_parameters
from megarl.weights.hf_layout import lay_out, write_index
from megarl.weights.hf_source import CODES
from megarl.weights.regions import Box, as_slices, overlap, volume
from megarl.weights.table import ParameterShard

_CONFIG = "config.json"
# What a model directory holds beside weights and configuration, where it has it.
_COMPANIONS = (
    "generation_config.json",
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "LICENSE*",
)

# Where transformers' name doesn't follow from the language model's: Gemma3ForSequenceClassification sees images too.
_CLASSIFIERS = {"Gemma3ForCausalLM": "Gemma3TextForSequenceClassification"}

Shapes = Mapping[str, tuple[int, ...]]


class HfExport:
    """A Hugging Face directory in the making.

    One process calls :meth:`create`, then every rank calls :meth:`open` and :meth:`write`, then one process calls
    :meth:`finish`. Ranks on several hosts need a file system on which mapped writes of two hosts into one file don't collide.
    """

    def __init__(self, directory: Path, entries: Mapping[str, Entry]):
        self.directory = directory
        self._entries = entries

    @classmethod
    def create(
        cls,
        directory: str | Path,
        hf_config: Mapping,
        dtype: torch.dtype,
        layout: Layout,
        *,
        head: str = "lm",
        shard_bytes: int = 5 * 10**9,
    ) -> "HfExport":
        """Lay out the files of a new ``directory``, full size, for a model of ``layout``.

        No file exceeds ``shard_bytes`` unless one tensor does.

        Tensors that the family keeps in float32 stay so whatever ``dtype``. A value head is written as ``score.weight`` [1, hidden] of
        the family's ``...ForSequenceClassification`` with one label, and ``lm_head`` isn't. Raises CheckpointError when the directory
        exists, or when the ranks' parts don't cover every element once.
        """
        directory = Path(directory)
        family = model_family(hf_config)
        shapes = family.hf_tensors(hf_config, head=head)
        ranks = [Rank(index, layout) for index in range(layout.world_size)]
        check_coverage(shapes, [(rank, family.shard(hf_config, rank, head=head)) for rank in ranks])
        try:
            directory.mkdir(parents=True)
        except FileExistsError as error:
            raise CheckpointError(
                explain("the directory to export into exists already", where=str(directory), do="name a new one")
            ) from error
        kept = family.float32_tensors(hf_config)
        dtypes = {name: torch.float32 if name in kept else dtype for name in shapes}
        laid = lay_out(shapes, dtypes, shard_bytes)
        for file, size in laid.sizes.items():
            _make(directory / file, laid.headers[file], size)
        write_index(directory, laid)
        _write_json(directory / _CONFIG, export_config(hf_config, dtype, head))
        return cls.open(directory)

    @classmethod
    def open(cls, directory: str | Path) -> "HfExport":
        """The export that another process laid out. Raises CheckpointError when there is none."""
        directory = Path(directory)
        paths = sorted(directory.glob("*.safetensors"))
        if not paths:
            raise CheckpointError(explain("no export was laid out here", where=str(directory), do="create it first"))
        return cls(directory, {name: entry for path in paths for name, entry in read_header(path).items()})

    def write(self, params: Mapping[str, torch.Tensor], shards: Mapping[str, ParameterShard], rank: Rank) -> None:
        """Write what ``rank`` owns: of what several ranks hold, the first one's; of a tied output layer, nothing.

        Numbers are cast to the export's dtype. Returns when they are on disk.
        """
        check_parameters(params, shards)
        with torch.no_grad():
            files = {file: _map(self.directory / file) for file in {entry.file for entry in self._entries.values()}}
            for name, shard in shards.items():
                for source, target in shard.copies if shard.owned_by(rank) else ():
                    entry = self._entries[source.name]
                    dtype, count = CODES[entry.code], prod(entry.shape)
                    tensor = torch.frombuffer(files[entry.file], dtype=dtype, count=count, offset=entry.offset).view(entry.shape)
                    numbers = params[name].detach()[as_slices(target.box)]
                    tensor[as_slices(source.box)] = cast(numbers, dtype, f"{source.name} for {self.directory / entry.file}").cpu()
            for mapped in files.values():
                mapped.flush()

    def finish(self, target: str | Path, tokenizer_dir: str | Path) -> None:
        """Add generation configuration, tokenizer and chat template of ``tokenizer_dir``, then rename the directory to ``target``.

        ``target`` appears whole or not at all. Raises CheckpointError when it exists.
        """
        target = Path(target)
        for pattern in _COMPANIONS:
            for path in sorted(Path(tokenizer_dir).glob(pattern)):
                if path.is_dir():
                    shutil.copytree(path, self.directory / path.name)
                else:
                    shutil.copy2(path, self.directory / path.name)
        for path in [*self.directory.iterdir(), self.directory]:
            _to_disk(path)
        if target.exists():
            raise CheckpointError(
                explain(
                    "the target of the export exists already",
                    where=str(target),
                    got=f"the export is whole in {self.directory}",
                    do="move one of them",
                )
            )
        os.rename(self.directory, target)
        _to_disk(target.parent)


def check_coverage(shapes: Shapes, ranks: list[tuple[Rank, dict[str, ParameterShard]]]) -> None:
    """Raise CheckpointError unless the parts that the ranks own cover each element of ``shapes`` exactly once."""
    boxes: dict[str, list[Box]] = defaultdict(list)
    for rank, shards in ranks:
        for shard in shards.values():
            for source, _ in shard.copies if shard.owned_by(rank) else ():
                boxes[source.name].append(source.box)
    if boxes.keys() != shapes.keys():
        raise CheckpointError(
            explain(
                "the weight table doesn't cover the model",
                got=f"extra: {sorted(boxes.keys() - shapes.keys())}",
                expected=f"also: {sorted(shapes.keys() - boxes.keys())}",
            )
        )
    for name, shape in shapes.items():
        covered = sum(volume(box) for box in boxes[name])
        if covered != prod(shape) or overlap(boxes[name]) is not None:
            raise CheckpointError(
                explain(
                    "the ranks' parts of a tensor don't cover it exactly once",
                    where=name,
                    got=f"{covered} elements in {len(boxes[name])} parts",
                    expected=f"{prod(shape)} elements, no two parts overlapping",
                )
            )


def export_config(hf_config: Mapping, dtype: torch.dtype, head: str) -> dict:
    """The model's ``config.json`` with the head and the dtype of the export."""
    # Weights that came quantized are written as plain numbers.
    config = {key: value for key, value in hf_config.items() if key not in ("torch_dtype", "quantization_config")}
    config["dtype"] = str(dtype).removeprefix("torch.")
    if head == "value":
        causal = (config.get("architectures") or [""])[0]
        if not causal.endswith("ForCausalLM") and not causal.endswith("ForSequenceClassification"):
            raise ModelError(
                explain(
                    "a value head can't be exported with this architecture",
                    where="architectures of config.json",
                    got=causal,
                    expected="...ForCausalLM",
                )
            )
        config["architectures"] = [_CLASSIFIERS.get(causal, causal.replace("ForCausalLM", "ForSequenceClassification"))]
        config |= {"id2label": {"0": "value"}, "label2id": {"value": 0}}
    return config


def _make(path: Path, header: bytes, size: int) -> None:
    """A safetensors file of full size whose numbers are all zero."""
    with open(path, "xb") as file:
        file.write(header)
        # Reserve the blocks now: a mapped write to a full disk is a bus error and kills the process.
        os.posix_fallocate(file.fileno(), 0, size)


def _map(path: Path) -> mmap.mmap:
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _to_disk(path: Path) -> None:
    """fsync a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
