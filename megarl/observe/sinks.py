"""TensorBoard and Weights & Biases: each a process of its own that follows metrics.jsonl and passes its lines on.

So a sink that fails, hangs or has no network never holds up or ends a run: at worst its process dies, which is said once.

    python -m megarl.observe.sinks RUN tensorboard [--after STEP]     # also passes on the lines of a run that is over
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Protocol

from megarl.errors import ConfigError, explain
from megarl.observe.metrics import FILE_NAME

POLL_S = 0.5
CLOSE_S = 60.0  # a sink may take so long to pass on its last lines
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}


def check_sinks(names: Sequence[str]) -> None:
    """Raise ConfigError for a sink that isn't known or whose package isn't installed; before anything is started."""
    for name in names:
        if name not in PACKAGES:
            raise ConfigError(explain("no such sink", where="run.sinks", got=name, expected=" | ".join(PACKAGES)))
        if find_spec(PACKAGES[name]) is None:
            raise ConfigError(
                explain("the package of a sink is not installed", where="run.sinks", got=name, do=f"pip install {PACKAGES[name]}")
            )


class Sinks:
    """The sink processes of a run, as the controller sees them."""

    def __init__(self, run_dir: Path, names: Sequence[str], *, after: int, environment: dict[str, str]):
        """Start one process a name. ``after``: the last step that the run keeps; lines up to it were passed on before."""
        self._logs = run_dir / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._processes = {name: self._start(run_dir, name, after, environment) for name in names}

    def _start(self, run_dir: Path, name: str, after: int, environment: dict[str, str]) -> subprocess.Popen:
        command = [sys.executable, "-m", "megarl.observe.sinks", str(run_dir), name, "--after", str(after), "--follow"]
        with self._log(name).open("ab") as log:
            # In a session of its own: an interrupt ends the run, and the sink then passes on what is left when its stdin closes.
            return subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=os.environ | environment, start_new_session=True
            )

    def _log(self, name: str) -> Path:
        return self._logs / f"sink-{name}.log"

    def warnings(self) -> list[str]:
        """What to say of sinks that died since the last call."""
        dead = [name for name, process in self._processes.items() if process.poll() is not None]
        return [self._lost(name, f"ended with code {self._processes.pop(name).returncode}") for name in dead]

    def close(self, timeout_s: float = CLOSE_S) -> list[str]:
        """Let the sinks pass on the rest and end; returns warnings. One that takes longer is killed."""
        lost = []
        for process in self._processes.values():
            if process.stdin is not None:
                process.stdin.close()
        for name, process in self._processes.items():
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                lost.append(self._lost(name, f"did not end within {timeout_s:g} s"))
            else:
                if code:
                    lost.append(self._lost(name, f"ended with code {code}"))
        self._processes = {}
        return lost

    def _lost(self, name: str, what: str) -> str:
        return f"warning: sink {name} {what}; the run goes on, metrics.jsonl has everything (see {self._log(name)})"


class Sink(Protocol):
    """Where lines go."""

    def write(self, step: int, metrics: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoardSink:
    """Event files in RUN/tensorboard. A resume purges the steps that it does again."""

    def __init__(self, run_dir: Path, after: int):
        from torch.utils.tensorboard import SummaryWriter

        directory = run_dir / "tensorboard"
        self.after = after if directory.is_dir() and any(directory.iterdir()) else 0
        self._writer = SummaryWriter(str(directory), purge_step=self.after + 1)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """One Weights & Biases run for one run directory, also over resumes; its own variables (WANDB_MODE, ...) decide where it goes.

    It takes each step once: steps that a resume does again keep their first values there.
    """

    def __init__(self, run_dir: Path, after: int):
        import wandb

        mark = run_dir / "wandb_id"
        self.after = after if mark.is_file() else 0
        if not mark.is_file():
            mark.write_text(uuid.uuid4().hex)
        self._run = wandb.init(dir=str(run_dir), id=mark.read_text(), resume="allow")

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


def follow(path: Path, until: IO[Any] | None) -> Iterator[dict[str, Any]]:
    """Whole lines of ``path``, and those that are appended until ``until`` is at its end; without it those that are there."""
    rest = ""
    with path.open("a+", encoding="utf-8") as file:
        file.seek(0)
        while True:
            over = until is None or bool(select.select([until], [], [], POLL_S)[0])  # a pipe whose writer is gone can be read
            *lines, rest = (rest + file.read()).split("\n")
            yield from (json.loads(line) for line in lines)
            if over:
                return


def main() -> None:
    """Pass the lines of a run on to one sink."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("sink", choices=sorted(PACKAGES))
    parser.add_argument("--after", type=int, default=0, help="lines up to this step were passed on before")
    parser.add_argument("--follow", action="store_true", help="go on until stdin is closed")
    args = parser.parse_args()
    sink = {"tensorboard": TensorBoardSink, "wandb": WandbSink}[args.sink](args.run, args.after)
    for line in follow(args.run / FILE_NAME, sys.stdin if args.follow else None):
        if line["step"] > sink.after:
            sink.write(line["step"], {n: v for n, v in line.items() if n not in ("step", "notes") and v is not None})
    sink.close()


if __name__ == "__main__":
    main()
