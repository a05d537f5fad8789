"""The report is one file that asks nothing of the network and shows a run's text as text."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.errors import ConfigError, DataError
from megarl.observe.metrics import MetricsLog
from megarl.observe.report import write_report
from megarl.observe.svg import Series, line_chart, nice_ticks, stacked_chart

ATTACK = "<script>alert('x')</script><img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """Collects tags and attributes, and checks that tags close in order."""

    VOID = ("meta",)

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture
def run(tmp_path: Path) -> Path:
    log = MetricsLog(tmp_path)
    (tmp_path / "rollouts").mkdir()
    for step in range(1, 8):
        entropy = float("nan") if step == 3 else 1.0 / step
        log.write(step, {"critic/score/mean": 0.1 * step, "actor/entropy": entropy, "timing_s/step": 2.0, "timing_s/gen": 0.5})
        rows = {"prompt": [f"{ATTACK} {step}"], "response": [f"answer {step} & more"], "score": [0.25], "status": ["ok"]}
        pq.write_table(pa.table(rows), tmp_path / "rollouts" / f"step_{step}.parquet")
    (tmp_path / "config.yaml").write_text(f"model: {ATTACK}\n")
    facts = {"name": ATTACK, "versions": {"torch": ATTACK}, "eval_start": {"reward": 0.123}, "eval_end": {"reward": 0.876}}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    return tmp_path


def test_one_page_without_a_request_or_a_script(run: Path) -> None:
    path = write_report(run)
    text = path.read_text()
    page = Page(text)
    assert path == run / "report.html"
    assert not {"script", "img", "link", "iframe", "object"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name in ("src", "href") or name.startswith("on")]
    assert "url(" not in text and "@import" not in text and "http" not in text
    assert text.count("&lt;script&gt;alert(&#x27;x&#x27;)") >= 6  # title, heading, versions, config, three prompts


def test_first_middle_and_last_step_are_shown(run: Path) -> None:
    text = write_report(run).read_text()
    assert [int(n) for n in re.findall(r"answer (\d) &amp; more", text)] == [1, 4, 7]
    assert "0.123 → 0.876" in text


def test_charts_have_titles_labels_and_descriptions(run: Path) -> None:
    text = write_report(run).read_text()
    for title in ("Reward", "KL from the reference", "Entropy", "Response length", "Time by phase"):
        assert f"<figcaption>{title}</figcaption>" in text
    assert len(re.findall(r'<svg [^>]*role="img" aria-label="[^"]+"', text)) == text.count("<svg ")
    assert 'aria-label="Reward by step: training from 0.1 to 0.7; held-out from 0.123 to 0.876"' in text
    assert "prefers-color-scheme:dark" in text


def test_a_run_without_steps_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    assert "no data" in write_report(tmp_path).read_text()


def test_failed_rewards_show_their_status(run: Path) -> None:
    rows = {"prompt": ["p"], "response": ["r"], "score": [float("nan")], "status": ["timeout"]}
    pq.write_table(pa.table(rows), run / "rollouts" / "step_9.parquet")
    text = write_report(run).read_text()
    assert '<td class="number failed">timeout</td>' in text and "nan" not in text


def test_no_run_and_a_damaged_run_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run to report on"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("x\n")
    with pytest.raises(DataError):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 1.0, [0.0, 0.5, 1.0]),
        (0.41, 0.83, [0.4, 0.6, 0.8, 1.0]),
        (5.0, 5.0, [4.5, 5.0, 5.5]),
        (-1e-6, 1e-6, [-1e-6, -5e-7, 0.0, 5e-7, 1e-6]),
    ],
)
def test_ticks_are_round_and_cover(low: float, high: float, ticks: list[float]) -> None:
    assert nice_ticks(low, high) == pytest.approx(ticks, abs=1e-12)


def test_the_ends_of_a_line_lie_in_the_corners_of_the_frame() -> None:
    chart = line_chart("t", [Series("a", [0, 10], [0.0, 1.0])], y_label="y")
    assert 'points="58.0,220.0 548.0,14.0"' in chart


def test_layers_stack_up() -> None:
    chart = stacked_chart("t", [0, 1], [Series("a", [0, 1], [0.5, 0.5]), Series("b", [0, 1], [0.5, None])], y_label="y")
    first, second = re.findall(r'points="([^"]+)"', chart)
    assert first == "58.0,117.0 548.0,117.0 548.0,220.0 58.0,220.0"
    assert second == "58.0,14.0 548.0,117.0 548.0,117.0 58.0,117.0"
