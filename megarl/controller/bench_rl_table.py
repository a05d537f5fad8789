"""The figures of ``megarl bench rl`` as Markdown."""

from __future__ import annotations

from statistics import median
from typing import Any

NONE = "n/a"  # what was not measured, or has no bound that could be told


def tables(result: dict[str, Any]) -> list[str]:
    """The tables of a result of :mod:`megarl.controller.bench_rl`: phases, figures, memory."""
    title = f"Workload {result['workload']} on {result['device']}: {result['steps']} steps after {result['warmup']} to warm up"
    return [title, "", *phase_table(result), "", *figure_table(result), "", *memory_table(result)]


def phase_table(result: dict[str, Any]) -> list[str]:
    """A line a phase; notes say which bounds there are not, and which are no part of the step's."""
    lines = ["| phase | seconds (median) | min - max | bound | measured / bound |", "|---|---|---|---|---|"]
    known = result["bounds"] is not None
    for name, phase in result["phases"].items():
        lines.append(_phase_line("**step**" if name == "step" else name, phase, known))
        if name == "sync_weights":
            lines += [_phase_line(f"- {stage}", seconds, True) for stage, seconds in result["stages"].items()]
    if not known:
        lines += ["", f"No bounds: {result['no_bounds_because']}."]
    elif result["not_in_step_bound"]:
        lines += ["", f"No part of the step's bound: {', '.join(result['not_in_step_bound'])}."]
    return lines


def _phase_line(name: str, phase: dict[str, Any], known: bool) -> str:
    """A phase without a bound of its own stays empty where others have one."""
    bound, ratio = phase.get("bound"), phase.get("ratio")
    told = "" if known else NONE
    limits = f"{told if bound is None else seconds(bound)} | {told if ratio is None else f'{ratio:.2f}'}"
    return f"| {name} | {seconds(phase['median'])} | {seconds(phase['min'])} - {seconds(phase['max'])} | {limits} |"


def figure_table(result: dict[str, Any]) -> list[str]:
    """Rates, guards, start and what it ran on."""
    rates, guards = result["throughput"], result["guards"]
    optimizer = str(guards["optimizer_steps"])
    if guards["critic_optimizer_steps"]:
        optimizer += f" (critic {guards['critic_optimizer_steps']})"
    rows = {
        "tokens/s (prompts and responses, whole step)": _rate(rates["tokens_per_s"]),
        "generated tokens/s (whole step)": _rate(rates["generated_tokens_per_s"]),
        "generated tokens/s (generation alone)": _rate(rates["generated_tokens_per_gen_s"]),
        "samples a step": f"{median(guards['samples']):,.0f}",
        "tokens a step": f"{median(guards['tokens']):,.0f}",
        "optimizer steps a step": optimizer,
        "response tokens trained a step": f"{median(guards['response_tokens_trained']):,.0f}",
        "log-prob gap of trainer and engine, mean": _gap(guards["log_prob_gap_mean"]),
        "log-prob gap of trainer and engine, max": _gap(guards["log_prob_gap_max"]),
        "probability gap of trainer and engine, mean": _gap(guards["prob_gap_mean"]),
        "reward calls that failed": NONE if guards["reward_failed_share"] is None else f"{guards['reward_failed_share']:.1%}",
        "start until all processes are ready": NONE if result["start_s"] is None else f"{result['start_s']:.1f} s",
        "whole run": f"{result['seconds']:.0f} s",
        "versions": ", ".join(f"{name} {value}" for name, value in result["versions"].items() if name != "pins"),
        "command": f"`{result['command']}`",
    }
    return ["| figure | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]


def memory_table(result: dict[str, Any]) -> list[str]:
    """Peak memory by process; that of the device where the run recorded it."""
    lines = ["| process | ready after | peak of the device's memory | peak of the host's |", "|---|---|---|---|"]
    for name, facts in result["memory"].items():
        ready = result["start_by_component_s"].get(name)
        lines.append(
            f"| {name} | {NONE if ready is None else f'{ready:.1f} s'} | {_gib(facts, 'device_peak')} | {_gib(facts, 'rss_peak')} |"
        )
    return lines


def seconds(value: float) -> str:
    """Three figures, and no digit below a tenth of a millisecond."""
    return f"{value:.4f}" if abs(value) < 1 else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def _rate(rate: dict[str, Any]) -> str:
    return f"{rate['median']:,.0f} ({rate['min']:,.0f} - {rate['max']:,.0f})"


def _gap(value: float | None) -> str:
    return NONE if value is None else f"{value:.1e}"


def _gib(facts: dict[str, Any], key: str) -> str:
    return f"{facts[key] / 2**30:.2f} GiB" if key in facts else NONE
