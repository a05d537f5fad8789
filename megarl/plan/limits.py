"""The least seconds that one GPU needs for each phase of a PPO step, from sizes alone.

Two rates bound everything: bytes to and from memory, and matrix products. A phase that is bound by both at different times is
charged with their sum, since the kernels run one after another; for decoding that is the bound "R2" of docs/performance.md.
All weights and caches are bfloat16. Of the parameters only matrices are counted: norms and biases are below 0.02 % of them.

Letters: B sequences at once, P prompt tokens, R response tokens, S = P + R, L layers, d = query heads x head size, h hidden size,
V vocabulary, ``body`` = parameters of all layers' matrices, BW bytes a second, F operations a second.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.weights.sizes import ModelSizes

BYTES = 2  # of a bfloat16
TRAIN_FORWARDS = 3  # a training pass costs a forward pass, and twice as much again backward
ADAM_BYTES = 30  # a parameter: float32 gradient, master weight and two moments read (16), the last three (12) and the weight (2) written
SAMPLING_PASSES = 4  # over float32 logits: written, scaled and reduced, normalised, drawn from


@dataclass(frozen=True)
class Hardware:
    """Measured rates of one GPU, not those of its data sheet."""

    name: str
    bytes_per_s: float  # device memory, reads and writes counted
    flop_per_s: float  # dense bfloat16 matrix products


H200 = Hardware("NVIDIA H200", bytes_per_s=4.3e12, flop_per_s=790e12)
_KNOWN = (H200,)


def find_hardware(device: str) -> Hardware | None:
    """The rates of a device by the name that its driver gives it; None for one that nobody has measured, a CPU among them."""
    return next((known for known in _KNOWN if known.name == device), None)


@dataclass(frozen=True)
class Workload:
    """One PPO step of sequences that are all equally long."""

    samples: int
    prompt_tokens: int
    response_tokens: int
    responses_per_prompt: int = 1
    actor_steps: int = 1  # optimizer steps of an epoch
    actor_epochs: int = 1
    critic_steps: int = 1
    critic_epochs: int = 1
    reference: bool = True
    critic: bool = False


def body_parameters(sizes: ModelSizes) -> int:
    """Parameters of all layers' matrices: query, key, value and output projections, and a gated MLP of three matrices."""
    q, kv = sizes.of("q"), sizes.of("kv")
    return sizes.layers * (2 * sizes.hidden * q + 2 * sizes.hidden * kv + 3 * sizes.hidden * sizes.ffn)


def head_parameters(sizes: ModelSizes) -> int:
    """Parameters of the output layer, V h."""
    return sizes.vocab * sizes.hidden


def model_parameters(sizes: ModelSizes) -> int:
    """Parameters that memory holds: a tied output layer is counted once."""
    return body_parameters(sizes) + head_parameters(sizes) * (1 if sizes.tied else 2)


def critic_parameters(sizes: ModelSizes) -> int:
    """Parameters with one number a token in place of the output layer."""
    return body_parameters(sizes) + head_parameters(sizes) + sizes.hidden


def cache_bytes_per_token(sizes: ModelSizes) -> int:
    """Keys and values of one token in all layers: 2 x L x key/value heads x head size x 2 bytes."""
    return 2 * sizes.layers * sizes.of("kv") * BYTES


@dataclass(frozen=True)
class DecodeStep:
    """Seconds of one step in which B sequences grow by a token each."""

    weights_s: float  # reading the weights: 2 (body + V h) / BW
    cache_s: float  # reading keys and values: B x context x cache bytes / BW
    matmul_s: float  # 2 (body + V h) B / F
    attention_s: float  # 4 L d context B / F
    sampling_s: float  # four passes over B V float32 logits / BW

    @property
    def overlapped_s(self) -> float:
        """ "R1": memory and arithmetic hide each other fully and sampling is free. No engine reaches it."""
        return max(self.weights_s + self.cache_s, self.matmul_s + self.attention_s)

    @property
    def in_sequence_s(self) -> float:
        """ "R2": kernels run one after another."""
        return self.weights_s + self.cache_s + self.matmul_s + self.attention_s + self.sampling_s


def decode_step(sizes: ModelSizes, hardware: Hardware, batch: int, context: int) -> DecodeStep:
    """One step of ``batch`` sequences with ``context`` tokens each, the new one counted."""
    matrices = body_parameters(sizes) + head_parameters(sizes)
    return DecodeStep(
        weights_s=BYTES * matrices / hardware.bytes_per_s,
        cache_s=batch * context * cache_bytes_per_token(sizes) / hardware.bytes_per_s,
        matmul_s=2 * matrices * batch / hardware.flop_per_s,
        attention_s=4 * sizes.layers * sizes.of("q") * context * batch / hardware.flop_per_s,
        sampling_s=SAMPLING_PASSES * 4 * batch * sizes.vocab / hardware.bytes_per_s,
    )


def decode_steps(sizes: ModelSizes, hardware: Hardware, batch: int, prompt: int, response: int) -> list[DecodeStep]:
    """The R steps that draw ``response`` tokens behind ``prompt`` tokens, all ``batch`` sequences at once."""
    return [decode_step(sizes, hardware, batch, prompt + drawn) for drawn in range(1, response + 1)]


def decode_s(sizes: ModelSizes, hardware: Hardware, batch: int, prompt: int, response: int) -> float:
    """Seconds of decoding, R2: the sum of all steps' :attr:`DecodeStep.in_sequence_s`."""
    return sum(step.in_sequence_s for step in decode_steps(sizes, hardware, batch, prompt, response))


def prefill_s(sizes: ModelSizes, hardware: Hardware, prompts: int, length: int) -> float:
    """Keys and values of ``prompts`` distinct prompts: (2 body + 2 d L P) P a prompt / F, attention causal.

    The responses of one prompt share it, so that a step of GRPO has samples / group size of them.
    """
    per_token = 2 * body_parameters(sizes) + 2 * sizes.of("q") * sizes.layers * length
    return per_token * length * prompts / hardware.flop_per_s


def forward_s(sizes: ModelSizes, hardware: Hardware, sequences: int, length: int, head_tokens: int) -> float:
    """A forward pass over ``sequences`` of ``length`` tokens: (2 body + 2 d L S) S + 2 V h ``head_tokens`` a sequence, / F.

    ``head_tokens``: positions of a sequence at which the output layer is computed; the responses' alone are enough for log-probs,
    none for values.
    """
    per_token = 2 * body_parameters(sizes) + 2 * sizes.of("q") * sizes.layers * length
    return (per_token * length + 2 * head_parameters(sizes) * head_tokens) * sequences / hardware.flop_per_s


def train_s(sizes: ModelSizes, hardware: Hardware, sequences: int, length: int, head_tokens: int, *, recompute: bool = False) -> float:
    """Forward and backward: three forward passes; with ``recompute`` of all layers one more, without its output layer."""
    again = forward_s(sizes, hardware, sequences, length, 0) if recompute else 0.0
    return TRAIN_FORWARDS * forward_s(sizes, hardware, sequences, length, head_tokens) + again


def adam_s(parameters: int, hardware: Hardware) -> float:
    """One optimizer step over float32 states: 30 bytes a parameter / BW."""
    return ADAM_BYTES * parameters / hardware.bytes_per_s


def copy_s(parameters: int, hardware: Hardware) -> float:
    """Every weight read from one place and written to another on the same GPU: 2 x 2 bytes a parameter / BW."""
    return 2 * BYTES * parameters / hardware.bytes_per_s


def phase_bounds(
    work: Workload, hardware: Hardware, actor: ModelSizes, reference: ModelSizes | None = None, critic: ModelSizes | None = None
) -> dict[str, float]:
    """Least seconds of each phase of one step on one GPU, by the names under timing_s/, and ``step``, their sum.

    Generation is bounded with all samples at once; fewer at a time take longer. Two phases are no part of ``step``: sync_weights,
    since trainer and engine may share one copy of the weights, and old_log_prob where each epoch is one optimizer step and there is
    one epoch, since the ratio of old to new policy is then 1 whatever the old log-probs are.

    ``reference`` and ``critic``: sizes of these models where they differ from the actor's.
    """
    length, answer = work.prompt_tokens + work.response_tokens, work.response_tokens
    prompts = work.samples // work.responses_per_prompt
    decode = decode_s(actor, hardware, work.samples, work.prompt_tokens, answer)
    pass_s = train_s(actor, hardware, work.samples, length, answer) + work.actor_steps * adam_s(model_parameters(actor), hardware)
    bounds = {
        "sync_weights": copy_s(model_parameters(actor), hardware),
        "gen": prefill_s(actor, hardware, prompts, work.prompt_tokens) + decode,
        "old_log_prob": forward_s(actor, hardware, work.samples, length, answer),
        "update_actor": pass_s * work.actor_epochs,
    }
    if work.reference:
        bounds["ref"] = forward_s(reference or actor, hardware, work.samples, length, answer)
    if work.critic:
        sizes = critic or actor
        pass_s = train_s(sizes, hardware, work.samples, length, 0) + work.critic_steps * adam_s(critic_parameters(sizes), hardware)
        bounds |= {"values": forward_s(sizes, hardware, work.samples, length, 0), "update_critic": pass_s * work.critic_epochs}
    return bounds | {"step": sum(bounds[phase] for phase in bounds.keys() - left_out(work))}


def left_out(work: Workload) -> frozenset[str]:
    """Phases whose bound is no part of the step's (see :func:`phase_bounds`)."""
    on_policy = work.actor_steps * work.actor_epochs == 1
    return frozenset({"sync_weights", "old_log_prob"} if on_policy else {"sync_weights"})
