"""A whole run by the command line: golden numbers, what it leaves behind, and a resume that repeats the undisturbed run's numbers."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from megarl.device import fingerprint
from tests.e2e.demo import metrics, prepare, short, train

pytestmark = pytest.mark.cluster
GOLDEN = Path(__file__).parent / "golden" / "demo_first_steps.json"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    run_dir = tmp_path_factory.mktemp("runs") / "undisturbed"
    done = train(short(data, run_dir))
    assert done.returncode == 0, done.stdout + done.stderr
    return run_dir, done.stdout


def test_golden_numbers(undisturbed: tuple[Path, str]) -> None:
    """Exact on the kinds of machine that wrote them, to 1e-6 elsewhere. MEGARL_WRITE_GOLDEN=1 writes those of this kind anew."""
    mark, steps = fingerprint(), metrics(undisturbed[0])
    kinds = json.loads(GOLDEN.read_text())
    if os.environ.get("MEGARL_WRITE_GOLDEN") == "1":
        kinds = [k for k in kinds if k["fingerprint"]["vllm_kernels"] != mark["vllm_kernels"]] + [{"fingerprint": mark, "steps": steps}]
        GOLDEN.write_text(json.dumps(sorted(kinds, key=lambda kind: kind["fingerprint"]["vllm_kernels"]), indent=1) + "\n")
    exact = next((kind["steps"] for kind in kinds if kind["fingerprint"] == mark), None)
    if exact is not None:
        assert steps == exact
    else:
        assert len(steps) == len(kinds[0]["steps"])
        for step, expected in zip(steps, kinds[0]["steps"], strict=True):
            assert step == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_engine_agrees_with_trainer_in_every_step(undisturbed: tuple[Path, str]) -> None:
    for step in metrics(undisturbed[0]):
        assert step["training/rollout_logprobs_diff_max"] <= 1e-4


def test_says_where_everything_is(undisturbed: tuple[Path, str]) -> None:
    run_dir, output = undisturbed
    last = output.strip().splitlines()[-1]
    assert last.startswith("done: 4 steps; held-out reward")
    for path in (run_dir / "checkpoints" / "step_4", run_dir / "model", run_dir / "report.html"):
        assert str(path) in last
        assert path.exists()


def test_exported_model_is_a_hugging_face_directory(undisturbed: tuple[Path, str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(undisturbed[0] / "model")
    tokenizer = AutoTokenizer.from_pretrained(undisturbed[0] / "model")
    tokens = tokenizer.apply_chat_template(
        [{"role": "user", "content": "reverse: cat"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert model.generate(**tokens, max_new_tokens=4, do_sample=False).shape[0] == 1


def test_same_command_resumes_with_the_same_numbers(undisturbed: tuple[Path, str], data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "resumed"
    shutil.copytree(undisturbed[0], run_dir)
    # As a run leaves it that was killed after its second checkpoint, in the middle of an export: the older model is still there.
    shutil.rmtree(run_dir / "checkpoints" / "step_4")
    (run_dir / "report.html").unlink()
    (run_dir / "writing_model").mkdir()
    (run_dir / "writing_model" / "model.safetensors").write_bytes(b"half")
    facts = json.loads((run_dir / "run.json").read_text())
    del facts["finished_step"]
    (run_dir / "run.json").write_text(json.dumps(facts))
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text(lines[0])  # the line of step 2 was not yet on the disk
    done = train(short(data, run_dir))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed from" in done.stdout
    assert metrics(run_dir) == metrics(undisturbed[0])
    for weights in (undisturbed[0] / "model").glob("*.safetensors"):
        assert (run_dir / "model" / weights.name).read_bytes() == weights.read_bytes()


def test_other_settings_are_refused_in_the_same_directory(undisturbed: tuple[Path, str], data: Path) -> None:
    done = train(short(data, undisturbed[0], **{"actor.optim.lr": 1e-5}))
    assert done.returncode == 2
    assert "actor.optim.lr: 0.0003 -> 1e-05" in done.stderr


def test_finished_run_does_nothing(undisturbed: tuple[Path, str], data: Path) -> None:
    done = train(short(data, undisturbed[0]))
    assert done.returncode == 0
    assert "nothing to do" in done.stdout
