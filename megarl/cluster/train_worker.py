"""One Megatron rank as a Ray actor. It fetches its rows from handles, runs the engine, and returns columns of those rows."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist

from megarl.algo.advantages import ADVANTAGE_ESTIMATORS, AdvantageInputs
from megarl.algo.kl import kl_penalised_rewards
from megarl.algo.moments import Moments, whiten
from megarl.cluster.calls import fetch_together
from megarl.cluster.worker import import_plugins, open_log, process_facts, timed
from megarl.config.schema import AlgorithmConfig
from megarl.data.proto import Piece, gather_rows
from megarl.data.retokenise import CRITIC_PREDICTORS, CRITIC_TOKENS, Retokeniser
from megarl.device import device_id, has_transformer_engine, on_gpu, release_cached_memory, synchronize
from megarl.errors import SyncError, explain
from megarl.megatron import checkpoint, cpu, world
from megarl.megatron.engine import Engine, MicroBatch
from megarl.megatron.losses import LossSpec, MiniBatchTotals
from megarl.megatron.model import Role
from megarl.megatron.optimizer import OptimizerSettings
from megarl.profiling import Profiler, Recorded, Window, phase
from megarl.types import Layout, Ragged
from megarl.weights import cuda_ipc
from megarl.weights.families import read_hf_config
from megarl.weights.hf_export import HfExport
from megarl.weights.shared import SharedParameters


@dataclass(frozen=True)
class RowsRequest:
    """The rows of one data-parallel replica: where their columns are, and which go through the model together."""

    pieces: Mapping[str, tuple[Piece, ...]]
    micro_batches: tuple[tuple[int, ...], ...]  # rows of the batch

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(row for batch in self.micro_batches for row in batch)

    def fetch(self) -> dict[str, Ragged]:
        """Every column, for ``rows``, in that order."""
        return gather_rows(self.pieces, self.rows, fetch_together)


class TrainWorker:
    """Holds the engines of the roles that share this layout (actor and reference; critic)."""

    def __init__(self, group: str, rank: int, layout: Layout, log_dir: str, timeout_s: float, seed: int, plugins: tuple[str, ...]):
        open_log(log_dir, f"{group} rank {rank}")
        self.profiler = Profiler()
        import_plugins(plugins)
        self.group, self.index, self.layout = group, rank, layout
        self.timeout_s, self.seed = timeout_s, seed
        self.engines: dict[str, Engine] = {}
        self.retokenisers: dict[str, Retokeniser] = {}  # of roles that read the text of the samples, on the reporting ranks
        self.shared: SharedParameters | None = None  # on a CPU
        # On a GPU: the tensors that engines were told of, and the manifest. Held, so that nothing else can come to lie at their addresses.
        self._exported: tuple[list[torch.Tensor], dict[str, Any]] | None = None
        self._store: dist.TCPStore | None = None

    # --- start -----------------------------------------------------------------------------------------------------------------

    def open_store(self) -> tuple[str, int]:
        """On rank 0: open the group's rendezvous; returns its address. The port is bound here and now, so that nobody can take it."""
        host = "127.0.0.1" if ray.util.get_node_ip_address().startswith("127.") else ray.util.get_node_ip_address()
        self._store = dist.TCPStore(host, 0, self.layout.world_size, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def join(self, host: str, port: int) -> dict[str, Any]:
        """Join the group's process groups."""
        store = self._store or dist.TCPStore(host, port, self.layout.world_size, is_master=False)
        self.rank = world.join(self.index, self.layout, store, self.timeout_s, self.seed)
        said = {"warning": cpu.check_version(), "device": device_id(), "transformer_engine": has_transformer_engine()}
        return process_facts() | said

    def load(
        self, name: str, directory: str, role: Role, optimizer: OptimizerSettings | None, share: bool, text_of: str | None
    ) -> dict[str, Any]:
        """Build (or build anew) the model of role ``name`` and load a Hugging Face directory into it.

        ``share``: put its parameters into memory that generation engines on this host can open.
        ``text_of``: directory of the tokenizer whose tokens the samples are, for a role that reads their text with a tokenizer of its own.
        """
        with timed() as record:
            if share:
                self._exported = None
            if name in self.engines:
                self.engines.pop(name).discard()  # two of them need not fit
            engine = Engine(read_hf_config(directory), self.rank, role, optimizer)
            if share:
                self._share(engine)
            engine.load_hf(Path(directory))
            if role.trainable:
                engine.enable_training()
            self.engines[name] = engine
            if text_of is not None and self.rank.reports:
                self.retokenisers[name] = Retokeniser.load(text_of, directory)
        return process_facts() | record

    def _share(self, engine: Engine) -> None:
        parameters = engine.named_parameters()
        specs = {n: (tuple(p.shape), p.dtype) for n, p in parameters.items()}
        if on_gpu():
            places = cuda_ipc.in_one_buffer(specs, engine.device)
        else:
            self.shared = SharedParameters.create(specs)
            places = self.shared.tensors
        for name, parameter in parameters.items():
            parameter.data = places[name]

    @phase("share weights of {}")
    def manifest(self, name: str) -> dict[str, Any]:
        """Where a generation engine on this device finds the parameters of role ``name``, as they are now.

        Memory that no tensor uses goes back to the device, for the engine to wake in.
        """
        release_cached_memory()
        parameters = {key: parameter.data for key, parameter in self.engines[name].named_parameters().items()}
        found = self._manifest_of_gpu(parameters) if on_gpu() else self._manifest_of_cpu(parameters)
        synchronize()  # the engine must not read ahead of the optimizer
        return found

    def _manifest_of_gpu(self, parameters: dict[str, torch.Tensor]) -> dict[str, Any]:
        """The buffers that Megatron computes with, themselves. Made once for each set of buffers: their handles stay valid."""
        tensors = list(parameters.values())
        if self._exported is None or [t.data_ptr() for t in self._exported[0]] != [t.data_ptr() for t in tensors]:
            self._exported = tensors, cuda_ipc.export_tensors(parameters)
        return self._exported[1]

    def _manifest_of_cpu(self, parameters: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Parameters that the distributed optimizer keeps in a buffer of its own are copied over first; all others live there."""
        if self.shared is None:
            raise SyncError(
                explain("no parameters are shared", where=f"{self.group} rank {self.index}", do="load the role with share=True")
            )
        for key, parameter in parameters.items():
            if parameter.data_ptr() != self.shared.tensors[key].data_ptr():
                self.shared.tensors[key].copy_(parameter)
        return self.shared.manifest()

    def facts(self) -> dict[str, Any]:
        """Process id and memory."""
        return process_facts()

    def start_profile(self, window: Window) -> None:
        """Begin to record this process; methods that do the work of a step are phases."""
        self.profiler.start(window)

    def stop_profile(self) -> Recorded:
        """Write what was recorded."""
        return self.profiler.stop()

    # --- forward ---------------------------------------------------------------------------------------------------------------

    @phase("forward {}")
    @ray.method(num_returns=2)
    def forward(
        self, name: str, request: RowsRequest, temperature: float, renames: Mapping[str, str]
    ) -> tuple[dict[str, Ragged], dict[str, Any]]:
        """Run role ``name`` over the rows. Returns its outputs as columns (renamed by ``renames``), then how long it took.

        Every rank of the replica takes part; only the reporting one returns columns.
        """
        with timed() as record:
            columns = request.fetch()
            outputs = self.engines[name].forward(_cut(columns, request, ()), temperature=temperature, with_entropy="entropy" in renames)
            result = {}
            if self.rank.reports:
                counted = columns[CRITIC_PREDICTORS if CRITIC_PREDICTORS in columns else "responses"]
                result = {new: _column(old, outputs[old], counted) for old, new in renames.items()}
        return result, record

    # --- update ----------------------------------------------------------------------------------------------------------------

    @phase("update {}")
    def train(
        self, name: str, request: RowsRequest, loss: LossSpec, totals: MiniBatchTotals, lr: float, temperature: float
    ) -> dict[str, Any]:
        """One optimizer step of role ``name`` on this replica's part of a mini-batch."""
        with timed() as record:
            micro_batches = _cut(request.fetch(), request, loss.needs)
            step = self.engines[name].train_step(micro_batches, loss, totals, lr=lr, temperature=temperature)
            synchronize()  # the optimizer's kernels belong to this phase
        return {"sums": step.sums, "grad_norm": step.grad_norm, "applied": step.applied} | record

    # --- columns computed from columns -------------------------------------------------------------------------------------------

    @phase("retokenise")
    @ray.method(num_returns=2)
    def retokenise(self, request: RowsRequest, name: str) -> tuple[dict[str, Ragged], dict[str, Any]]:
        """The samples as role ``name`` reads them, and where in them it speaks of each response token; how many tokens each has [rows]."""
        with timed() as record:
            columns = request.fetch()
            tokens, predictors = self.retokenisers[name].samples(columns["prompts"], columns["responses"])
        return {CRITIC_TOKENS: tokens, CRITIC_PREDICTORS: predictors}, {"lengths": tokens.lengths} | record

    @phase("compare log-probs")
    @ray.method(num_returns=2)
    def compare_log_probs(self, request: RowsRequest) -> tuple[dict[str, Ragged], dict[str, Any]]:
        """How far the generation engine's log-probs of its tokens are from this side's; no column is produced."""
        rollout, trained = _tensors(request.fetch(), "rollout_log_probs", "log_probs")
        gap = (rollout.double() - trained.double()).abs()
        probability_gap = (rollout.double().exp() - trained.double().exp()).abs()
        return {}, {
            "max": float(gap.max()),
            "sum": float(gap.sum()),
            "prob_max": float(probability_gap.max()),
            "prob_sum": float(probability_gap.sum()),
            "count": gap.numel(),
        }

    @phase("kl penalty")
    @ray.method(num_returns=2)
    def apply_kl_penalty(
        self, request: RowsRequest, scores: np.ndarray, coef: float, estimator: str
    ) -> tuple[dict[str, Ragged], dict[str, Any]]:
        """Token rewards: the score on the last token minus ``coef`` x KL to the reference, where there is one. ``scores``: [rows]."""
        columns = request.fetch()
        log_probs = columns["log_probs"]
        columns.setdefault("ref_log_probs", log_probs)  # without a reference nothing is penalised
        rewards, kl = kl_penalised_rewards(
            torch.from_numpy(scores),
            *_tensors(columns, "log_probs", "ref_log_probs"),
            torch.from_numpy(log_probs.offsets),
            coef=coef,
            estimator=estimator,
        )
        info = {"kl_sum": float(kl.double().sum()), "tokens": len(log_probs.values), "samples": len(log_probs)}
        info |= _mean_min_max("rewards", torch.zeros(len(log_probs)).double().index_add(0, _owners(log_probs), rewards.double()))
        return {"token_rewards": Ragged(rewards.float().numpy(), log_probs.offsets)}, info

    @phase("advantages")
    @ray.method(num_returns=2)
    def compute_advantage(
        self, request: RowsRequest, scores: np.ndarray, groups: np.ndarray, truncated: np.ndarray, config: AlgorithmConfig
    ) -> tuple[dict[str, Ragged], dict[str, Any]]:
        """Advantages (not yet whitened) and, with a critic, returns; and what whitening and metrics need of them.

        ``scores``, ``groups`` and ``truncated``: [rows]. Where the estimator compares samples of a group, the rows hold whole groups.
        """
        columns = request.fetch()
        offsets = columns["token_rewards"].offsets
        (rewards,) = _tensors(columns, "token_rewards")
        values = _tensors(columns, "values")[0] if "values" in columns else None
        bootstrap = None
        if "last_values" in columns:  # a response that ended by itself has nothing after it
            bootstrap = torch.where(torch.from_numpy(truncated), _tensors(columns, "last_values")[0], 0.0)
        inputs = AdvantageInputs(rewards, torch.from_numpy(scores), torch.from_numpy(groups), torch.from_numpy(offsets), values, bootstrap)
        found = ADVANTAGE_ESTIMATORS[config.advantage_estimator](inputs, config)
        result = {"raw_advantages": Ragged(found.advantages.numpy(), offsets)}
        info: dict[str, Any] = {"moments": Moments.of(found.advantages)}
        if found.returns is not None and values is not None:
            result["returns"] = Ragged(found.returns.numpy(), offsets)
            residual = found.returns.double() - values.double()
            info |= {"returns": Moments.of(found.returns), "residual": Moments.of(residual)}
            info |= _mean_min_max("values", values) | _mean_min_max("return", found.returns)
        return result, info

    @phase("whiten")
    @ray.method(num_returns=2)
    def whiten(self, request: RowsRequest, moments: Moments | None) -> tuple[dict[str, Ragged], dict[str, Any]]:
        """``raw_advantages`` shifted and scaled by the moments of the whole step; as they are without moments."""
        raw = request.fetch()["raw_advantages"]
        (advantages,) = _tensors({"raw": raw}, "raw")
        if moments is not None:
            advantages = whiten(advantages, moments)
        return {"advantages": Ragged(advantages.float().numpy(), raw.offsets)}, _mean_min_max("advantages", advantages)

    # --- disk ------------------------------------------------------------------------------------------------------------------

    def save(self, name: str, directory: str) -> dict[str, float]:
        """Write role ``name`` as a distributed checkpoint into an existing, empty directory. Collective."""
        with timed() as record:
            checkpoint.save_engine(self.engines[name], Path(directory))
        return record

    def restore(self, name: str, directory: str) -> dict[str, float]:
        """Load role ``name`` from a distributed checkpoint. Collective."""
        with timed() as record:
            checkpoint.load_engine(self.engines[name], Path(directory))
        return record

    def begin_export(self, name: str, directory: str) -> None:
        """On rank 0: lay out the files of a Hugging Face directory, into which every rank then writes its own part."""
        engine = self.engines[name]
        shutil.rmtree(directory, ignore_errors=True)  # what an interrupted export left
        dtype = next(iter(engine.named_parameters().values())).dtype
        HfExport.create(Path(directory), engine.hf_config, dtype, self.layout, head=engine.role.head)

    def write_export(self, name: str, directory: str) -> None:
        """Write what this rank owns of role ``name`` into the files."""
        engine = self.engines[name]
        HfExport.open(Path(directory)).write(engine.named_parameters(), engine.shards, self.rank)

    def finish_export(self, directory: str, target: str, tokenizer_dir: str) -> None:
        """On rank 0: add configuration and tokenizer, and give the directory its name; an older export of that name goes."""
        old = Path(f"{target}.old")
        shutil.rmtree(old, ignore_errors=True)
        if Path(target).exists():
            Path(target).rename(old)
        HfExport.open(Path(directory)).finish(Path(target), Path(tokenizer_dir))
        shutil.rmtree(old, ignore_errors=True)


def _column(name: str, parts: list[np.ndarray], counted: Ragged) -> Ragged:
    """An engine's output over all micro-batches: one number a response token, as ``counted`` has them, or one a sample."""
    offsets = np.arange(len(counted) + 1) if name == "last_values" else counted.offsets
    return Ragged(np.concatenate(parts), offsets)


def _cut(columns: dict[str, Ragged], request: RowsRequest, needs: Sequence[str]) -> list[MicroBatch]:
    """Cut columns in request order into micro-batches."""
    batches, start = [], 0
    for rows in request.micro_batches:
        at = range(start, start + len(rows))
        needed = {name: columns[name].take(at) for name in needs}
        if CRITIC_TOKENS in columns:
            nothing = Ragged.from_list([[]] * len(rows), np.int32)
            batches.append(MicroBatch(columns[CRITIC_TOKENS].take(at), nothing, needed, columns[CRITIC_PREDICTORS].take(at)))
        else:
            batches.append(MicroBatch(columns["prompts"].take(at), columns["responses"].take(at), needed))
        start += len(rows)
    return batches


def _tensors(columns: dict[str, Ragged], *names: str) -> list[torch.Tensor]:
    return [torch.from_numpy(np.array(columns[n].values)) for n in names]


def _owners(column: Ragged) -> torch.Tensor:
    """[N]: which row each token belongs to."""
    return torch.from_numpy(np.repeat(np.arange(len(column)), column.lengths))


def _mean_min_max(name: str, x: torch.Tensor) -> dict[str, Any]:
    x = x.double()
    return {f"{name}/sum": float(x.sum()), f"{name}/count": x.numel(), f"{name}/min": float(x.min()), f"{name}/max": float(x.max())}
