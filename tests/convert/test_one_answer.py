"""What the converter takes of a Hugging Face directory, a run takes too, and what one refuses the other refuses by the same words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.config.model_checks import check_model_files
from megarl.convert.hf_model import open_hf_model
from megarl.errors import ModelError
from megarl.weights.families import read_hf_config
from megarl.weights.hf_checks import check_tensors
from tests.weights.families import save_model

Tensors = dict[str, torch.Tensor]
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
NORM = "model.norm.weight"
EXPERTS = "model.layers.{}.mlp.experts."


def answers(directory: Path) -> tuple[str | None, str | None]:
    """The converter's error and a run's; None: taken."""

    def ask(question: Callable[[], object]) -> str | None:
        try:
            question()
        except ModelError as error:
            return str(error).splitlines()[0]
        return None

    def run() -> None:
        check_model_files(directory)
        check_tensors(directory, read_hf_config(directory), "lm", read=True)

    return ask(lambda: open_hf_model(directory)), ask(run)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    names = {"qwen2": True, "qwen3": False, "qwen3_moe": True, "mixtral": True, "deepseek_v2": False}
    return {name: save_model(name, root / name, tie_word_embeddings=tied, dtype=torch.bfloat16) for name, tied in names.items()}


def in_two(directory: Path, second: Tensors, *, twice: bool = False) -> None:
    """Put ``second`` into a second file, of which the index names the norm; ``twice``: the first file keeps it as well."""
    first = load_file(directory / FILE)
    (directory / FILE).unlink()
    save_file({name: tensor for name, tensor in first.items() if twice or name != NORM}, directory / "model-1.safetensors")
    save_file(second, directory / "model-2.safetensors")
    table = dict.fromkeys(first, "model-1.safetensors") | {NORM: "model-2.safetensors"}
    (directory / INDEX).write_text(json.dumps({"weight_map": table}))


def add(directory: Path, make: Callable[[Tensors], Tensors]) -> None:
    tensors = load_file(directory / FILE)
    save_file(tensors | make(tensors), directory / FILE)


def stack(layer: int) -> Callable[[Tensors], Tensors]:
    at = EXPERTS.format(layer)
    return lambda tensors: {at + "down_proj": torch.stack([tensors[f"{at}{i}.down_proj.weight"] for i in range(6)])}


CASES: dict[str, tuple[str, Callable[[Path], object], str | None]] = {
    "tied, and the head is there": ("qwen2", lambda d: add(d, lambda t: {HEAD: t[EMBEDDING].clone()}), None),
    "tied, and the head is there in another dtype": ("qwen2", lambda d: add(d, lambda t: {HEAD: t[EMBEDDING].float()}), None),
    "tied, and the head is another one": ("qwen2", lambda d: add(d, lambda t: {HEAD: t[EMBEDDING] + 1}), "differs from the embedding"),
    "a tied mixture with its head": ("qwen3_moe", lambda d: add(d, lambda t: {HEAD: t[EMBEDDING].clone()}), None),
    "a tied mixture with another head": ("mixtral", lambda d: add(d, lambda t: {HEAD: t[EMBEDDING] * 2}), "differs from the embedding"),
    "frequencies": ("deepseek_v2", lambda d: add(d, lambda t: {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}), None),
    "experts twice": ("qwen3_moe", lambda d: add(d, stack(3)), "in two forms"),
    "factors of a weight that has none": ("qwen3", lambda d: add(d, lambda t: {NORM + "_scale_inv": torch.ones(1, 1)}), "no place for"),
    "a stranger in a file that is named": (
        "qwen3",
        lambda d: in_two(d, {NORM: torch.ones(40), "extra": torch.ones(2)}),
        "doesn't place there",
    ),
    "a tensor in two files": ("qwen3", lambda d: in_two(d, {NORM: torch.ones(40)}, twice=True), "doesn't place there"),
    "the same in two files, once": ("qwen3", lambda d: in_two(d, {NORM: torch.ones(40)}), None),
    "a file beside": ("qwen3", lambda d: save_file({"a": torch.ones(1)}, d / "extra.safetensors"), "that nothing names"),
    "its author's own form beside": ("qwen3", lambda d: save_file({"a": torch.ones(1)}, d / "consolidated.safetensors"), None),
}


@pytest.mark.parametrize("case", CASES)
def test_converter_and_run_give_one_answer(case: str, models: dict[str, Path], tmp_path: Path) -> None:
    name, change, expected = CASES[case]
    directory = Path(shutil.copytree(models[name], tmp_path / "hf"))
    change(directory)
    converter, run = answers(directory)
    if expected is None:
        assert (converter, run) == (None, None)
    else:
        assert converter == run and expected in str(run), (converter, run)
