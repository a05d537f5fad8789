"""Shared parameters between two real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from megarl.errors import SyncError
from megarl.weights.shared import ALIGNMENT, SharedParameters, open_shared

SPECS = {"a": ((3, 5), torch.float32), "b": ((7,), torch.bfloat16), "c": ((2, 2), torch.float64)}

OWNER = """
import json, sys, torch
from megarl.weights.shared import SharedParameters
shared = SharedParameters.create({"a": ((3, 5), torch.float32)})
shared.tensors["a"].copy_(torch.arange(15.0).view(3, 5))
print(json.dumps(shared.manifest()), flush=True)
for line in sys.stdin:
    shared.tensors["a"].add_(1)
    print("added", flush=True)
"""


def test_another_process_sees_the_live_parameters_until_their_owner_dies() -> None:
    before = set(os.listdir("/dev/shm"))
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        manifest = json.loads(owner.stdout.readline())
        seen = open_shared(manifest)["a"]
        assert torch.equal(seen, torch.arange(15.0).view(3, 5))
        owner.stdin.write("\n")
        owner.stdin.flush()
        assert owner.stdout.readline() == "added\n"
        assert torch.equal(seen, torch.arange(1.0, 16.0).view(3, 5))
    finally:
        owner.kill()
        owner.wait()
    assert torch.equal(seen, torch.arange(1.0, 16.0).view(3, 5))  # mapped memory stays while a view lives
    with pytest.raises(SyncError, match="can't be opened"):
        open_shared(manifest)
    assert set(os.listdir("/dev/shm")) <= before


def test_views_are_aligned_typed_and_apart() -> None:
    shared = SharedParameters.create(SPECS)
    for i, (name, (shape, dtype)) in enumerate(SPECS.items(), start=1):
        view = shared.tensors[name]
        assert (tuple(view.shape), view.dtype, view.data_ptr() % ALIGNMENT) == (shape, dtype, 0)
        view.fill_(i)
    again = open_shared(json.loads(json.dumps(shared.manifest())))
    assert [float(again[name].sum()) for name in SPECS] == [15.0, 14.0, 12.0]


def test_a_descriptor_that_is_another_file_by_now_is_refused() -> None:
    """What happens when the owner died and its process id and descriptor number were used again."""
    first, second = SharedParameters.create(SPECS), SharedParameters.create(SPECS)
    stale = first.manifest() | {"path": second.manifest()["path"]}
    with pytest.raises(SyncError, match="not those of the manifest"):
        open_shared(stale)


def test_after_close_nobody_new_gets_in() -> None:
    shared = SharedParameters.create(SPECS)
    manifest = shared.manifest()
    shared.close()
    with pytest.raises(SyncError, match="the shared parameters"):
        open_shared(manifest)
