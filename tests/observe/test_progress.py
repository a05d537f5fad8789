"""A log file gets one line per step, a terminal gets a bar."""

import io

from megarl.observe.progress import Progress

METRICS = {
    "critic/score/mean": 0.4567,
    "actor/reward_kl_penalty": 0.00123,
    "actor/entropy": 1.5,
    "response_length/mean": 4.25,
    "timing_s/step": 3.456,
    "actor/lr": 1.0,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_file_gets_one_plain_line_per_step() -> None:
    stream = io.StringIO()
    with Progress(60, stream, done=1) as progress:
        progress.step(2, METRICS)
        progress.step(3, {"timing_s/step": 1.0})
    assert stream.getvalue() == ("step  2/60  reward 0.457  kl 0.0012  entropy 1.500  length 4.2  3.46 s\nstep  3/60  1.00 s\n")


def test_a_terminal_gets_a_bar_with_the_same_words(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with Progress(60, stream, done=1) as progress:
        progress.step(2, METRICS)
    drawn = stream.getvalue()
    assert "reward 0.457" in drawn and "\x1b[" in drawn and "━" in drawn
