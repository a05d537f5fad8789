"""A worker group of Megatron ranks, as the controller sees it: explicit methods, DataProto in, DataProto out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.util.placement_group import PlacementGroup

from megarl.algo.moments import Moments
from megarl.cluster.calls import Call, Pending, RayHandle, names_of, start_call
from megarl.cluster.placement import Slots, reserve, spawn
from megarl.cluster.train_worker import RowsRequest, TrainWorker
from megarl.config.schema import AlgorithmConfig
from megarl.data.packing import cut_for_replicas
from megarl.data.proto import DataProto, Piece
from megarl.data.retokenise import CRITIC_LENGTHS, CRITIC_PREDICTORS, CRITIC_TOKENS
from megarl.errors import ConfigError, DataError, DivergedError, explain
from megarl.megatron.layers import layer_spec
from megarl.megatron.losses import LossSpec, MiniBatchTotals
from megarl.megatron.model import Role
from megarl.megatron.optimizer import OptimizerSettings
from megarl.types import Layout, LocalHandle, Rank
from megarl.weights.families import model_family, read_hf_config
from megarl.weights.plan import RankShard


@dataclass(frozen=True)
class GroupSettings:
    """How one group is placed and how it batches."""

    name: str
    layout: Layout
    max_tokens_per_micro_batch: Mapping[str, int]  # role -> packed tokens of one forward pass
    cpus_per_process: float
    gpus_per_process: float
    log_dir: str
    start_deadline_s: float
    call_deadline_s: float
    save_deadline_s: float
    seed: int
    plugins: tuple[str, ...] = ()


@dataclass(frozen=True)
class UpdateResult:
    """One optimizer step of the group."""

    sums: dict[str, float]
    grad_norm: float
    seconds: float


class TrainGroup:
    """Processes that hold one or more models in one Megatron layout."""

    def __init__(self, settings: GroupSettings, placement: PlacementGroup | None = None):
        """Start the processes, in ``placement`` or in slots of their own."""
        self.settings, self.layout = settings, settings.layout
        self.names = names_of(settings.name, self.layout.world_size)
        self._ranks: list[dict[str, Any]] = []  # what each said when it joined
        self._readers: dict[str, int] = {}  # roles that read the text of the samples, and the positions of their models
        slots = self.slots(settings)
        placement = placement or reserve(slots, settings.start_deadline_s)
        # Longer than any deadline of ours, so that the controller names who is silent before the ranks accuse each other.
        collective_s = 2 * max(settings.call_deadline_s, settings.save_deadline_s)
        args = (self.layout, settings.log_dir, collective_s, settings.seed, settings.plugins)
        self.workers = [spawn(TrainWorker, slots, placement, r, settings.name, r, *args) for r in range(self.layout.world_size)]

    @staticmethod
    def slots(settings: GroupSettings) -> Slots:
        """What the group will ask of the cluster."""
        return Slots(settings.name, settings.layout.world_size, settings.cpus_per_process, settings.gpus_per_process)

    # --- start -----------------------------------------------------------------------------------------------------------------

    def start(self) -> Pending[list[dict[str, Any]]]:
        """Let the processes find each other; the result is one record a rank (pid, memory, warning, device)."""
        deadline = self.settings.start_deadline_s
        address = start_call("start", self.names[:1], [self.workers[0].open_store.remote()], deadline).wait()[0]

        def finish(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
            self._ranks = ranks
            return ranks

        return Pending(self._call("start", [w.join.remote(*address) for w in self.workers], deadline), finish)

    def load(
        self,
        name: str,
        directory: str,
        role: Role,
        optimizer: OptimizerSettings | None = None,
        *,
        share: bool = False,
        text_of: str | None = None,
    ) -> Pending[list[dict[str, Any]]]:
        """Build role ``name`` from a Hugging Face directory on every rank.

        ``text_of``: the samples are tokens of the tokenizer in that directory, and the role reads their text with its own.
        """
        if text_of is not None:
            self._readers[name] = int(read_hf_config(directory)["max_position_embeddings"])
        refs = [w.load.remote(name, directory, role, optimizer, share, text_of) for w in self.workers]
        return Pending(self._call(f"load {name}", refs, self.settings.start_deadline_s), list)

    def rank_shards(self, hf_config: dict[str, Any], dtype: str) -> list[RankShard]:
        """Which slices of a model of ``dtype`` each rank holds, for the reshard plan: replicas too, one of which may be the nearest."""
        family = model_family(hf_config)
        shards = []
        for rank, said in enumerate(self._ranks):
            spec = layer_spec(dtype, said["transformer_engine"])
            shards.append(RankShard(rank, said["device"], family.shard(hf_config, Rank(rank, self.layout), spec=spec)))
        return shards

    def manifests(self, name: str) -> dict[int, dict[str, Any]]:
        """Rank -> where its parameters lie, for an engine to open. Ranks give memory that they don't use back to the device."""
        found = self._call("share weights", [w.manifest.remote(name) for w in self.workers]).wait()
        return dict(enumerate(found))

    def facts(self) -> dict[str, dict[str, Any]]:
        """Worker name -> process id and memory."""
        return dict(zip(self.names, self._call("facts", [w.facts.remote() for w in self.workers]).wait(), strict=True))

    # --- columns ---------------------------------------------------------------------------------------------------------------

    def forward(
        self, name: str, batch: DataProto, renames: dict[str, str], *, temperature: float = 1.0, phase: str
    ) -> Pending[tuple[DataProto, float]]:
        """Run role ``name`` over the batch; the result has the renamed outputs as columns, and says how many seconds it took."""
        batch, _ = self.as_read(name, batch)
        requests = self._requests(name, batch, (), range(len(batch)))
        pairs = [w.forward.remote(name, requests[self._data(r)], temperature, renames) for r, w in enumerate(self.workers)]
        call = self._call(phase, [info for _, info in pairs])
        pieces = [Piece(requests[self._data(r)].rows, RayHandle(pairs[r][0])) for r in self._reporters()]

        def finish(infos: list[dict[str, Any]]) -> tuple[DataProto, float]:
            out = batch
            for new in renames.values():
                out = out.with_column(new, pieces)
            return out, max(i["seconds"] for i in infos)

        return Pending(call, finish)

    def as_read(self, name: str, batch: DataProto) -> tuple[DataProto, float]:
        """The batch with the tokens that role ``name`` reads, and how many seconds they took. Waits for them; where the role reads the
        tokens that were drawn, or the batch has its own already, there is nothing to do.

        Raises DataError for a sample of more tokens than its model has positions, ConfigError for one beyond its token budget.
        """
        if name not in self._readers or CRITIC_TOKENS in batch.column_names:
            return batch, 0.0
        columns = (CRITIC_TOKENS, CRITIC_PREDICTORS)
        phase = f"tokens of {name}"
        batch, infos = self.map_columns("retokenise", batch, ("prompts", "responses"), columns, lambda rows: (name,), phase=phase).result()
        lengths = np.concatenate([info["lengths"] for info in infos])
        self._check_lengths(name, lengths)
        piece = Piece(tuple(range(len(batch))), LocalHandle({CRITIC_LENGTHS: lengths}))
        return batch.with_column(CRITIC_LENGTHS, [piece]), max(info["seconds"] for info in infos)

    def _check_lengths(self, name: str, lengths: np.ndarray) -> None:
        longest, shorten = int(lengths.argmax()), "lower data.max_prompt_tokens or rollout.max_response_tokens"
        got = f"sample {longest} has {lengths[longest]} tokens of the {name}'s tokenizer"
        positions, budget = self._readers[name], self.settings.max_tokens_per_micro_batch[name]
        if lengths[longest] > positions:
            expected = f"at most {positions} (max_position_embeddings)"
            do = f"{shorten}, or use a model of longer context"
            raise DataError(
                explain(f"a sample doesn't fit into the {name}'s positions", where=f"{name}.model", got=got, expected=expected, do=do)
            )
        if lengths[longest] > budget:
            do = f"raise it to {lengths[longest]} or more, or {shorten}"
            where, expected = f"{name}.max_tokens_per_micro_batch", f"at most {budget}"
            raise ConfigError(explain("one sample is longer than a micro-batch may be", where=where, got=got, expected=expected, do=do))

    def map_columns(
        self,
        method: str,
        batch: DataProto,
        needs: tuple[str, ...],
        produces: tuple[str, ...],
        arguments: Any,
        *,
        phase: str,
        whole: bool = False,
    ) -> Pending[tuple[DataProto, list[dict[str, Any]]]]:
        """Compute columns from columns on the reporting rank of each replica; ``arguments(rows)`` gives what the method takes besides.

        ``whole``: on one rank, which sees all rows.
        """
        reporters = self._reporters()[: 1 if whole else len(batch)]
        chosen = self._whole_rows(batch, needs, len(reporters))
        pairs = [getattr(self.workers[r], method).remote(q, *arguments(q.rows)) for r, q in zip(reporters, chosen, strict=True)]
        call = Call(phase, tuple(self.names[r] for r in reporters), tuple(info for _, info in pairs), self.settings.call_deadline_s)
        pieces = [Piece(q.rows, RayHandle(columns)) for q, (columns, _) in zip(chosen, pairs, strict=True)]

        def finish(infos: list[dict[str, Any]]) -> tuple[DataProto, list[dict[str, Any]]]:
            out = batch
            for new in produces:
                out = out.with_column(new, pieces)
            return out, infos

        return Pending(call, finish)

    def compare_log_probs(self, batch: DataProto) -> Pending[list[dict[str, Any]]]:
        """How far rollout_log_probs are from log_probs; one record a replica."""
        pending = self.map_columns(
            "compare_log_probs", batch, ("rollout_log_probs", "log_probs"), (), lambda rows: (), phase="compare log-probs"
        )
        return Pending(pending.call, list)

    def apply_kl_penalty(
        self, batch: DataProto, scores: np.ndarray, *, coef: float, estimator: str
    ) -> Pending[tuple[DataProto, list[dict[str, Any]]]]:
        """Add ``token_rewards``. ``scores``: [B]."""
        return self.map_columns(
            "apply_kl_penalty",
            batch,
            tuple(n for n in ("log_probs", "ref_log_probs") if n in batch.column_names),
            ("token_rewards",),
            lambda rows: (scores[list(rows)], coef, estimator),
            phase="kl penalty",
        )

    def compute_advantage(
        self, batch: DataProto, scores: np.ndarray, config: AlgorithmConfig
    ) -> Pending[tuple[DataProto, list[dict[str, Any]]]]:
        """Add ``raw_advantages`` and, where the batch has ``values``, ``returns``. ``scores``: [B]."""
        with_values = "values" in batch.column_names
        groups, truncated = batch.info.group, batch.info.truncated
        return self.map_columns(
            "compute_advantage",
            batch,
            ("token_rewards", "values", "last_values") if with_values else ("token_rewards",),
            ("raw_advantages", "returns") if with_values else ("raw_advantages",),
            lambda rows: (scores[list(rows)], groups[list(rows)], truncated[list(rows)], config),
            phase="advantages",
            whole=not with_values,  # estimators without a critic compare the samples of a group, which must not be torn apart
        )

    def whiten(self, batch: DataProto, moments: Moments | None) -> Pending[tuple[DataProto, list[dict[str, Any]]]]:
        """Add ``advantages`` from ``raw_advantages``."""
        return self.map_columns("whiten", batch, ("raw_advantages",), ("advantages",), lambda rows: (moments,), phase="advantages")

    # --- update ----------------------------------------------------------------------------------------------------------------

    def train_step(
        self, name: str, batch: DataProto, rows: Sequence[int], loss: LossSpec, *, lr: float, temperature: float = 1.0, phase: str
    ) -> Pending[UpdateResult]:
        """One optimizer step of role ``name`` on the samples ``rows``.

        The result raises DivergedError where a loss or gradient was not finite; nothing was changed then.
        """
        totals = MiniBatchTotals(tokens=int(batch.info.response_length[list(rows)].sum()), samples=len(rows))
        batch, _ = self.as_read(name, batch)
        requests = self._requests(name, batch, loss.needs, rows)
        refs = [w.train.remote(name, requests[self._data(r)], loss, totals, lr, temperature) for r, w in enumerate(self.workers)]

        def finish(results: list[dict[str, Any]]) -> UpdateResult:
            first = results[0]
            if not first["applied"]:
                raise DivergedError(
                    explain(
                        f"a loss or gradient of {name} is not finite; the step was not applied",
                        where=phase,
                        got=first["sums"] | {"grad_norm": first["grad_norm"]},
                        expected="finite numbers",
                    )
                )
            return UpdateResult(first["sums"], first["grad_norm"], max(r["seconds"] for r in results))

        return Pending(self._call(phase, refs), finish)

    # --- disk ------------------------------------------------------------------------------------------------------------------

    def save(self, name: str, directory: str) -> Pending[list[dict[str, float]]]:
        """Write role ``name`` as a distributed checkpoint."""
        return Pending(
            self._call(f"save {name}", [w.save.remote(name, directory) for w in self.workers], self.settings.save_deadline_s), list
        )

    def restore(self, name: str, directory: str) -> Pending[list[dict[str, float]]]:
        """Load role ``name`` from a distributed checkpoint."""
        return Pending(
            self._call(f"restore {name}", [w.restore.remote(name, directory) for w in self.workers], self.settings.save_deadline_s), list
        )

    def export(self, name: str, work_dir: str, target: str, tokenizer_dir: str) -> None:
        """Write role ``name`` as a Hugging Face directory ``target``; every rank writes its own slices, nothing is gathered."""
        deadline = self.settings.save_deadline_s
        first = self.names[:1]
        start_call("export", first, [self.workers[0].begin_export.remote(name, work_dir)], deadline).wait()
        self._call("export", [w.write_export.remote(name, work_dir) for w in self.workers], deadline).wait()
        start_call("export", first, [self.workers[0].finish_export.remote(work_dir, target, tokenizer_dir)], deadline).wait()

    def stop(self) -> None:
        """End the processes."""
        for worker in self.workers:
            ray.kill(worker)

    # --- inside ----------------------------------------------------------------------------------------------------------------

    def _call(self, phase: str, refs: list[Any], deadline_s: float | None = None) -> Call:
        return start_call(phase, self.names, refs, deadline_s or self.settings.call_deadline_s)

    def _data(self, rank: int) -> int:
        return Rank(rank, self.layout).data

    def _reporters(self) -> list[int]:
        """Ranks that return columns, one a replica, in order of the replicas."""
        ranks = [Rank(index, self.layout) for index in range(self.layout.world_size)]
        return [rank.index for rank in sorted(ranks, key=lambda rank: rank.data) if rank.reports]

    def _requests(self, role: str, batch: DataProto, needs: Sequence[str], rows: Sequence[int]) -> list[RowsRequest]:
        """One request a replica for the tokens that the role reads and ``needs``: rows balanced by tokens, cut into equal numbers of
        micro-batches.
        """
        rows = list(rows)
        if role in self._readers:
            columns, lengths = (CRITIC_TOKENS, CRITIC_PREDICTORS, *needs), batch.to_local(CRITIC_LENGTHS)[CRITIC_LENGTHS][rows]
        else:
            columns, lengths = ("prompts", "responses", *needs), (batch.info.prompt_length + batch.info.response_length)[rows]
        multiple = self.layout.pipeline if self.layout.virtual_pipeline > 1 else 1
        cuts = cut_for_replicas(lengths, self.layout.data, self.settings.max_tokens_per_micro_batch[role], multiple=multiple)
        pieces = {name: tuple(batch.pieces(name)) for name in columns}
        return [RowsRequest(pieces, tuple(tuple(rows[i] for i in group) for group in cut)) for cut in cuts]

    def _whole_rows(self, batch: DataProto, columns: tuple[str, ...], parts: int) -> list[RowsRequest]:
        """The batch in ``parts`` runs of rows, for work that no model takes part in."""
        pieces = {name: tuple(batch.pieces(name)) for name in columns}
        return [RowsRequest(pieces, (tuple(part.tolist()),)) for part in np.array_split(np.arange(len(batch)), parts)]
