"""Joining a Ray cluster: one that lives, one that doesn't, and none at all. Each in a process of its own, as a user's program is."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.heads import TOKEN, head_node

pytestmark = pytest.mark.cluster

UNCHANGED = "left; the environment changed by {}"

JOIN = """
import os
import sys
import ray
from megarl.cluster.placement import start_cluster
from megarl.errors import ConfigError
before = dict(os.environ)
try:
    leave = start_cluster(None if sys.argv[1] == "none" else sys.argv[1], float(sys.argv[2]))
except ConfigError as error:
    print(error)
    sys.exit(3)
print(f"joined {ray.get_runtime_context().gcs_address}")
leave()
print("left; the environment changed by", {k: v for k, v in os.environ.items() if before.get(k) != v})
"""


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a head node that a user started."""
    place = tmp_path_factory.mktemp("head")
    with head_node(place / "log", 1, os.environ, place) as found:
        yield found.address


def join(address: str, deadline_s: float, **environment: str) -> tuple[int, str, float]:
    began = time.monotonic()
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | environment
    command = [sys.executable, "-c", JOIN, address, str(deadline_s)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=env, cwd=Path(__file__).parents[2])
    return done.returncode, done.stdout + done.stderr, time.monotonic() - began


def test_a_living_cluster_is_joined_by_its_address_and_by_auto(head: str) -> None:
    port = head.rpartition(":")[2]
    for address, environment in ((head, {}), ("auto", {"RAY_ADDRESS": head})):
        code, said, _ = join(address, 60, **environment, **TOKEN)
        assert code == 0 and f":{port}" in said and UNCHANGED in said, said


def test_a_cluster_of_its_own_is_left_without_a_trace() -> None:
    code, said, _ = join("none", 60)
    assert code == 0 and UNCHANGED in said, said


def test_a_cluster_that_wants_a_token_says_so(head: str) -> None:
    code, said, _ = join(head, 60, RAY_AUTH_MODE="disabled")
    assert code == 3 and "set RAY_AUTH_MODE=token" in said, said


def test_a_dead_address_is_an_error_within_the_deadline() -> None:
    """A port where nobody listens, and one where somebody listens who is no Ray: ray.init would try for many minutes."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        code, said, took = join(f"127.0.0.1:{port}", 8)
        assert code == 3 and "no Ray cluster answers (in cluster.address)" in said and "within 8 s" in said
        assert took < 60
    code, said, took = join("auto", 8, RAY_ADDRESS=f"127.0.0.1:{port}")
    assert code == 3 and f"auto (RAY_ADDRESS=127.0.0.1:{port})" in said and "ray start --head" in said
    assert took < 60


def test_an_address_that_is_none_is_named() -> None:
    code, said, _ = join("nonsense", 60)
    assert code == 3 and "nonsense" in said and "Invalid address format" in said
