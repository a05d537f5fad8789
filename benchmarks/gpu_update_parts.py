"""Where the time of log-probs and updates goes on one GPU, for one micro-batch of workload S0 (16 x (512 + 512) tokens, 0.5B).

    python recipes/bench/prepare.py S0 && python benchmarks/gpu_update_parts.py

Each line is the median of five runs after two, the device synchronised, in milliseconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megarl.config.schema import ActorConfig
from megarl.device import synchronize
from megarl.megatron import world
from megarl.megatron.engine import Engine, MicroBatch
from megarl.megatron.head import vocab_parallel_log_probs
from megarl.megatron.losses import MiniBatchTotals, PolicyLossSpec, SupervisedLossSpec
from megarl.megatron.model import Role, unwrap
from megarl.megatron.optimizer import OptimizerSettings, optimizer_step
from megarl.types import Layout, Ragged
from megarl.weights.families import read_hf_config

SEQUENCES, TOKENS = 16, 512


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, default=Path("build/bench/S0/model"))
    engine, batch = build(parser.parse_args().model), micro_batch()
    totals = MiniBatchTotals(tokens=SEQUENCES * TOKENS, samples=SEQUENCES)
    policy = PolicyLossSpec(ActorConfig(samples_per_mini_batch=SEQUENCES))
    logits = forward_logits(engine, batch)
    targets = torch.from_numpy(batch.responses.values.astype(np.int64)).to(engine.device)
    score = partial(vocab_parallel_log_probs, logits, targets, vocab_size=engine.vocab_size, temperature=1.0)
    rows: dict[str, Callable[[], Any]] = {
        "forward pass to the logits at responses": lambda: forward_logits(engine, batch),
        "log-probs from logits": lambda: score(with_entropy=False),
        "log-probs and entropy from logits": lambda: score(with_entropy=True),
        "forward pass with log-probs (as in ref)": lambda: engine.forward([batch]),
        "forward pass with log-probs and entropy (as in old_log_prob)": lambda: engine.forward([batch], with_entropy=True),
        "gradients without entropy (supervised loss)": lambda: engine.gradients([batch], SupervisedLossSpec(), totals),
        "gradients as in update_actor": lambda: engine.gradients([batch], policy, totals),
        "optimizer step": lambda: optimizer_step(engine.optimizer, 0.0, finite=True),
        "gradients of 16 micro-batches, and the step": lambda: engine.train_step([batch] * 16, policy, totals, lr=0.0),
    }
    for name, work in rows.items():
        torch.cuda.reset_peak_memory_stats()
        print(f"| {name} | {milliseconds(work):.1f} ms | {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB |", flush=True)
    profile(lambda: engine.gradients([batch], policy, totals))
    world.leave()


def build(model: Path) -> Engine:
    rank = world.join(0, Layout(), dist.HashStore(), timeout_s=60, seed=0)
    engine = Engine(read_hf_config(model), rank, Role("lm", True, "bfloat16"), OptimizerSettings(lr=1e-6, distributed=True))
    engine.load_hf(model)
    engine.enable_training()
    return engine


def micro_batch() -> MicroBatch:
    rng = np.random.default_rng(0)
    prompts, responses = (Ragged.from_list([rng.integers(0, 150_000, size=TOKENS) for _ in range(SEQUENCES)], np.int32) for _ in range(2))
    columns = {
        name: Ragged(rng.normal(size=SEQUENCES * TOKENS).astype(np.float32) - shift, responses.offsets)
        for name, shift in (("log_probs", 12), ("advantages", 0))
    }
    return MicroBatch(prompts, responses, columns)


@torch.no_grad()
def forward_logits(engine: Engine, batch: MicroBatch) -> torch.Tensor:
    unwrap(engine.chunks[0]).eval()
    return engine.run_schedule([batch], lambda packed, _b, full: full[0].index_select(0, packed.predictors), forward_only=True)[0]


def milliseconds(work: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(7):
        synchronize()
        began = time.monotonic()
        work()
        synchronize()
        seconds.append(time.monotonic() - began)
    return 1000 * median(seconds[2:])


def profile(work: Callable[[], Any]) -> None:
    """The kernels that take most time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]) as trace:
        work()
        synchronize()
    kernels = sorted(trace.key_averages(), key=lambda k: -k.self_device_time_total)[:20]
    total = sum(k.self_device_time_total for k in trace.key_averages())
    for kernel in kernels:  # milliseconds, share, calls, name
        spent = kernel.self_device_time_total
        print(f"{spent / 1000:8.1f} ms {spent / total:5.1%} {kernel.count:5} {kernel.key[:90]}")


if __name__ == "__main__":
    main()
