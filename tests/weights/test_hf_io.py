"""Reading and writing Hugging Face directories: bit-exact round trips over layouts, and what goes wrong by name."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen2Config, Qwen2ForCausalLM

from megarl.errors import CheckpointError, ModelError
from megarl.types import Layout
from megarl.weights.families import model_family, read_hf_config
from megarl.weights.hf_export import HfExport, check_coverage
from megarl.weights.hf_io import load_into
from tests.weights import reference


def ranks(layout: Layout) -> list[tuple[int, int]]:
    return list(itertools.product(range(layout.tensor), range(layout.pipeline)))


def load_rank(directory: Path, layout: Layout, place: tuple[int, int], head: str = "lm", dtype: torch.dtype = torch.float32) -> tuple:
    c = read_hf_config(directory)
    shards = model_family(c).shard(c, layout, *place, head=head)
    params = {name: torch.full(shard.shape, -1.0, dtype=dtype) for name, shard in shards.items()}
    return params, shards, load_into(params, shards, directory)


def export(source: Path, target: Path, layout: Layout, **options: object) -> Path:
    """Through a layout and out again, each rank opening the export by itself."""
    aside = target.with_suffix(".tmp")
    HfExport.create(aside, read_hf_config(source), torch.float32, layout, **options)
    for place in ranks(layout):
        params, shards, _ = load_rank(source, layout, place)
        HfExport.open(aside).write(params, shards, place[0])
    HfExport.open(aside).finish(target, source)
    assert not aside.exists()
    return target


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2, pipeline=2), Layout(tensor=4)], ids=str)
def test_export_gives_back_every_bit(tmp_path: Path, layout: Layout, tied: bool) -> None:
    original = reference.save(reference.config(tie_word_embeddings=tied), tmp_path / "in")
    written = load_file(export(tmp_path / "in", tmp_path / "out", layout) / "model.safetensors")
    assert written.keys() == original.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in original.items())


def test_a_size_limit_splits_the_export_and_the_index_leads_back(tmp_path: Path) -> None:
    original = reference.save(reference.config(), tmp_path / "in")
    out = export(tmp_path / "in", tmp_path / "out", Layout(tensor=2), shard_bytes=6000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(name in load_file(out / file) for name, file in index["weight_map"].items())
    params, _, _ = load_rank(out, Layout(tensor=4, pipeline=2), (3, 1))
    expected = reference.megatron(reference.config(), original, 4, 2, tp_rank=3, pp_rank=1)
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
    for place in ranks(layout):
        params, shards, absent = load_rank(tmp_path / "in", layout, place, head="value")
        assert absent == ("output_layer.weight",)
        assert bool((params["output_layer.weight"] == -1).all())  # left alone, not zeroed
        params["output_layer.weight"].copy_(head)
        HfExport.open(aside).write(params, shards, place[0])
    HfExport.open(aside).finish(tmp_path / "critic", tmp_path / "in")
    critic = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic", dtype=torch.float32)
    assert torch.equal(critic.score.weight, head)
    params, _, absent = load_rank(tmp_path / "critic", layout, (1, 0), head="value")
    assert absent == ()
    assert torch.equal(params["output_layer.weight"], head)


def test_numbers_are_cast_to_the_parameters_dtype(tmp_path: Path) -> None:
    original = reference.save(reference.config(), tmp_path)
    params, _, _ = load_rank(tmp_path, Layout(), (0, 0), dtype=torch.bfloat16)
    assert torch.equal(params["decoder.layers.3.mlp.linear_fc2.weight"], original["model.layers.3.mlp.down_proj.weight"].bfloat16())


def test_broken_directories_are_named(tmp_path: Path) -> None:
    tensors = reference.save(reference.config(), tmp_path)
    file = tmp_path / "model.safetensors"
    norm = "model.layers.2.input_layernorm.weight"

    save_file({k: v for k, v in tensors.items() if k != norm}, file)
    with pytest.raises(ModelError, match=norm):
        load_rank(tmp_path, Layout(), (0, 0))
    save_file(tensors | {norm: torch.zeros(21)}, file)
    with pytest.raises(ModelError, match=r"(?s)model.layers.2.input_layernorm.weight in .*model.safetensors.*\(21,\).*\(20,\)"):
        load_rank(tmp_path, Layout(), (0, 0))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="not a safetensors file"):
        load_rank(tmp_path, Layout(), (0, 0))
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(tensors, "model-00001-of-00009.safetensors")})
    )
    with pytest.raises(ModelError, match="(?s)missing.*model-00001-of-00009"):
        load_rank(tmp_path, Layout(), (0, 0))
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="not an index"):
        load_rank(tmp_path, Layout(), (0, 0))


def test_parameters_that_are_not_the_tables_are_refused(tmp_path: Path) -> None:
    c = reference.config()
    reference.save(c, tmp_path)
    shards = model_family(c).shard(c, Layout(), 0, 0)
    params = {name: torch.zeros(shard.shape) for name, shard in shards.items()}
    with pytest.raises(ModelError, match="extra.weight"):
        load_into(params | {"extra.weight": torch.zeros(1)}, shards, tmp_path)
    with pytest.raises(ModelError, match="another shape"):
        load_into(params | {"output_layer.weight": torch.zeros(1)}, shards, tmp_path)


def test_a_plan_that_misses_or_doubles_an_element_is_refused_before_anything_is_written() -> None:
    c = reference.config()
    family, layout = model_family(c), Layout(tensor=2)
    whole = [(tp, family.shard(c, layout, tp, 0)) for tp in range(2)]
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
