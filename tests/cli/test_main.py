"""Commands, exit codes, and how soon they answer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl import __version__
from megarl.cli import main as cli
from megarl.errors import CheckpointError, DataError, DivergedError

DEMO = "recipes/demo-cpu.yaml"
HEAVY = ("torch", "ray", "transformers", "vllm", "megatron", "numpy", "pyarrow")


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    monkeypatch.chdir(pytestconfig.rootpath)


def modules_after(*argv: str) -> set[str]:
    """Top-level modules in a fresh process once the command is done."""
    code = f"import sys\nfrom megarl.cli.main import main\ntry: main({list(argv)!r})\nexcept SystemExit: pass\nprint('|'.join(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    return {name.partition(".")[0] for name in ran.stdout.splitlines()[-1].split("|")}


@pytest.mark.parametrize("argv", [("--help",), ("--version",), ("train", "--help"), ("config", "list"), ("config", "show", DEMO)])
def test_what_needs_no_worker_imports_nothing_heavy(argv: tuple[str, ...]) -> None:
    assert modules_after(*argv) & set(HEAVY) == set()


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"megarl {__version__}\n"


@pytest.mark.parametrize("argv", [[], ["trian"], ["train"], ["config"], ["report"]])
def test_a_wrong_command_line_is_a_user_error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2 and "usage: megarl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (DataError("bad row"), 3, "error: bad row"),
        (DivergedError("loss is nan"), 4, "error: loss is nan"),
        (CheckpointError("disk full"), 70, "error: disk full"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ZeroDivisionError("1 / 0"), 70, "ZeroDivisionError: 1 / 0"),
    ],
)
def test_every_error_has_its_exit_code(
    error: BaseException, code: int, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(run_dir: str) -> None:
        raise error

    monkeypatch.setattr("megarl.observe.report.write_report", fail)
    assert cli.main(["report", "somewhere"]) == code
    captured = capsys.readouterr()
    assert says in captured.err and captured.out == ""
    assert ("Traceback" in captured.err) == isinstance(error, ZeroDivisionError)


def test_train_refuses_a_faulty_recipe_before_the_heavy_imports() -> None:
    assert "torch" not in modules_after("train", DEMO, "actor.samples_per_mini_batch=50")


def test_config_show_is_a_recipe_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "show", DEMO, "run.seed=7"]) == 0
    shown = capsys.readouterr().out
    (tmp_path / "again.yaml").write_text(shown)
    assert cli.main(["config", "show", str(tmp_path / "again.yaml")]) == 0
    assert capsys.readouterr().out == shown and "seed: 7" in shown


def test_config_help_says_type_default_choices_and_range(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "help", "data.truncation"]) == 0
    assert "choices: error | left | right | drop" in capsys.readouterr().out
    assert cli.main(["config", "help", "algorithm.gamma"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "algorithm.gamma: discount per token",
        "  type:    float",
        "  default: 1.0",
        "  range:   from 0 to 1",
    ]
    assert cli.main(["config", "help", "critic.optim"]) == 0
    assert "critic.optim.lr" in capsys.readouterr().out
    assert cli.main(["config", "help", "critic.lr"]) == 2
    assert "did you mean critic.optim.lr?" in capsys.readouterr().err


def test_config_list_has_one_line_per_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 80 and all(len(line.split(None, 2)) == 3 for line in lines)
    assert [line.split()[1] for line in lines if line.startswith("run.total_steps")] == ["required"]


def test_config_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    import json

    assert cli.main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["properties"]["rollout"]["additionalProperties"] is False
