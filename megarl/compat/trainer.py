"""``RayPPOTrainer``: configuration, worker groups and data of a loop that the user writes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import ray

from megarl.cluster.placement import start_cluster
from megarl.cluster.worker import import_plugins
from megarl.compat.batch import Life, TrainDataloader
from megarl.compat.checks import check_devices, check_reference_vocabulary, check_roles, check_tokenizer
from megarl.compat.groups import ActorRolloutGroup, CriticGroup, RefPolicyGroup
from megarl.compat.pools import RayResourcePool
from megarl.compat.samples import prepare_samples
from megarl.compat.settings import Roles, trainer_settings, with_reference_layout
from megarl.compat.sources import is_files
from megarl.config.absolute import with_absolute_paths
from megarl.controller.context import Context, Groups, RunPaths
from megarl.controller.evaluate import Evaluation, evaluate
from megarl.controller.prepare import Prepared, check_models, prepare
from megarl.controller.roles import load_roles, start_groups
from megarl.controller.run import check_nodes_for, new_context
from megarl.controller.run_directory import check_run_directory, claimed
from megarl.errors import ConfigError, DataError, explain

Reward = str | Path | Callable[..., Any]


class RayPPOTrainer:
    """The parts of a PPO step, for a loop by hand. Use it as a context manager, or call :meth:`close`.

    The constructor checks everything that can be known without a worker, and starts none.

    Args:
        actor_rollout_config: ``model_name_or_path`` (a Hugging Face directory), keys of ``actor`` as in a recipe, and ``rollout``.
        critic_config: ``model_name_or_path`` (left out: the actor's) and keys of ``critic``; None for estimators without a critic.
        ref_policy_config: ``model_name_or_path`` (left out: the actor's) and ``layout``; None: no reference and no KL.
        actor_rollout_resource_pool, critic_resource_pool, ref_policy_resource_pool: processes of each role: data-parallel replicas
            unless the role's ``layout`` says otherwise. The reference may be given the actor's pool, and then lives in its processes;
            so may the critic, and then engines, actor and critic share devices (cluster.placement: colocated).
        train_dataset: an RLHFDataset (or any samples of its kind by index) or parquet files.
        val_dataset: held-out prompts, for :meth:`evaluate`.
        reward_fn: "file.py", "file.py:name" or a function of a module, as ``reward.path`` and ``reward.name``; None: samples are scored
            by hand (``TrainerBatch.with_scores``).
        overrides: further keys, as on the command line of ``megarl train``: ["run.seed=1", "algorithm.lam=0.9"].
        run_dir: logs, prepared data and sample rollouts; None: a temporary directory, removed by a close without an error.
        say: what is told of batch sizes and data goes here.

    Raises:
        ConfigError, ModelError, DataError: the first thing that is wrong.
    """

    def __init__(
        self,
        actor_rollout_config: Mapping[str, Any],
        critic_config: Mapping[str, Any] | None = None,
        ref_policy_config: Mapping[str, Any] | None = None,
        *,
        actor_rollout_resource_pool: RayResourcePool,
        critic_resource_pool: RayResourcePool | None = None,
        ref_policy_resource_pool: RayResourcePool | None = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        reward_fn: Reward | None = None,
        overrides: Sequence[str] = (),
        run_dir: str | Path | None = None,
        say: Callable[[str], None] = print,
    ):
        pools = (actor_rollout_resource_pool, critic_resource_pool, ref_policy_resource_pool)
        self._roles = Roles(actor_rollout_config, critic_config, ref_policy_config, *pools)
        self._run: Context | None = None
        self._life = Life()
        self._scored = reward_fn is not None
        self._say = say
        self._temporary = Path(tempfile.mkdtemp(prefix="megarl-")) if run_dir is None else None
        with ExitStack() as undo:
            undo.callback(self._remove_temporary)
            directory = (self._temporary or Path(str(run_dir))).resolve()
            settings = trainer_settings(self._roles, train_dataset, val_dataset, reward_fn, overrides, directory)
            self.config, self._reference_layout = settings.config, settings.reference_layout
            self.paths = RunPaths(Path(self.config.run.dir).resolve())
            self._prepared = self._prepare(train_dataset, val_dataset, undo)
            for note in (*settings.notes, *(self._prepared.notes if self._prepared else ())):
                say(note)
            self._leave = undo.pop_all()  # the lock, and the temporary directory

    def _prepare(self, train: Any, val: Any, undo: ExitStack) -> Prepared | None:
        """Check models, reward function and data, and tokenise the prompts. Without data there is nothing to prepare."""
        config = self.config
        import_plugins(config.plugins)
        check_roles(config, self._roles)
        check_reference_vocabulary(config)
        if self._reference_layout is not None:
            check_models(with_reference_layout(config, self._reference_layout))
        if train is None:
            check_models(config)
            return None
        for where, dataset in (("train_dataset", train), ("val_dataset", val)):
            check_tokenizer(dataset, config.model, where)
        check_run_directory(config, self.paths)  # before the lock puts a file into it
        undo.enter_context(claimed(self.paths.root))
        return prepare(config, self.paths) if is_files(train) else prepare_samples(config, self.paths, train, val)

    # --- start and end -----------------------------------------------------------------------------------------------------------

    def init_worker_groups(self) -> None:
        """Start every process and load every model. A failure stops what was started; the call may then be repeated.

        It uses the Ray cluster that this process has joined (``ray.init``), or else starts one as ``cluster.address`` says.

        Raises:
            ConfigError: called twice, or after close; PlacementError: too few slots.
            DataError: the trainer has no dataset.
        """
        if self._run is not None or self._life.closed:
            got = "called a second time" if self._run else "the trainer is closed"
            raise ConfigError(explain("worker groups start once", where="init_worker_groups", got=got, do="make another RayPPOTrainer"))
        if self._prepared is None:
            do = "pass train_dataset=RLHFDataset(...), or the path of a parquet file, to RayPPOTrainer"
            raise DataError(explain("the trainer has no prompts to draw from", where="init_worker_groups", got="train_dataset=None", do=do))
        with ExitStack() as undo:
            config, own_cluster = with_absolute_paths(self.config), False
            if not ray.is_initialized():
                undo.callback(start_cluster(config.cluster.address))
                own_cluster = config.cluster.address is None
            differences = [] if own_cluster else check_nodes_for(config, self.paths)
            check_devices(self._roles.pools)
            groups, facts = start_groups(config, self.paths, reference=self._reference_layout, with_rewards=self._scored)
            undo.callback(_stop, groups)
            for warning in [*differences, *facts["warnings"]]:
                self._say(f"warning: {warning}")
            run = new_context(config, self.paths, groups, self._prepared)
            load_roles(groups, config, config.model)
            run.version += 1
            self._run = run
            self._leave.push(undo.pop_all())

    def close(self) -> None:
        """End all processes, and the Ray cluster if the trainer started it. Columns of its batches are gone then."""
        self.__exit__(None, None, None)

    def __enter__(self) -> RayPPOTrainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._life.closed, self._run = True, None
        if error is not None and self._temporary is not None and any(self.paths.logs.glob("*")):
            self._say(f"what the workers said is kept in {self._temporary}")
            self._temporary = None
        self._leave.close()

    def _remove_temporary(self) -> None:
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    # --- parts -------------------------------------------------------------------------------------------------------------------

    @property
    def run_dir(self) -> Path:
        """Where logs and sample rollouts are."""
        return self.paths.root

    @property
    def train_dataloader(self) -> TrainDataloader:
        """The prompts of steps, ``rollout.prompts_per_step`` each."""
        return TrainDataloader(self._started())

    @property
    def actor_rollout_wg(self) -> ActorRolloutGroup:
        """generate_sequences, compute_log_prob, update_actor."""
        run = self._started()
        return ActorRolloutGroup(self.config, run.groups.actor, run, self._life)

    @property
    def critic_wg(self) -> CriticGroup:
        """compute_values, update_critic."""
        run = self._started()
        if run.groups.critic is None:
            raise self._absent("critic", "critic_config and critic_resource_pool")
        return CriticGroup(self.config, run.groups.critic, run)

    @property
    def ref_policy_wg(self) -> RefPolicyGroup:
        """compute_ref_log_prob."""
        run = self._started()
        if self.config.algorithm.kl.where == "none":
            raise self._absent("reference", "ref_policy_config and ref_policy_resource_pool")
        return RefPolicyGroup(self.config, run.groups.reference or run.groups.actor, run)

    def evaluate(self) -> Evaluation:
        """Mean reward on the first ``data.val_prompts`` held-out prompts, with the actor's weights as they are now."""
        run = self._started()
        held_out = self.paths.val_prompts.is_file()
        if not held_out or run.groups.rewards is None:
            missing = "reward_fn" if held_out else "val_dataset"
            raise DataError(
                explain("nothing to evaluate with", where="evaluate", got=f"{missing}=None", do=f"pass {missing} to RayPPOTrainer")
            )
        return evaluate(run)

    def export_hf(self, directory: str | Path) -> Path:
        """Write the actor as it is now as a Hugging Face directory, a new one. Raises ConfigError where something of that name exists."""
        target = Path(directory).resolve()
        if target.exists():
            raise ConfigError(explain("the directory to export into exists already", where="export_hf", got=target, do="name a new one"))
        target.parent.mkdir(parents=True, exist_ok=True)
        self._started().groups.actor.export("actor", f"{target}.writing", str(target), self.config.model)
        return target

    def _started(self) -> Context:
        if self._run is None:
            do = "make another RayPPOTrainer" if self._life.closed else "call trainer.init_worker_groups() first"
            got = "the trainer is closed" if self._life.closed else "no processes yet"
            raise ConfigError(explain("the worker groups don't run", where="RayPPOTrainer", got=got, do=do))
        return self._run

    def _absent(self, role: str, arguments: str) -> ConfigError:
        return ConfigError(explain(f"this trainer has no {role}", where="RayPPOTrainer", do=f"pass {arguments} to it"))


def _stop(groups: Groups) -> None:
    if ray.is_initialized():  # a user's ray.shutdown ended them already
        groups.stop()
