"""Where worker groups run: a Ray cluster, started here or joined, and one placement group per worker group."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.device import on_gpu
from megarl.errors import ConfigError, MegarlError, PlacementError, explain

JOIN_DEADLINE_S = 60.0  # a cluster that lives answers in a second or two, on a busy machine in half a minute

# Every worker computes with one thread: processes share the cores. Returns of workers always go to the object store and never ride in
# the reply to the controller, which Ray does by itself below 100 kB.
WORKER_ENV = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "RAY_max_direct_call_object_size": "0",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
# Of processes that compute on a CPU: compiling takes a C++ compiler and a minute there, and no GPU is to be opened by accident.
CPU_WORKER_ENV = {"TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class Slots:
    """What one worker group asks for: ``count`` processes, each with a share of a core and perhaps of a GPU."""

    group: str
    count: int
    cpus: float
    gpus: float = 0.0


def shared_by(groups: Sequence[Slots]) -> Slots:
    """What groups ask for that share devices: rank i of each on device i."""
    counts = sorted({slots.count for slots in groups})
    if len(counts) != 1:
        raise PlacementError(
            explain(
                "groups that share devices must have one process on each",
                where="cluster.placement: colocated",
                got="; ".join(f"{s.group}: {s.count}" for s in groups),
                expected="equal numbers of processes",
                do="make rollout.engines equal to the number of the actor's ranks, or set cluster.placement to separate",
            )
        )
    return Slots(" + ".join(s.group for s in groups), counts[0], sum(s.cpus for s in groups), sum(s.gpus for s in groups))


def start_cluster(address: str | None, deadline_s: float = JOIN_DEADLINE_S) -> Callable[[], None]:
    """Join the Ray cluster at ``address`` ("auto": the one that RAY_ADDRESS names, else this machine's), or start one on this machine.

    Returns what leaves it again (and ends it, where it was started here), and puts the environment back as it was: a program may start
    other clusters afterwards, and other programs. Raises ConfigError when no cluster answers there within ``deadline_s``, and for one that
    this process can't work with.
    """
    leave = partial(_leave, {name: os.environ.get(name) for name in _SET_BY_A_START})
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    if address is not None:
        _join(address, deadline_s)
        return leave
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: names and interfaces of a network don't matter
    # "local", since without it Ray would join whatever cluster RAY_ADDRESS names, perhaps somebody else's.
    ray.init(address="local", include_dashboard=False, log_to_driver=False, configure_logging=False, num_gpus=None if on_gpu() else 0)
    return leave


# By megarl the first three, by Ray itself the others.
_SET_BY_A_START = (
    "RAY_USAGE_STATS_ENABLED",
    "RAY_DEDUP_LOGS",
    "GLOO_SOCKET_IFNAME",
    "RAY_AUTH_MODE",
    "RAY_CLIENT_MODE",
    "PYTHONBREAKPOINT",
)


def _leave(before: Mapping[str, str | None]) -> None:
    ray.shutdown()
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _join(address: str, deadline_s: float) -> None:
    if address.startswith("ray://"):
        raise ConfigError(
            explain(
                "Ray's client protocol brings every result to this process, and the controller must not hold them",
                where="cluster.address",
                got=address,
                expected='"auto" or host:port',
                do="run megarl on a node of the cluster, the head for example, with cluster.address=auto",
            )
        )
    _check_answers(address, deadline_s)
    try:
        ray.init(address=address, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RaySystemError) as error:
        raise _refusal(address, str(error)) from error


def _check_answers(address: str, deadline_s: float) -> None:
    """Ask the cluster for its status, in a process that can be ended: ``ray.init`` itself tries a dead address for many minutes."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", address]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, check=False, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise _no_cluster(address, f"no answer within {deadline_s:g} s") from error
    if done.returncode != 0:
        raise _refusal(address, next(iter(done.stderr.strip().splitlines()[-1:]), f"exit code {done.returncode}"))


def _refusal(address: str, said: str) -> MegarlError:
    """The error for what Ray says of a cluster: it may well answer, and be another release's (of Ray, or of Python)."""
    if "version mismatch" not in said.lower():
        return _no_cluster(address, said)
    return ConfigError(
        explain(
            "the Ray cluster was started with another Ray or Python",
            where=f"cluster.address = {address}",
            got=" ".join(said.split()),
            do="run megarl in the environment that `ray start` ran in, or start the cluster in this one",
        )
    )


def _no_cluster(address: str, said: str) -> ConfigError:
    named = os.environ.get("RAY_ADDRESS") if address == "auto" else None
    got = f"{address} (RAY_ADDRESS={named})" if named else address
    do = "start one by `ray start --head`, or leave the address out: megarl starts a cluster of its own on this machine"
    if "AuthenticationError" in said:
        do = "set RAY_AUTH_MODE=token in this program's environment, and give it the cluster's token (RAY_AUTH_TOKEN or ~/.ray/auth_token)"
    return ConfigError(explain("no Ray cluster answers", where="cluster.address", got=f"{got}: {said}", do=do))


def cluster_has_gpus() -> bool:
    """True where models are to be placed on GPUs. The controller's own host need not have one."""
    return ray.cluster_resources().get("GPU", 0.0) > 0


def check_capacity(slots: list[Slots]) -> list[str]:
    """Compare what the groups ask for with what the cluster has; returns warnings.

    Raises PlacementError that says how many slots are missing and for whom.
    """
    have = ray.cluster_resources()
    for kind, attribute in (("CPU", "cpus"), ("GPU", "gpus")):
        need = sum(s.count * getattr(s, attribute) for s in slots)
        if need > have.get(kind, 0.0) + 1e-9:
            missing = need - have.get(kind, 0.0)
            rows = "; ".join(f"{s.group}: {s.count} x {getattr(s, attribute):g}" for s in slots if getattr(s, attribute))
            raise PlacementError(
                explain(
                    f"the placement needs {need:g} {kind} and the cluster has {have.get(kind, 0.0):g}: {missing:g} missing",
                    got=rows,
                    do="use smaller layouts, a larger cluster" + (", or a smaller cluster.cpu_share_per_process" if kind == "CPU" else ""),
                )
            )
    processes, cores = sum(s.count for s in slots), have.get("CPU", 0.0)
    if processes > cores:
        return [f"{processes} worker processes share {cores:g} cores: phases will overlap less than on a larger machine"]
    return []


def reserve(slots: Slots, deadline_s: float) -> PlacementGroup:
    """Reserve a group's slots, close together; bundle i is rank i's."""
    bundle = {"CPU": slots.cpus} | ({"GPU": slots.gpus} if slots.gpus else {})
    group = placement_group([bundle] * slots.count, strategy="PACK")
    if not group.wait(timeout_seconds=deadline_s):
        raise PlacementError(
            explain(
                f"the slots of {slots.group} were not free within {deadline_s:g} s",
                got=ray.available_resources(),
                expected=f"{slots.count} x {bundle}",
            )
        )
    return group


def spawn(cls: type, slots: Slots, group: PlacementGroup, rank: int, *args: object, **env: str) -> ray.actor.ActorHandle:
    """Start ``cls(*args)`` as rank ``rank`` of its group, in a process of its own. Never restarted by Ray: what it held would be gone."""
    passed = {k: os.environ[k] for k in ("GLOO_SOCKET_IFNAME", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR") if k in os.environ}
    options = {
        "num_cpus": slots.cpus,
        "num_gpus": slots.gpus,
        "name": None,
        "max_restarts": 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
        "runtime_env": {"env_vars": WORKER_ENV | ({} if slots.gpus else CPU_WORKER_ENV) | passed | env},
    }
    return ray.remote(cls).options(**options).remote(*args)
