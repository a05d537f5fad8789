"""What a safetensors file says of itself (https://github.com/huggingface/safetensors, "Format"), checked before a number is read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from megarl.errors import ModelError, explain

_LONGEST = 100_000_000  # bytes of a header; the format's own limit
_META = "__metadata__"
# Bits of one element, by the format's own words for dtypes.
_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
    "C64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One tensor of a safetensors file."""

    file: str
    code: str  # the format's own word for its dtype
    shape: tuple[int, ...]
    offset: int  # bytes, of its first element in the file

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * _BITS[self.code] // 8


def read_header(path: Path) -> dict[str, Entry]:
    """Tensor name -> its entry, in the header's order.

    Raises ModelError unless the tensors lie one behind the other from the first byte to the last, each as long as its shape and
    dtype say, under names that occur once: any other header would have numbers read that nobody wrote there.
    """
    size = path.stat().st_size
    with open(path, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _LONGEST):
            raise _damaged(path, f"{size} bytes, less than its header")
        text = stream.read(length)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=once, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, error) from error
    if not isinstance(header, dict):
        raise _damaged(path, f"a header that is no object: {type(header).__name__}")
    meta = header.get(_META, {})
    if not isinstance(meta, dict) or not all(isinstance(value, str) for value in meta.values()):
        raise _damaged(path, f"{_META}: {str(meta)[:80]}", "words by name")
    found = {name: _entry(path, name, what, 8 + length) for name, what in header.items() if name != _META}
    _check_places(path, found, 8 + length, size)
    return found


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, for ``object_pairs_hook``. Raises ValueError for a name that occurs twice: readers differ in which they take."""
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(name for name in names if names.count(name) > 1)} occurs twice")
    return made


def _entry(path: Path, name: str, what: Any, start: int) -> Entry:
    """``start``: of the numbers, in bytes."""
    code, shape, offsets = (what.get(key) for key in ("dtype", "shape", "data_offsets")) if isinstance(what, dict) else (None,) * 3
    if not isinstance(code, str) or code not in _BITS:
        raise _damaged(path, f"{name}: dtype {code!r}", f"one of {', '.join(_BITS)}")
    if not _lengths(shape):
        raise _damaged(path, f"{name}: shape {str(shape)[:80]}", "whole numbers from 0 on")
    if not _lengths(offsets) or len(offsets) != 2:
        raise _damaged(path, f"{name}: data_offsets {str(offsets)[:80]}", "first byte, and the one behind the last")
    entry = Entry(path.name, code, tuple(shape), start + offsets[0])
    if offsets[1] - offsets[0] != entry.nbytes or prod(shape) * _BITS[code] % 8:
        raise _damaged(path, f"{name}: bytes {offsets[0]} to {offsets[1]}", f"{entry.nbytes} bytes for {shape} of {code}")
    return entry


def _lengths(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(type(number) is int and number >= 0 for number in numbers)


def _check_places(path: Path, entries: dict[str, Entry], start: int, size: int) -> None:
    at = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != at:
            kind = "overlaps the tensor before it" if entry.offset < at else "leaves a gap before it"
            raise _damaged(path, f"{name} {kind}: it begins at byte {entry.offset - start}", f"byte {at - start}")
        at += entry.nbytes
    if at != size:
        raise _damaged(path, f"{size} bytes, and its header tells of {at}")


def _damaged(path: Path, got: object, expected: str | None = None) -> ModelError:
    return ModelError(
        explain("not a whole safetensors file", where=str(path), got=got, expected=expected, do="copy the model directory again")
    )
