"""Every metric that a step can log: name -> one line with its unit. Names are verl's where verl has one.

docs/metrics.md is generated from this table: ``python -m megarl.observe.metric_names > docs/metrics.md``.
"""

from __future__ import annotations

_SPREAD = {"mean": "mean", "max": "largest", "min": "smallest"}

PHASES: dict[str, str] = {
    "step": "the whole step, evaluation and checkpoint left out",
    "sync_weights": "resharding the actor's weights into the generation engines",
    "gen": "generation",
    "sleep": "engines giving the devices back, where they share them with the trainers",
    "reward": "reward functions, from the first finished sample to the last score",
    "old_log_prob": "log-probs of the responses under the actor before its update",
    "ref": "log-probs under the reference",
    "values": "the critic's values before its update",
    "adv": "KL penalty, advantages and whitening",
    "update_critic": "the critic's optimizer steps",
    "update_actor": "the actor's optimizer steps",
    "save_checkpoint": "writing a checkpoint, in steps that write one",
    "testing": "held-out evaluation, in steps that evaluate",
    "controller": "the controller's own work: the step less all waiting for workers",
}

AFTER_THE_STEP = ("save_checkpoint", "testing")  # phases that timing_s/step does not contain


def _spread(name: str, of: str) -> dict[str, str]:
    return {f"{name}/{suffix}": f"{word} {of}" for suffix, word in _SPREAD.items()}


DOCUMENTED_METRICS: dict[str, str] = {
    "training/global_step": "PPO steps done, counted from 1",
    "training/epoch": "passes over the training prompts begun, counted from 0",
    "training/rollout_probs_diff_max": "largest difference of a token's probability between engine and actor",
    "training/rollout_probs_diff_mean": "mean difference of a token's probability between engine and actor",
    "training/rollout_logprobs_diff_max": "largest gap of a token's log-prob between engine and actor, nats (top_p and top_k widen it)",
    "training/rollout_logprobs_diff_mean": "mean absolute gap of the same, nats",
    "actor/entropy": "mean entropy of the next-token distribution over response tokens, nats",
    "actor/pg_loss": "policy loss, mean over the step's optimizer steps",
    "actor/pg_clipfrac": "share of response tokens whose ratio the PPO clip bounds",
    "actor/pg_clipfrac_lower": "share of response tokens that the dual clip bounds (negative advantage)",
    "actor/ppo_kl": "mean KL from the policy that sampled to the one in training, k1 estimate, nats per token",
    "actor/grad_norm": "global gradient norm before clipping, mean over the step's optimizer steps",
    "actor/lr": "learning rate of the actor",
    "actor/reward_kl_penalty": "mean KL from the reference over response tokens, by algorithm.kl.estimator, nats",
    "actor/reward_kl_penalty_coeff": "coefficient of the KL penalty in this step",
    "critic/vf_loss": "value loss, mean over the step's optimizer steps",
    "critic/vf_clipfrac": "share of response tokens whose value the clip bounds",
    "critic/vpred_mean": "mean value that the critic predicts while it is updated",
    "critic/vf_explained_var": "explained variance of the returns: 1 - var(returns - values) / var(returns)",
    "critic/grad_norm": "global gradient norm before clipping, mean over the step's optimizer steps",
    "critic/lr": "learning rate of the critic",
    **_spread("critic/score", "score of a sample, as the reward function gave it"),
    **_spread("critic/rewards", "reward of a sample after the KL penalty"),
    **_spread("critic/advantages", "advantage of a response token, as the policy loss takes it"),
    **_spread("critic/returns", "return of a response token"),
    **_spread("critic/values", "value of a response token before the update"),
    **_spread("response_length", "response length, tokens, end-of-sequence token included"),
    "response_length/clip_ratio": "share of responses that the length limit cut",
    **_spread("prompt_length", "prompt length, tokens, chat template included"),
    "prompt_length/clip_ratio": "share of prompts at the length limit",
    "reward/failed_share": "share of reward calls that raised, timed out or returned no finite number",
    "reward_extra/KEY/mean": "mean of KEY, a further number in what the reward function returned, over the samples that have it",
    "val/reward/mean": "mean score on the held-out prompts, in steps that evaluate",
    **{f"timing_s/{phase}": f"{doc}, seconds" for phase, doc in PHASES.items()},
    "timing_s/sync_wake_weights": "engines taking memory for their weights, where they share devices, seconds",
    "timing_s/sync_open": "engines opening the trainers' parameters, seconds of the slowest rank",
    "timing_s/sync_copy": "copying the slices of the reshard plan, seconds of the slowest rank",
    "timing_s/sync_check": "comparing every slice with its source, in syncs that do, seconds of the slowest rank",
    "timing_s/sync_process": "what the engine does to weights after loading, seconds of the slowest rank",
    "timing_s/sync_wake_cache": "engines taking memory for their key/value cache, where they share devices, seconds",
    **{f"timing/{phase}": f"the same as timing_s/{phase}" for phase in PHASES},
    **{f"timing_share/{phase}": f"timing_s/{phase} over timing_s/step" for phase in PHASES if phase != "step"},
    "perf/sync_gb": "bytes that the engines received, all ranks together, 1e9 bytes",
    "perf/total_num_tokens": "prompt and response tokens of the samples that were trained on",
    "perf/time_per_step": "the same as timing_s/step",
    "perf/throughput": "perf/total_num_tokens per second of the step, all devices together",
    "perf/cpu_memory_used_gb": "memory in use on the controller's host, GiB",
    "controller/bytes_received": "bytes that reached the controller in this step: ids, lengths and scalars, never tokens",
}


def undocumented(names: set[str]) -> set[str]:
    """Those of ``names`` that the table lacks. The keys below reward_extra/ are the reward function's own."""
    return {n for n in names if n not in DOCUMENTED_METRICS and not (n.startswith("reward_extra/") and n.endswith("/mean"))}


def metrics_page() -> str:
    """docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Each step appends one JSON line to `metrics.jsonl` in the run directory: `step`, then the metrics below, as far as the step has",
        "them. A number that is not finite is written as `null`, and `notes` of that line says what it was.",
        "",
        "Names are verl's where verl has one. Generated by `python -m megarl.observe.metric_names > docs/metrics.md`.",
    ]
    group = ""
    for name, doc in DOCUMENTED_METRICS.items():
        if name.partition("/")[0] != group:
            group = name.partition("/")[0]
            lines += ["", f"## {group}", "", "| metric | meaning |", "|---|---|"]
        lines.append(f"| `{name}` | {doc} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(metrics_page(), end="")
