"""The only definition of every configuration key: name, type, default, unit and one line of doc.

The comment behind a field is its documentation (``megarl config help KEY`` prints it). Sizes carry their unit in the name.
All classes are frozen once loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

REQUIRED = "???"  # OmegaConf's mark of a value that must be given


@dataclass(frozen=True)
class RunConfig:
    dir: str = REQUIRED  # run directory; created; refused when it holds something that is no run of megarl
    name: str = "run"  # shown in logs and in the report
    seed: int = 0  # decides data order and sampling
    total_steps: int = REQUIRED  # PPO steps of the whole run, counted from 1
    save_every_steps: int = 0  # checkpoint period; 0: only after the last step; -1: never (measurements)
    keep_checkpoints: int = 2  # newest complete checkpoints to keep
    eval_every_steps: int = 0  # held-out evaluation period; 0: only before the first and after the last step
    export_hf: bool = True  # write the final actor as a Hugging Face directory
    log_rollouts: int = 16  # sample rollouts kept per step, for the report
    sinks: tuple[str, ...] = ()  # where metrics go besides metrics.jsonl: tensorboard | wandb
    wandb_project: str = "megarl"  # project of the sink wandb; its mode and account are WANDB_MODE's and its kin


@dataclass(frozen=True)
class DataConfig:
    train_files: tuple[str, ...] = REQUIRED  # parquet files in verl's schema
    val_files: tuple[str, ...] = ()  # held-out parquet files; empty: no evaluation
    val_prompts: int = 256  # held-out prompts per evaluation (the first so many rows)
    prompt_key: str = "prompt"  # column of messages, each {role, content}
    max_prompt_tokens: int = REQUIRED  # after the chat template
    truncation: str = "error"  # overlong prompt: error | left | right | drop
    shuffle: bool = True  # a new order each epoch, decided by run.seed and the epoch


@dataclass(frozen=True)
class LayoutConfig:
    tensor: int = 1  # tensor-parallel ranks
    pipeline: int = 1  # pipeline stages
    virtual_pipeline: int = 1  # model chunks per pipeline rank
    context: int = 1  # context-parallel ranks
    expert: int = 1  # expert-parallel ranks
    expert_tensor: int = 1  # tensor-parallel ranks inside experts
    data: int = 1  # data-parallel replicas
    sequence_parallel: bool = False  # shard activations between tensor-parallel regions


@dataclass(frozen=True)
class OptimConfig:
    lr: float = 1e-6  # learning rate
    lr_warmup_steps: int = 0  # PPO steps over which the learning rate rises linearly to lr
    schedule: str = "constant"  # after the warm-up: constant | linear | cosine
    schedule_steps: int = 0  # PPO step at which a linear or cosine schedule has reached lr_min
    lr_min: float = 0.0  # learning rate at the end of a linear or cosine schedule
    betas: tuple[float, float] = (0.9, 0.95)  # Adam's decay rates
    eps: float = 1e-8  # Adam's epsilon
    weight_decay: float = 0.0  # decoupled weight decay
    clip_grad: float = 1.0  # global gradient norm; 0: no clipping
    distributed: bool = False  # shard the optimizer over data-parallel ranks


@dataclass(frozen=True)
class ActorConfig:
    layout: LayoutConfig = field(default_factory=LayoutConfig)  # Megatron layout of actor and reference
    optim: OptimConfig = field(default_factory=OptimConfig)  # actor optimizer
    samples_per_mini_batch: int = REQUIRED  # samples of one optimizer step, over all data-parallel ranks
    epochs_per_step: int = 1  # passes over the samples of one PPO step
    max_tokens_per_micro_batch: int = 16384  # packed tokens of one forward pass on one data-parallel rank
    policy_loss: str = "ppo_clip"  # a registered policy loss
    clip_ratio_low: float = 0.2  # PPO clip below 1
    clip_ratio_high: float = 0.2  # PPO clip above 1
    clip_ratio_dual: float = 3.0  # dual clip for negative advantages (arXiv:1912.09729); 0: off
    entropy_coef: float = 0.0  # weight of the entropy bonus
    loss_aggregation: str = "token-mean"  # token-mean | seq-mean-token-mean | seq-mean-token-sum
    dtype: str = "float32"  # parameters and activations: float32 | bfloat16


@dataclass(frozen=True)
class CriticConfig:
    layout: LayoutConfig = field(default_factory=LayoutConfig)  # Megatron layout of the critic
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))  # critic optimizer
    model: str | None = None  # Hugging Face directory; null: the actor's initial model
    retokenize: bool = False  # critic of another vocabulary: it reads the decoded text with its own tokenizer
    samples_per_mini_batch: int = REQUIRED  # samples of one optimizer step, over all data-parallel ranks
    epochs_per_step: int = 1  # passes over the samples of one PPO step
    max_tokens_per_micro_batch: int = 16384  # packed tokens of one forward pass on one data-parallel rank
    value_clip: float = 0.2  # PPO value clip; 0: off
    dtype: str = "float32"  # parameters and activations: float32 | bfloat16


@dataclass(frozen=True)
class RolloutConfig:
    engines: int = 1  # vLLM engines, each its own process group
    tensor_parallel: int = 1  # tensor-parallel ranks of one engine
    prompts_per_step: int = REQUIRED  # prompts drawn from the data per PPO step
    responses_per_prompt: int = 1  # responses per prompt; samples = prompts x responses
    temperature: float = 1.0  # of sampling and of every re-score: log-probs of both sides are those at this temperature
    top_p: float = 1.0  # nucleus; below 1 only the engine's own log-probs are of the cut distribution; training re-scores with the full one
    top_k: int = -1  # draw from so many likeliest tokens, -1: all; log-probs as for top_p
    max_response_tokens: int = REQUIRED  # responses end here at the latest
    stop_token_ids: tuple[int, ...] = ()  # ids that end a response, besides the model's end-of-sequence; part of it and of the loss
    stop_tokens: tuple[str, ...] = ()  # texts that end a response as stop_token_ids do; each must be exactly one token of the tokenizer
    ignore_eos: bool = False  # no token ends a response: all have max_response_tokens (measurements)
    kv_cache_mib: int = 0  # key/value cache of one engine rank, MiB; 0: max_concurrent_samples of full length fit
    max_concurrent_samples: int = 256  # samples in flight in one engine
    dtype: str = "float32"  # float32 | bfloat16
    check_sync_every: int = 0  # compare a checksum of every slice at each so-many-th sync; the first is always checked


@dataclass(frozen=True)
class KlConfig:
    where: str = "reward"  # reward: penalty in the token rewards | none
    estimator: str = "k1"  # k1 | k2 | k3 | abs (http://joschu.net/blog/kl-approx.html)
    coef: float = 0.001  # initial coefficient
    controller: str = "adaptive"  # adaptive (arXiv:1909.08593) | fixed
    target: float = 0.1  # adaptive: KL per token aimed at, nats
    horizon: int = 10000  # adaptive: samples over which the coefficient follows


@dataclass(frozen=True)
class AlgorithmConfig:
    advantage_estimator: str = "gae"  # gae | grpo
    gamma: float = 1.0  # discount per token
    lam: float = 1.0  # GAE lambda
    whiten_advantages: bool = True  # mean 0, variance 1 over all tokens of the step (gae)
    norm_by_std: bool = True  # grpo: divide by the group's standard deviation
    bootstrap_truncated: bool = False  # gae: a response cut by the length limit continues with its last value
    critic_warmup_steps: int = 0  # steps in which only the critic learns
    kl: KlConfig = field(default_factory=KlConfig)  # KL to the reference


@dataclass(frozen=True)
class RewardConfig:
    path: str = REQUIRED  # Python file of the reward function
    name: str = "compute_score"  # function in it: (data_source, solution_str, ground_truth, extra_info)
    timeout_s: float = 10.0  # wall clock of one call; the process is killed after it
    workers: int = 1  # reward processes
    on_failure: str = "drop_group"  # a failed call: drop_group | zero | abort
    max_failed_share: float = 0.05  # the run stops when more of a step's calls fail


@dataclass(frozen=True)
class WarmStartConfig:
    enabled: bool = False  # supervised steps before PPO
    train_files: tuple[str, ...] = ()  # parquet in verl's schema; the answer is reward_model.ground_truth
    samples_per_step: int = 128  # samples of one optimizer step
    max_steps: int = 1000  # give up after so many steps
    eval_every_steps: int = 5  # sampled reward measured so often near the stopping range, five times as rarely far below it
    lr: float = 1e-3  # learning rate of the warm start; a quarter of it near the stopping range
    stop_reward_min: float = 0.35  # stop at the first measured mean reward in [min, max]
    stop_reward_max: float = 0.45  # above it: an error, so that PPO always starts where the recipe says


@dataclass(frozen=True)
class ClusterConfig:
    address: str | None = None  # a running Ray cluster ("auto" or host:port); null: start one here
    placement: str = "separate"  # separate: each group has its own devices | colocated: actor, critic and engines share them
    cpu_share_per_process: float = 0.25  # share of a core that each worker process takes in the placement
    start_deadline_s: float = 300.0  # all processes must be ready within it
    call_deadline_s: float = 600.0  # any remote call
    save_deadline_s: float = 600.0  # any checkpoint save


@dataclass(frozen=True)
class ProfileConfig:
    steps: tuple[int, ...] = ()  # PPO steps of which traces are written to RUN/profile/step_N; empty: none
    groups: tuple[str, ...] = ("actor", "critic", "rollout")  # worker groups whose processes are traced
    ranks: tuple[int, ...] = ()  # ranks of each group (of rollout: engines); empty: the first that returns results
    with_stack: bool = False  # Python call stacks too; several times the size and the time
    memory: bool = False  # GPU: a snapshot for pytorch.org/memory_viz; CPU: the process's resident memory (RSS) around each phase


@dataclass(frozen=True)
class Config:
    model: str = REQUIRED  # Hugging Face directory of the actor (and of reference and critic, unless they name another)
    reference: str | None = None  # Hugging Face directory of the reference; null: the actor's initial model
    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    plugins: tuple[str, ...] = ()  # modules imported at start; they register estimators and losses
