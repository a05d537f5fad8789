"""``megarl bench convert``: both conversions of a random model beside a plain read and write of the same files, in turn."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from megarl.errors import EXIT_DONE, ConfigError, WorkerError, explain

_GIB = 1 << 30
_LAYER = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 4}
_VOCAB = 32000
KINDS = ("plain", "to_megatron", "to_hf")
TARGET = 0.7  # of the plain rate


def bench_convert(gib: float, rounds: int, directory: str | None, as_json: bool) -> int:
    """Print seconds, rates, ratios and memory. Raises ConfigError for a disk without room."""
    place = Path(directory or tempfile.gettempdir())
    needed = int(3.2 * gib * _GIB)
    if not place.is_dir() or shutil.disk_usage(place).free < needed:
        raise ConfigError(explain("no room for the measurement", where=str(place), expected=f"a directory with {needed:,} bytes free"))
    if gib <= 0 or rounds < 1:
        raise ConfigError(explain("nothing to measure", got=f"--gib {gib} --rounds {rounds}", expected="more than 0, at least 1"))
    with tempfile.TemporaryDirectory(dir=place, prefix="bench-convert-") as work:
        result = measure(Path(work), gib, rounds)
    print(json.dumps(result, indent=1) if as_json else "\n".join(table(result)))
    return EXIT_DONE


def measure(work: Path, gib: float, rounds: int) -> dict[str, Any]:
    """Make the model, then run each kind in a process of its own, ``rounds`` times in turn."""
    _run("make", work, gib)
    model_bytes = sum(path.stat().st_size for path in (work / "hf").glob("*.safetensors"))
    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for i in range(rounds):
        for kind in KINDS:
            print(f"round {i + 1} of {rounds}: {kind}", file=sys.stderr, flush=True)
            runs[kind].append(_run(kind, work, gib))
    rates = {kind: [model_bytes / run["seconds"] for run in found] for kind, found in runs.items()}
    plain = median(rates["plain"])
    return {
        "model_bytes": model_bytes,
        "file_bytes": max(path.stat().st_size for path in (work / "hf").glob("*.safetensors")),
        "seconds": {kind: [run["seconds"] for run in found] for kind, found in runs.items()},
        "rate": {kind: median(found) for kind, found in rates.items()},
        "ratio": {kind: median(found) / plain for kind, found in rates.items()},
        "peak_bytes": {kind: max(run["peak_bytes"] for run in found) for kind, found in runs.items()},
        "target": TARGET,
    }


def table(result: dict[str, Any]) -> list[str]:
    """The figures as a Markdown table."""
    names = {"plain": "plain read and write", "to_megatron": "to-megatron", "to_hf": "to-hf"}
    lines = [
        f"{result['model_bytes'] / _GIB:.2f} GiB in files of up to {result['file_bytes'] / _GIB:.2f} GiB; rates of its size, median.",
        "",
        "| what | seconds | MB/s | of plain | memory above the start |",
        "|---|---|---|---|---|",
    ]
    for kind, name in names.items():
        seconds = ", ".join(f"{s:.1f}" for s in result["seconds"][kind])
        lines.append(
            f"| {name} | {seconds} | {result['rate'][kind] / 1e6:.0f} | {result['ratio'][kind]:.2f} | "
            f"{result['peak_bytes'][kind] / 2**20:.0f} MiB |"
        )
    worst = min(result["ratio"][kind] for kind in KINDS[1:])
    return [*lines, "", f"target {result['target']}: {'met' if worst >= result['target'] else 'NOT met'} ({worst:.2f})"]


def _run(kind: str, work: Path, gib: float) -> dict[str, float]:
    command = [sys.executable, "-m", "megarl.controller.bench_convert", kind, str(work), str(gib)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise WorkerError(explain(f"measuring {kind} failed", where=str(work), got=f"code {done.returncode}", do="look at the lines above"))
    return json.loads(done.stdout.splitlines()[-1])


def _timed(work: Callable[[], None], nbytes: int) -> dict[str, float]:
    """Seconds, and the most memory beyond what the process had before (its imports). ``nbytes``: about what it writes."""
    _touch(nbytes)
    before = _resident()
    _reset_peak()
    began = time.monotonic()
    work()
    return {"seconds": time.monotonic() - began, "peak_bytes": max(_peak() - before, 0)}


def _touch(nbytes: int) -> None:
    """Use as much memory as the files will take, and give it back: a virtual machine may have to fetch it from its host, which takes longer
    than writing a file, and whoever comes first would pay for it.
    """
    import psutil

    step, held = 64 << 20, []
    for _ in range(0, min(nbytes, psutil.virtual_memory().available // 2), step):
        held.append(bytearray(b"\1") * step)


def _plain(hf: Path, out: Path) -> None:
    """Read every tensor and write it, file by file, durably: what anybody would write who has no model to think of."""
    from safetensors.torch import load_file, save_file

    out.mkdir()
    for path in sorted(hf.glob("*.safetensors")):
        save_file(load_file(path), out / path.name, metadata={"format": "pt"})
        descriptor = os.open(out / path.name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _make(hf: Path, gib: float) -> None:
    """A Llama of random numbers, of about ``gib`` GiB of bfloat16, in files of at most a quarter of it."""
    import torch
    from safetensors.torch import save_file

    from megarl.config.model_checks import INDEX
    from megarl.weights.families import model_family

    edge = 2 * _VOCAB * _LAYER["hidden_size"]
    one = 2 * _LAYER["hidden_size"] ** 2 * (1 + _LAYER["num_key_value_heads"] / _LAYER["num_attention_heads"])
    one += 3 * _LAYER["hidden_size"] * _LAYER["intermediate_size"]
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "vocab_size": _VOCAB, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096, "num_hidden_layers": max(1, round((gib * _GIB / 2 - edge) / one)), **_LAYER,
    }  # fmt: skip
    hf.mkdir()
    (hf / "config.json").write_text(json.dumps(config))
    generator, limit = torch.Generator().manual_seed(0), gib * _GIB / 4
    groups: list[dict[str, torch.Tensor]] = [{}]
    weight_map: dict[str, str] = {}

    def flush() -> None:
        file = f"model-{len(groups):05d}.safetensors"
        save_file(groups[-1], hf / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(groups[-1], file))
        groups[-1] = {}

    for name, shape in model_family(config).hf_tensors(config).items():
        tensor = torch.empty(shape, dtype=torch.bfloat16).normal_(generator=generator)
        if groups[-1] and sum(t.nbytes for t in groups[-1].values()) + tensor.nbytes > limit:
            flush()
            groups.append({})
        groups[-1][name] = tensor
    flush()
    (hf / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    os.sync()  # what is measured next shall not wait for it


def _one(kind: str, work: Path, gib: float) -> dict[str, float]:
    hf, plain, megatron, back = (work / name for name in ("hf", "plain", "megatron", "back"))
    nbytes = int(gib * _GIB)
    if kind == "make":
        _make(hf, gib)
        return {}
    if kind == "plain":
        import safetensors.torch  # noqa: F401 - its import is not what is measured

        return _timed(lambda: _plain(hf, plain), nbytes) | _removed(plain)
    from transformers import LlamaConfig  # noqa: F401 - imported at the reading of a model; imports aren't measured

    from megarl.convert.to_hf import to_hf
    from megarl.convert.to_megatron import to_megatron

    if not megatron.exists():
        to_megatron(hf, megatron, quiet=True)
        os.sync()
    if kind == "to_megatron":
        return _timed(lambda: _discard(to_megatron(hf, back, quiet=True)), nbytes) | _removed(back)
    shard_bytes = max(path.stat().st_size for path in hf.glob("*.safetensors"))
    return _timed(lambda: _discard(to_hf(megatron, back, shard_bytes=shard_bytes, quiet=True)), nbytes) | _removed(back)


def _discard(_result: object) -> None:
    """What a conversion returns is of no use here."""


def _removed(directory: Path) -> dict[str, float]:
    """Each kind writes as much and removes it, so that each finds as much memory in which a file just was."""
    shutil.rmtree(directory)
    return {}


def _reset_peak() -> None:
    """Linux alone: the peak counts from now on. Elsewhere it is that of the whole process."""
    path = Path("/proc/self/clear_refs")
    if path.exists():
        try:
            path.write_text("5")
        except PermissionError:
            return


def _resident() -> int:
    import psutil

    return psutil.Process().memory_info().rss


def _peak() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    print(json.dumps(_one(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))))
