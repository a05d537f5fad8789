"""Headers of safetensors files: the format's own writer passes, and one that would have other bytes read than were written doesn't."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from megarl.config.safetensors_header import read_header
from megarl.errors import ModelError

Header = dict[str, Any]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.float8_e4m3fn]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file({"a": torch.zeros(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}, tmp_path / "x.safetensors", metadata={"format": "pt"})
    return tmp_path / "x.safetensors"


def rewrite(file: Path, change: Callable[[Header], Any]) -> None:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    changed = change(header)
    text = (changed if isinstance(changed, str) else json.dumps(changed or header)).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def put(name: str, **values: Any) -> Callable[[Header], None]:
    return lambda header: header[name].update(values)


FAULTS: dict[str, tuple[Callable[[Header], Any], str]] = {
    "overlap": (put("b", data_offsets=[20, 30]), "b overlaps"),
    "gap": (put("b", data_offsets=[26, 36]), "b leaves a gap"),
    "short": (put("a", data_offsets=[0, 20]), "a: bytes 0 to 20"),
    "backwards": (put("a", data_offsets=[24, 0]), "a: bytes 24 to 0"),
    "negative": (put("a", data_offsets=[-4, 20]), "a: data_offsets"),
    "huge": (put("a", data_offsets=[0, 10**30]), "a: bytes 0 to"),
    "true for 1": (put("a", shape=[True, 6]), "a: shape"),
    "shape": (put("a", shape=[3, 3]), "a: bytes 0 to 24"),
    "shape of text": (put("a", shape="2, 3"), "a: shape"),
    "no shape": (lambda header: header["a"].pop("shape") and None, "a: shape None"),
    "no dtype": (lambda header: header["a"].pop("dtype") and None, "a: dtype None"),
    "unknown dtype": (put("a", dtype="F33"), "a: dtype 'F33'"),
    "list for dtype": (put("a", dtype=["F32"]), "a: dtype"),
    "no offsets": (put("a", data_offsets=[0]), "a: data_offsets"),
    "other dtype": (put("a", dtype="F16"), "a: bytes 0 to 24"),
    "entry of text": (lambda header: header | {"a": "F32"}, "a: dtype None"),
    "list": (lambda header: [header], "no object"),
    "one name twice": (lambda header: '{"a": 1, "a": 2}', "a occurs twice"),
    "one word twice": (lambda header: json.dumps(header).replace('"shape"', '"dtype": "I8", "shape"', 1), "dtype occurs twice"),
    "metadata of numbers": (lambda header: header | {"__metadata__": {"a": 5}}, "__metadata__"),
    "metadata of text": (lambda header: header | {"__metadata__": "x"}, "__metadata__"),
    "byte order mark": (lambda header: "\ufeff" + json.dumps(header), "BOM"),
    "no number": (put("a", more=float("nan")), "NaN is no JSON"),
    "no JSON": (lambda header: "{'a'}", "line 1"),
    "deep": (lambda header: "[" * 200_000, "not a whole"),
    "a tensor gone": (lambda header: header.pop("a") and None, "b leaves a gap"),
    "the last gone": (lambda header: header.pop("b") and None, "tells of"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_header_that_cannot_be_is_named(fault: str, file: Path) -> None:
    change, words = FAULTS[fault]
    rewrite(file, change)
    with pytest.raises(ModelError) as caught:
        read_header(file)
    assert words in str(caught.value) and "x.safetensors" in str(caught.value), str(caught.value)


SHAPES = st.lists(st.integers(0, 3), max_size=3)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=4))
def test_what_the_formats_writer_wrote_passes(
    tmp_path_factory: pytest.TempPathFactory, tensors: list[tuple[torch.dtype, list[int]]]
) -> None:
    file = tmp_path_factory.mktemp("headers") / "x.safetensors"
    save_file({f"t{i}": torch.zeros(shape).to(dtype) for i, (dtype, shape) in enumerate(tensors)}, file)
    found = read_header(file)
    assert {name: entry.shape for name, entry in found.items()} == {f"t{i}": tuple(shape) for i, (_, shape) in enumerate(tensors)}
    assert sum(entry.nbytes for entry in found.values()) == file.stat().st_size - 8 - int.from_bytes(file.read_bytes()[:8], "little")
