"""Environment variables that vLLM reads when it is imported; set here and nowhere else."""

from __future__ import annotations

import os
import sys

from megarl.device import on_gpu
from megarl.errors import WorkerError, explain

_ALWAYS = {
    "HF_HUB_OFFLINE": "1",  # models are local directories
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core runs in this process, which is the unit that is restarted
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # forking after torch has started threads can hang
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
}
_ON_CPU = {
    "OMP_NUM_THREADS": "1",  # more threads than cores, over all processes of a machine, are ten times slower
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines would all bind to core 0
    "TORCHDYNAMO_DISABLE": "1",
}


def prepare_environment() -> None:
    """Set what vLLM must find. Raises WorkerError where vLLM has been imported already, and so has read other values."""
    wanted = _ALWAYS if on_gpu() else _ALWAYS | _ON_CPU
    changed = {name: value for name, value in wanted.items() if os.environ.get(name) != value}
    if changed and "vllm" in sys.modules:
        raise WorkerError(
            explain(
                "vLLM was imported before its environment was set",
                where="megarl.rollout",
                got={name: os.environ.get(name) for name in changed},
                expected=changed,
                do="start the engine in a process of its own",
            )
        )
    os.environ.update(changed)
