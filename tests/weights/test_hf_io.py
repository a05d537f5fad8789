"""Reading and writing Hugging Face directories: bit-exact round trips over layouts, and what goes wrong by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen2Config, Qwen2ForCausalLM

from megarl.errors import CheckpointError, ModelError
from megarl.types import Layout, Rank
from megarl.weights.families import model_family, read_hf_config
from megarl.weights.hf_export import HfExport, check_coverage
from megarl.weights.hf_io import load_into
from megarl.weights.hf_reader import HfReader
from tests.weights import reference


def ranks(layout: Layout) -> list[Rank]:
    return [Rank(index, layout) for index in range(layout.world_size)]


def load_rank(directory: Path, rank: Rank, head: str = "lm", dtype: torch.dtype = torch.float32) -> tuple:
    c = read_hf_config(directory)
    shards = model_family(c).shard(c, rank, head=head)
    params = {name: torch.full(shard.shape, -1.0, dtype=dtype) for name, shard in shards.items()}
    return params, shards, load_into(params, shards, directory)


def export(source: Path, target: Path, layout: Layout, **options: object) -> Path:
    """Through a layout and out again, each rank opening the export by itself."""
    aside = target.with_suffix(".tmp")
    HfExport.create(aside, read_hf_config(source), torch.float32, layout, **options)
    for rank in ranks(layout):
        params, shards, _ = load_rank(source, rank)
        HfExport.open(aside).write(params, shards, rank)
    HfExport.open(aside).finish(target, source)
    assert not aside.exists()
    return target


MOE_LAYOUTS = [
    Layout(expert=3, data=3),
    Layout(tensor=2, expert=2, data=2, sequence_parallel=True),
    Layout(tensor=2, pipeline=2, virtual_pipeline=2, expert=3, expert_tensor=2, context=3, sequence_parallel=True),
]
DENSE_LAYOUTS = [
    Layout(),
    Layout(tensor=2, pipeline=2),
    Layout(tensor=4),
    Layout(tensor=2, context=2, data=2),
    Layout(pipeline=2, virtual_pipeline=2),
]
CASES = [(layout, {}) for layout in DENSE_LAYOUTS] + [(layout, reference.MOE) for layout in MOE_LAYOUTS]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("layout", "changes"), CASES, ids=str)
def test_export_gives_back_every_bit(tmp_path: Path, layout: Layout, changes: dict, tied: bool) -> None:
    original = reference.save(reference.config(tie_word_embeddings=tied, **changes), tmp_path / "in")
    written = load_file(export(tmp_path / "in", tmp_path / "out", layout) / "model.safetensors")
    assert written.keys() == original.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in original.items())


class Counting:
    """A tensor of a file that counts the elements which are taken from it."""

    def __init__(self, file_slice: object, taken: list[int]):
        self._slice, self._taken = file_slice, taken

    def __getattr__(self, name: str) -> object:
        return getattr(self._slice, name)

    def __getitem__(self, box: tuple) -> torch.Tensor:
        part = self._slice[box]
        self._taken.append(part.numel())
        return part


@pytest.mark.parametrize("layout", [Layout(tensor=4), Layout(tensor=2, pipeline=2), Layout(pipeline=2, virtual_pipeline=2)], ids=str)
def test_a_rank_reads_what_it_keeps_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: Layout) -> None:
    original = reference.save(reference.config(), tmp_path)
    taken: list[int] = []
    plain = HfReader._slice
    monkeypatch.setattr(HfReader, "_slice", lambda reader, name: Counting(plain(reader, name), taken))
    everything = 0
    for rank in ranks(layout):
        taken.clear()
        params, _, _ = load_rank(tmp_path, rank)
        padding = sum(int((parameter == 0).sum()) for parameter in params.values())  # no number of the model is 0
        assert sum(taken) == sum(parameter.numel() for parameter in params.values()) - padding
        everything += sum(taken)
    norms = sum(tensor.numel() for name, tensor in original.items() if tensor.dim() == 1 and not name.endswith("_proj.bias"))
    copies = layout.tensor - 1  # norms are whole on each tensor-parallel rank; all else is held once
    assert everything == sum(tensor.numel() for tensor in original.values()) + copies * norms


def test_a_size_limit_splits_the_export_and_the_index_leads_back(tmp_path: Path) -> None:
    original = reference.save(reference.config(), tmp_path / "in")
    out = export(tmp_path / "in", tmp_path / "out", Layout(tensor=2), shard_bytes=6000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(name in load_file(out / file) for name, file in index["weight_map"].items())
    params, _, _ = load_rank(out, Rank(7, Layout(tensor=4, pipeline=2)))
    expected = reference.megatron(reference.config(), original, Rank(7, Layout(tensor=4, pipeline=2)))
    assert all(torch.equal(params[name], value) for name, value in expected.items())


def test_transformers_loads_the_export_and_computes_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = dict(vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True)).eval()
    model.save_pretrained(tmp_path / "in")
    again = AutoModelForCausalLM.from_pretrained(export(tmp_path / "in", tmp_path / "out", Layout(tensor=2)), dtype=torch.float32).eval()
    tokens = torch.arange(20)[None]
    assert torch.equal(model(tokens).logits, again(tokens).logits)
    assert (tmp_path / "out" / "generation_config.json").is_file()


def test_a_value_head_survives_and_is_what_transformers_calls_sequence_classification(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = dict(vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True)).save_pretrained(tmp_path / "in")
    layout, aside = Layout(tensor=2), tmp_path / "aside"
    HfExport.create(aside, read_hf_config(tmp_path / "in"), torch.float32, layout, head="value")
    head = torch.randn(1, 32)
    for rank in ranks(layout):
        params, shards, absent = load_rank(tmp_path / "in", rank, head="value")
        assert absent == ("output_layer.weight",)
        assert bool((params["output_layer.weight"] == -1).all())  # left alone, not zeroed
        params["output_layer.weight"].copy_(head)
        HfExport.open(aside).write(params, shards, rank)
    HfExport.open(aside).finish(tmp_path / "critic", tmp_path / "in")
    critic = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic", dtype=torch.float32)
    assert torch.equal(critic.score.weight, head)
    params, _, absent = load_rank(tmp_path / "critic", Rank(1, layout), head="value")
    assert absent == ()
    assert torch.equal(params["output_layer.weight"], head)


def test_numbers_are_cast_to_the_parameters_dtype(tmp_path: Path) -> None:
    original = reference.save(reference.config(), tmp_path)
    params, _, _ = load_rank(tmp_path, Rank(0, Layout()), dtype=torch.bfloat16)
    assert torch.equal(params["decoder.layers.3.mlp.linear_fc2.weight"], original["model.layers.3.mlp.down_proj.weight"].bfloat16())


def test_broken_directories_are_named(tmp_path: Path) -> None:
    tensors = reference.save(reference.config(), tmp_path)
    file = tmp_path / "model.safetensors"
    norm = "model.layers.2.input_layernorm.weight"

    save_file({k: v for k, v in tensors.items() if k != norm}, file)
    with pytest.raises(ModelError, match=norm):
        load_rank(tmp_path, Rank(0, Layout()))
    save_file(tensors | {norm: torch.zeros(21)}, file)
    with pytest.raises(ModelError, match=r"(?s)model.layers.2.input_layernorm.weight in .*model.safetensors.*\(21,\).*\(20,\)"):
        load_rank(tmp_path, Rank(0, Layout()))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        load_rank(tmp_path, Rank(0, Layout()))
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(tensors, "model-00001-of-00009.safetensors")})
    )
    with pytest.raises(ModelError, match="(?s)missing.*model-00001-of-00009"):
        load_rank(tmp_path, Rank(0, Layout()))
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="not an index"):
        load_rank(tmp_path, Rank(0, Layout()))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_rank_refuses_numbers_that_are_not_finite_and_only_its_own(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    """Large models are not looked at before the start; then each rank finds what it reads."""
    tensors = {name: tensor.to(dtype) for name, tensor in reference.save(reference.config(), tmp_path).items()}
    tensors["model.layers.3.mlp.down_proj.weight"][0, 0] = value
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"(?s)not finite.*model.layers.3.mlp.down_proj.weight in .*model.safetensors"):
        load_rank(tmp_path, Rank(1, Layout(pipeline=2)))
    load_rank(tmp_path, Rank(0, Layout(pipeline=2)))


def test_parameters_that_are_not_the_tables_are_refused(tmp_path: Path) -> None:
    c = reference.config()
    reference.save(c, tmp_path)
    shards = model_family(c).shard(c, Rank(0, Layout()))
    params = {name: torch.zeros(shard.shape) for name, shard in shards.items()}
    with pytest.raises(ModelError, match="extra.weight"):
        load_into(params | {"extra.weight": torch.zeros(1)}, shards, tmp_path)
    with pytest.raises(ModelError, match="another shape"):
        load_into(params | {"output_layer.weight": torch.zeros(1)}, shards, tmp_path)


def test_a_plan_that_misses_or_doubles_an_element_is_refused_before_anything_is_written() -> None:
    c = reference.config()
    family, layout = model_family(c), Layout(tensor=2)
    whole = [(rank, family.shard(c, rank)) for rank in ranks(layout)]
    check_coverage(family.hf_tensors(c), whole)
    with pytest.raises(CheckpointError):
        check_coverage(family.hf_tensors(c), whole[:1])
    with pytest.raises(CheckpointError):
        check_coverage(family.hf_tensors(c), [*whole, whole[0]])


def test_an_export_never_overwrites(tmp_path: Path) -> None:
    reference.save(reference.config(), tmp_path / "in")
    out = export(tmp_path / "in", tmp_path / "out", Layout())
    with pytest.raises(CheckpointError, match="exists"):
        export(tmp_path / "in", out, Layout())
    with pytest.raises(CheckpointError, match="exists"):
        HfExport.create(out, read_hf_config(out), torch.float32, Layout())
    with pytest.raises(CheckpointError, match="no export"):
        HfExport.open(tmp_path)
