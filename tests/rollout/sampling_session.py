"""One vLLM engine in a process of its own that draws the same prompts under many settings; prints what it drew as one line of JSON.

python -m tests.rollout.sampling_session sampling DIR 1
"""

from __future__ import annotations

import sys
from pathlib import Path

from megarl.types import SamplingSettings
from tests.rollout.session import MAX_RESPONSE, STOPS, TrainingSide, bits, plan_into, prompts_and_requests, start, tell

TEMPERATURES = (0.3, 0.7, 1.0, 1.7)
CUTS = {"top_k": (1.0, 1.0, 3), "top_p": (0.7, 0.5, -1), "both": (1.3, 0.8, 20)}  # temperature, top_p, top_k


def settings() -> dict[str, SamplingSettings]:
    """All that is tried, by name."""
    found = {str(t): SamplingSettings(t, 1.0, -1, MAX_RESPONSE, STOPS) for t in (*TEMPERATURES, 0.01, 0.005)}
    return found | {name: SamplingSettings(*cut, MAX_RESPONSE, STOPS) for name, cut in CUTS.items()}


def main(directory: Path) -> None:
    prompts, requests = prompts_and_requests()
    training = TrainingSide(directory / "first")
    engine = start(directory / "first", 1)
    engine.sync(plan_into(engine, training), training.manifests(), 0, check=True)
    tell({name: bits(engine.generate(requests, prompts, sampling)) for name, sampling in settings().items()})
    engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[2]))
