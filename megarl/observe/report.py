"""One self-contained HTML page of a run: no script from elsewhere, no request, readable years later from the file alone."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from megarl.errors import ConfigError, explain
from megarl.observe.metric_names import AFTER_THE_STEP, PHASES
from megarl.observe.metrics import read_metrics
from megarl.observe.report_style import STYLE
from megarl.observe.svg import Series, line_chart, stacked_chart

FILE_NAME = "report.html"
Line = dict[str, Any]


def write_report(run_dir: str | Path) -> Path:
    """Write ``run_dir``/report.html from metrics.jsonl, run.json, config.yaml and rollouts/step_N.parquet; returns its path.

    Parts that a run has not (yet) are left out. Raises ConfigError for a directory that is no run, DataError for a damaged log.
    """
    root = Path(run_dir)
    if not (root / "metrics.jsonl").is_file() and not (root / "run.json").is_file():
        expected = "run.json and metrics.jsonl, as a run writes them"
        raise ConfigError(explain("no run to report on", where=str(root), expected=expected, do="name the run.dir of a run"))
    lines = read_metrics(root)
    facts = json.loads((root / "run.json").read_text(encoding="utf-8")) if (root / "run.json").is_file() else {}
    sections = [_summary(lines, facts), _curves(lines, facts), _timing(lines), _rollouts(root), _config(root), _environment(facts)]
    name = escape(str(facts.get("name", root.name)))
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>megarl: {name}</title><style>{STYLE}</style></head><body><main><h1>{name}</h1>{''.join(sections)}</main></body></html>\n"
    )
    path = root / FILE_NAME
    aside = path.with_suffix(".writing")
    aside.write_text(page, encoding="utf-8")
    aside.replace(path)
    return path


def _column(lines: Sequence[Line], metric: str, name: str) -> Series:
    return Series(name, [line["step"] for line in lines], [line.get(metric) for line in lines])


def _held_out(lines: Sequence[Line], facts: Mapping[str, Any]) -> Series:
    """Held-out reward: before the first step, in between, and after the last."""
    found = {line["step"]: line["val/reward/mean"] for line in lines if line.get("val/reward/mean") is not None}
    if facts.get("eval_start"):
        found[0] = facts["eval_start"]["reward"]
    if facts.get("eval_end") and lines:
        found[lines[-1]["step"]] = facts["eval_end"]["reward"]
    steps = sorted(found)
    return Series("held-out", steps, [found[step] for step in steps])


def _summary(lines: Sequence[Line], facts: Mapping[str, Any]) -> str:
    tiles = [("PPO steps", str(lines[-1]["step"]) if lines else "0")]
    held_out = _held_out(lines, facts).points()
    if held_out:
        tiles.append(("held-out reward", f"{held_out[0][1]:.3f} → {held_out[-1][1]:.3f}"))
    for label, metric, form in (
        ("seconds a step (median)", "timing_s/step", "{:.2f}"),
        ("tokens a second (median)", "perf/throughput", "{:,.0f}"),
        ("largest log-prob gap to the engine", "training/rollout_logprobs_diff_max", "{:.1e}"),
    ):
        values = [line[metric] for line in lines if line.get(metric) is not None]
        if values:
            tiles.append((label, form.format(max(values) if metric.endswith("_max") else median(values))))
    items = "".join(f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for label, value in tiles)
    return f'<dl class="tiles">{items}</dl>'


def _curves(lines: Sequence[Line], facts: Mapping[str, Any]) -> str:
    charts = [
        line_chart("Reward", [_column(lines, "critic/score/mean", "training"), _held_out(lines, facts)], y_label="mean score"),
        line_chart("KL from the reference", [_column(lines, "actor/reward_kl_penalty", "KL")], y_label="nats per token"),
        line_chart("Entropy", [_column(lines, "actor/entropy", "entropy")], y_label="nats"),
        line_chart("Response length", [_column(lines, "response_length/mean", "mean")], y_label="tokens"),
        line_chart("Critic: explained variance", [_column(lines, "critic/vf_explained_var", "explained variance")], y_label="share"),
        line_chart("Gradient norm", [_column(lines, f"{role}/grad_norm", role) for role in ("actor", "critic")], y_label="before clipping"),
    ]
    return f'<h2>Curves</h2><div class="charts">{"".join(charts)}</div>'


def _timing(lines: Sequence[Line]) -> str:
    """Shares of the step by phase. Phases that ran side by side are scaled so that the stack fills at most the step."""
    timed = [line for line in lines if line.get("timing_s/step")]
    if not timed:
        return ""
    steps = [line["step"] for line in timed]
    phases = [p for p in PHASES if p != "step" and p not in AFTER_THE_STEP and any(line.get(f"timing_s/{p}") for line in timed)]
    totals = [max(line["timing_s/step"], sum(line.get(f"timing_s/{p}") or 0.0 for p in phases)) for line in timed]
    layers = [
        Series(phase, steps, [(line.get(f"timing_s/{phase}") or 0.0) / total for line, total in zip(timed, totals, strict=True)])
        for phase in phases
    ]
    chart = stacked_chart("Time by phase", steps, layers, y_label="share of the step")
    seconds = line_chart("Seconds a step", [_column(timed, "timing_s/step", "step")], y_label="seconds")
    return f'<h2>Time</h2><div class="charts">{chart}{seconds}</div>{_phase_table(timed)}'


def _phase_table(timed: Sequence[Line]) -> str:
    """Median seconds of each phase over the steps that had it."""
    rows = []
    for phase, doc in PHASES.items():
        seconds = [line[f"timing_s/{phase}"] for line in timed if line.get(f"timing_s/{phase}") is not None]
        if seconds:
            cells = f'<td>{escape(doc)}</td><td class="number">{median(seconds):.3f}</td>'
            rows.append(f'<tr><th scope="row"><code>{phase}</code></th>{cells}</tr>')
    head = '<thead><tr><th>phase</th><th>what it is</th><th class="number">median, s</th></tr></thead>'
    return f"<table>{head}<tbody>{''.join(rows)}</tbody></table>"


def _rollouts(root: Path) -> str:
    """Samples of the first, the middle and the last step that kept some."""
    found = {}
    for path in (root / "rollouts").glob("step_*.parquet"):
        match = re.fullmatch(r"step_(\d+)", path.stem)
        if match:
            found[int(match[1])] = path
    steps = sorted(found)
    if not steps:
        return ""
    chosen = sorted({steps[0], steps[len(steps) // 2], steps[-1]})
    return "<h2>Sample rollouts</h2>" + "".join(_rollout_table(step, found[step], is_open=step == chosen[-1]) for step in chosen)


def _rollout_table(step: int, path: Path, *, is_open: bool) -> str:
    import pyarrow.parquet as pq

    body = []
    for row in pq.read_table(path).to_pylist():
        ok = row.get("status", "ok") == "ok"
        score = f"{row['score']:.3f}" if ok else escape(str(row["status"]))
        cells = "".join(f"<td><pre>{escape(str(row.get(name, '')))}</pre></td>" for name in ("prompt", "response", "ground_truth"))
        body.append(f'<tr>{cells}<td class="number{"" if ok else " failed"}">{score}</td></tr>')
    head = '<thead><tr><th>prompt</th><th>response</th><th>ground truth</th><th class="number">score</th></tr></thead>'
    opened = " open" if is_open else ""
    return f"<details{opened}><summary>step {step}</summary><table>{head}<tbody>{''.join(body)}</tbody></table></details>"


def _config(root: Path) -> str:
    path = root / "config.yaml"
    if not path.is_file():
        return ""
    text = escape(path.read_text(encoding="utf-8"))
    return f"<h2>Configuration</h2><details><summary>config.yaml</summary><pre class='block'>{text}</pre></details>"


def _environment(facts: Mapping[str, Any]) -> str:
    shown = {name: facts[name] for name in ("versions", "fingerprint", "start_s", "start_by_component_s") if name in facts}
    peaks = {f"peak memory, {group}": f"{f['rss_peak'] / 2**20:.0f} MiB" for group, f in facts.get("memory", {}).items() if "rss_peak" in f}
    rows = "".join(f"<tr><th scope='row'>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in _flat(shown | peaks))
    return f"<h2>Environment</h2><table><tbody>{rows}</tbody></table>" if rows else ""


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in tree.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{name}: ")
        else:
            rows.append((prefix + name, f"{value:.2f}" if isinstance(value, float) else str(value)))
    return rows
