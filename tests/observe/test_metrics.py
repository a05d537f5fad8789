"""One line per step, whatever happens to the run; every name is documented."""

import ast
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import megarl
from megarl.errors import DataError
from megarl.observe.metric_names import DOCUMENTED_METRICS, metrics_page, undocumented
from megarl.observe.metrics import MetricsLog, read_metrics, with_timing_aliases

PACKAGE = Path(megarl.__file__).parent


def test_one_line_per_step_with_notes_for_what_is_not_finite(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.write(1, {"critic/score/mean": np.float32(0.5), "controller/bytes_received": np.int64(7), "training/global_step": 1})
    log.write(2, {"actor/entropy": float("nan"), "actor/pg_loss": float("inf"), "actor/lr": 0.1})
    first, second = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first == {"step": 1, "critic/score/mean": 0.5, "controller/bytes_received": 7, "training/global_step": 1}
    assert second == {"step": 2, "actor/entropy": None, "actor/pg_loss": None, "actor/lr": 0.1, "notes": second["notes"]}
    assert second["notes"] == {"actor/entropy": "nan", "actor/pg_loss": "inf"}


def test_a_step_is_never_logged_twice(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.write(3, {})
    with pytest.raises(ValueError, match="a step has one line"):
        log.write(3, {})


@pytest.mark.parametrize("value", ["0.5", None, True, [1.0]])
def test_only_numbers_are_metrics(tmp_path: Path, value: object) -> None:
    with pytest.raises(TypeError, match="actor/lr"):
        MetricsLog(tmp_path).write(1, {"actor/lr": value})  # type: ignore[dict-item]
    assert read_metrics(tmp_path) == []


def test_a_resume_drops_later_steps_and_a_torn_line(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    for step in range(1, 6):
        log.write(step, {"actor/lr": float(step)})
    with log.path.open("a") as file:
        file.write('{"step": 6, "actor/l')
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    resumed = MetricsLog(tmp_path, resume_from=3)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]
    resumed.write(4, {"actor/lr": 40.0})
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4] and lines[-1]["actor/lr"] == 40.0


@settings(max_examples=8, deadline=None)  # each line waits for the disk
@given(st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_however_often_a_run_resumes_no_step_is_doubled(tmp_path_factory: pytest.TempPathFactory, ends: list[int]) -> None:
    root, done = tmp_path_factory.mktemp("run"), 0
    for end in ends:
        resume_from = min(done, end - 1)  # the newest checkpoint lies at or before what was logged
        log = MetricsLog(root, resume_from=resume_from)
        for step in range(resume_from + 1, end + 1):
            log.write(step, {})
        done = end
    assert [line["step"] for line in read_metrics(root)] == list(range(1, done + 1))


@pytest.mark.parametrize("line", ["no json", "[1]", '{"actor/lr": 1}'])
def test_a_damaged_line_is_an_error_with_its_place(tmp_path: Path, line: str) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(DataError, match="metrics.jsonl:2"):
        read_metrics(tmp_path)


def test_timings_have_aliases_and_shares() -> None:
    metrics = with_timing_aliases({"timing_s/step": 4.0, "timing_s/gen": 1.0})
    assert metrics == {"timing_s/step": 4.0, "timing/step": 4.0, "timing_s/gen": 1.0, "timing/gen": 1.0, "timing_share/gen": 0.25}


def test_names_in_the_code_are_documented() -> None:
    """Literals that look like a metric; f-strings and the names that a role's losses add are seen by the run's own test."""
    groups = {name.partition("/")[0] for name in DOCUMENTED_METRICS}
    pattern = re.compile(rf"({'|'.join(groups)})/[a-z_0-9/]+")
    found = set()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        inside_f_strings = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside_f_strings:
                found |= {node.value} if pattern.fullmatch(node.value) else set()
    stems = {name for name in found if any(known.startswith(name + "/") for known in DOCUMENTED_METRICS)}  # given to summary()
    assert len(found) > 10
    assert undocumented(found - stems) == set()


def test_the_page_is_fresh(pytestconfig: pytest.Config) -> None:
    page = (pytestconfig.rootpath / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert page == metrics_page(), "run: python -m megarl.observe.metric_names > docs/metrics.md"


def test_every_metric_has_one_line_of_doc() -> None:
    assert [name for name, doc in DOCUMENTED_METRICS.items() if not doc or "\n" in doc or "|" in doc] == []
    assert undocumented({"actor/lr", "actor/made_up"}) == {"actor/made_up"}
