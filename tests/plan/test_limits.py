"""The tables of bounds of one H200, to the digits in which they were published; and what may have no limit."""

import pytest

from megarl.plan.limits import (
    H200,
    Workload,
    adam_s,
    body_parameters,
    cache_bytes_per_token,
    copy_s,
    decode_s,
    decode_step,
    decode_steps,
    find_hardware,
    forward_s,
    head_parameters,
    left_out,
    model_parameters,
    phase_bounds,
    prefill_s,
    train_s,
)
from megarl.weights.sizes import ModelSizes

SIZES = {
    "0.5B": ModelSizes(24, 896, 4864, 14, 2, 64, 151936, tied=True),
    "1.5B": ModelSizes(28, 1536, 8960, 12, 2, 128, 151936, tied=True),
    "3B": ModelSizes(36, 2048, 11008, 16, 2, 128, 151936, tied=True),
    "7B": ModelSizes(28, 3584, 18944, 28, 4, 128, 152064, tied=False),
}


def agrees(value: float, printed: str) -> bool:
    """Whether ``printed`` is ``value`` rounded; a tenth more than half a digit, since some entries were rounded twice."""
    digits = len(printed.partition(".")[2])
    return abs(value - float(printed)) <= 0.55 * 10**-digits


def check(values: list[float], row: str) -> None:
    printed = row.split()
    assert len(values) == len(printed)
    assert [(value, text) for value, text in zip(values, printed, strict=True) if not agrees(value, text)] == []


@pytest.mark.parametrize(
    ("model", "row"),
    [
        ("0.5B", "0.494 0.494 12288 0.99"),
        ("1.5B", "1.544 1.544 28672 3.09"),
        ("3B", "3.086 3.086 36864 6.17"),
        ("7B", "7.615 7.070 57344 15.23"),  # its published count, 7.616, has the norms and biases too
    ],
)
def test_model_constants(model: str, row: str) -> None:
    """Parameters and matrix parameters in billions, cache bytes a token, and GB of the whole."""
    sizes = SIZES[model]
    parameters, matrices = model_parameters(sizes), body_parameters(sizes) + head_parameters(sizes)
    check([parameters / 1e9, matrices / 1e9, cache_bytes_per_token(sizes), 2 * parameters / 1e9], row)


@pytest.mark.parametrize(
    ("model", "batch", "row"),
    [
        ("0.5B", 64, "0.23 0.28 0.08 0.04 125 100 0.65"),
        ("0.5B", 256, "0.23 1.12 0.32 0.15 189 138 1.91"),
        ("0.5B", 512, "0.23 2.25 0.64 0.29 207 147 3.58"),
        ("1.5B", 64, "0.72 0.66 0.25 0.04 46.6 38.1 1.72"),
        ("1.5B", 256, "0.72 2.62 1.00 0.15 76.6 56.0 4.68"),
        ("1.5B", 512, "0.72 5.24 2.00 0.29 85.9 60.8 8.63"),
        ("3B", 256, "1.44 3.37 2.00 0.15 53.3 36.1 7.27"),
        ("7B", 64, "3.29 1.31 1.15 0.04 13.9 11.0 5.97"),
        ("7B", 256, "3.29 5.24 4.58 0.15 30.0 19.0 13.78"),
        ("7B", 512, "3.29 10.49 9.17 0.29 37.2 21.7 24.20"),
    ],
)
def test_decoding_1024_tokens_behind_1024(model: str, batch: int, row: str) -> None:
    """Milliseconds of a step at context 1536 (weights, cache, matrices, sampling), then thousand tokens a second, and seconds."""
    sizes = SIZES[model]
    at = decode_step(sizes, H200, batch, 1536)
    steps = decode_steps(sizes, H200, batch, 1024, 1024)
    thousands = batch * 1024 / 1e3
    seconds = decode_s(sizes, H200, batch, 1024, 1024)
    step_ms = [1e3 * s for s in (at.weights_s, at.cache_s, at.matmul_s, at.sampling_s)]
    check([*step_ms, thousands / sum(s.overlapped_s for s in steps), thousands / seconds, seconds], row)


@pytest.mark.parametrize(
    ("model", "row"),
    [
        ("0.5B", "1.01 0.13 2.86 2.49 7.48 9.62 2.13 6.40 0.003"),
        ("1.5B", "3.60 0.45 8.66 8.04 24.1 31.6 7.42 22.3 0.011"),
        ("3B", "7.57 0.95 17.2 16.4 49.1 64.6 15.5 46.6 0.022"),
        ("7B", "17.6 2.20 38.6 37.2 111.6 147.3 35.7 107.2 0.053"),
    ],
)
def test_phases_of_1024_sequences(model: str, row: str) -> None:
    """Prefill, the same shared by 8, forward with all logits, with the responses' alone, training, with recompute, critic, Adam."""
    sizes = SIZES[model]
    forward = [forward_s(sizes, H200, 1024, 2048, tokens) for tokens in (2048, 1024)]
    train = [train_s(sizes, H200, 1024, 2048, 1024, recompute=again) for again in (False, True)]
    critic = [forward_s(sizes, H200, 1024, 2048, 0), train_s(sizes, H200, 1024, 2048, 0)]
    prefill = [prefill_s(sizes, H200, prompts, 1024) for prompts in (1024, 1024 // 8)]
    check([*prefill, *forward, *train, *critic, adam_s(model_parameters(sizes), H200)], row)


@pytest.mark.parametrize(("model", "ms"), [("0.5B", "0.46"), ("1.5B", "1.44"), ("7B", "7.1")])
def test_copy_of_all_weights(model: str, ms: str) -> None:
    assert agrees(1e3 * copy_s(model_parameters(SIZES[model]), H200), ms)


GRPO = {"responses_per_prompt": 8}
PPO = {"critic": True}


@pytest.mark.parametrize(
    ("model", "work", "row"),
    [
        ("0.5B", Workload(256, 512, 512, **GRPO), "1.86 141"),  # S0
        ("1.5B", Workload(512, 1024, 1024, **GRPO), "24.9 42.0"),  # S1
        ("0.5B", Workload(512, 1024, 1024, **GRPO), "8.63 122"),
        ("1.5B", Workload(512, 1024, 1024, **PPO), "41.4 25.3"),  # S2
        ("0.5B", Workload(512, 1024, 1024, **PPO), "13.4 78.6"),  # S4
        ("3B", Workload(512, 1024, 1024, **GRPO), "46.3 22.7"),
    ],
)
def test_whole_steps(model: str, work: Workload, row: str) -> None:
    """Seconds, and thousand tokens a second."""
    step = phase_bounds(work, H200, SIZES[model])["step"]
    check([step, work.samples * (work.prompt_tokens + work.response_tokens) / step / 1e3], row)


def test_main_terms_of_whole_steps() -> None:
    s0 = phase_bounds(Workload(256, 512, 512, **GRPO), H200, SIZES["0.5B"])
    prefill = prefill_s(SIZES["0.5B"], H200, 32, 512)
    check([s0["gen"] - prefill, s0["ref"], s0["update_actor"] - adam_s(model_parameters(SIZES["0.5B"]), H200)], "0.65 0.30 0.89")
    s1 = phase_bounds(Workload(512, 1024, 1024, **GRPO), H200, SIZES["1.5B"])
    prefill = prefill_s(SIZES["1.5B"], H200, 64, 1024)
    adam = adam_s(model_parameters(SIZES["1.5B"]), H200)
    check([s1["gen"] - prefill, prefill, s1["ref"], s1["update_actor"] - adam], "8.63 0.22 4.02 12.07")
    s2 = phase_bounds(Workload(512, 1024, 1024, **PPO), H200, SIZES["1.5B"])
    check([s2["gen"] - s1["gen"] + prefill, s2["values"], s2["update_critic"] - adam, s2["update_actor"] - adam], "1.80 3.71 11.1 12.1")


def test_a_step_without_reference_or_critic_has_no_such_phase() -> None:
    alone = phase_bounds(Workload(256, 512, 512, reference=False), H200, SIZES["0.5B"])
    assert alone.keys() == {"sync_weights", "gen", "old_log_prob", "update_actor", "step"}
    assert alone["step"] == pytest.approx(alone["gen"] + alone["update_actor"])


def test_old_log_probs_are_needed_once_a_batch_takes_two_optimizer_steps() -> None:
    once, twice = Workload(256, 512, 512), Workload(256, 512, 512, actor_steps=2)
    assert left_out(once) == {"sync_weights", "old_log_prob"} and left_out(twice) == {"sync_weights"}
    bounds = [phase_bounds(work, H200, SIZES["0.5B"]) for work in (once, twice)]
    adam = adam_s(model_parameters(SIZES["0.5B"]), H200)
    assert bounds[1]["step"] - bounds[0]["step"] == pytest.approx(bounds[0]["old_log_prob"] + adam)


def test_epochs_multiply_the_update_and_other_models_have_their_own_bounds() -> None:
    small, large = SIZES["0.5B"], SIZES["1.5B"]
    once, twice = (phase_bounds(Workload(8, 64, 64, actor_epochs=n, critic_epochs=n, **PPO), H200, small) for n in (1, 2))
    assert twice["update_actor"] == 2 * once["update_actor"] and twice["update_critic"] == 2 * once["update_critic"]
    mixed = phase_bounds(Workload(8, 64, 64, **PPO), H200, small, reference=large, critic=large)
    assert mixed["ref"] == phase_bounds(Workload(8, 64, 64), H200, large)["ref"] > once["ref"]
    assert mixed["values"] > once["values"] and mixed["update_critic"] > once["update_critic"]
    assert (mixed["gen"], mixed["update_actor"]) == (once["gen"], once["update_actor"])


def test_hardware_that_nobody_measured_has_no_rates() -> None:
    assert find_hardware("NVIDIA H200") is H200
    assert find_hardware("cpu") is None and find_hardware("NVIDIA A100-SXM4-80GB") is None
