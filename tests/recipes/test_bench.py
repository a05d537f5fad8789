"""The benchmark workloads: what prepare.py writes is what their recipes read, token for token."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from megarl.config.checks import check_config
from megarl.config.load import load_config
from megarl.config.schema import Config
from megarl.controller.prepare import check_models, load_tokenizer, stop_tokens
from megarl.data.prompts import prepare_prompts
from megarl.plan.limits import model_parameters
from megarl.weights.families import model_family, read_hf_config

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "recipes" / "bench"
NAMES = sorted(path.stem for path in BENCH.glob("*.yaml"))


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCH / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


prepare, reward = load("prepare"), load("reward")


def recipe(name: str, *overrides: str) -> Config:
    return load_config(BENCH / f"{name}.yaml", overrides)


@pytest.fixture(scope="module")
def c0(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("C0")
    assert prepare.prepare(out, prepare.WORKLOADS["C0"], seed=0)
    return out


def test_every_recipe_can_be_prepared_and_every_workload_has_a_recipe() -> None:
    assert sorted(prepare.WORKLOADS) == NAMES and "C0" in NAMES


@pytest.mark.parametrize("name", NAMES)
def test_recipe_and_workload_agree(name: str) -> None:
    config, workload = recipe(name), prepare.WORKLOADS[name]
    assert all("1 optimizer step of" in line for line in check_config(config))
    samples = config.rollout.prompts_per_step * config.rollout.responses_per_prompt
    assert config.model == f"build/bench/{name}/model" and config.data.train_files == (f"build/bench/{name}/train.parquet",)
    assert config.data.max_prompt_tokens == workload.prompt_tokens
    assert workload.prompts == config.run.total_steps * config.rollout.prompts_per_step
    assert config.actor.dtype == config.rollout.dtype == workload.shape.dtype
    assert config.rollout.max_concurrent_samples == samples and config.rollout.ignore_eos
    assert (config.algorithm.kl.where, config.algorithm.kl.controller) == ("reward", "fixed")
    assert config.run.save_every_steps == -1 and not config.run.export_hf and not config.data.val_files
    assert workload.prompt_tokens + config.rollout.max_response_tokens <= workload.shape.positions


@pytest.mark.parametrize(
    ("name", "samples", "tokens", "critic"), [("S0", 256, 1024, False), ("S1", 512, 2048, False), ("S4", 512, 2048, True)]
)
def test_sizes_that_the_figures_are_compared_by(name: str, samples: int, tokens: int, critic: bool) -> None:
    config = recipe(name)
    assert config.rollout.prompts_per_step * config.rollout.responses_per_prompt == samples
    assert config.data.max_prompt_tokens + config.rollout.max_response_tokens == tokens
    assert config.rollout.responses_per_prompt == (1 if critic else 8)
    assert config.algorithm.advantage_estimator == ("gae" if critic else "grpo")
    assert {config.actor.dtype, config.actor.optim.distributed} == {"bfloat16", True}
    if critic:
        assert (config.critic.dtype, config.critic.optim.distributed) == ("bfloat16", True)


@pytest.mark.parametrize(("shape", "billions"), [("SMALL", 0.494), ("MEDIUM", 1.544)])
def test_shapes_are_the_published_ones(shape: str, billions: float, tmp_path: Path) -> None:
    """The number of parameters, of names and of key/value heads, without the gigabytes of weights."""
    published = {"SMALL": (896, 24, 14, 2, 4864), "MEDIUM": (1536, 28, 12, 2, 8960)}[shape]
    found = getattr(prepare, shape)
    assert (found.hidden, found.layers, found.heads, found.kv_heads, found.ffn) == published
    hf_config = prepare.model_config(found, eos=0, pad=1).to_dict()
    family = model_family(hf_config)
    assert model_parameters(family.sizes(hf_config)) / 1e9 == pytest.approx(billions, abs=5e-4)
    assert family.sizes(hf_config).tied and family.megatron_kwargs(hf_config)["model"]["rotary_base"] == 1e6
    assert len(family.hf_tensors(hf_config)) == 12 * found.layers + 2


def test_model_directory_is_accepted(c0: Path) -> None:
    config = recipe("C0", f"model={c0 / 'model'}")
    check_models(config)
    tokenizer = load_tokenizer(config.model)
    assert len(tokenizer) == read_hf_config(config.model)["vocab_size"] == 512
    assert stop_tokens(tokenizer, config) == (0,)


def test_weights_are_random_and_norms_are_one(c0: Path) -> None:
    tensors = load_file(c0 / "model" / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    assert embedding.dtype == torch.float32 and embedding.std().item() == pytest.approx(0.02, rel=0.02)
    assert tensors["model.layers.1.post_attention_layernorm.weight"].unique().tolist() == [1.0]
    assert tensors["model.layers.0.self_attn.q_proj.bias"].unique().tolist() == [0.0]
    q, o = (tensors[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qo")
    assert q.shape == o.shape and not torch.equal(q, o)


def test_transformers_loads_the_model(c0: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(c0 / "model")
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.config.rope_parameters["rope_theta"] == 1e6


def test_prompts_have_exactly_the_ids_of_the_workload(c0: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(c0 / "model"))
    files = [str(c0 / "train.parquet")]
    summary = prepare_prompts(files, tokenizer, tmp_path / "prompts", prompt_key="prompt", max_prompt_tokens=32, truncation="error")
    assert (summary.rows, summary.max_tokens, summary.total_tokens) == (128, 32, 128 * 32)
    rows = pq.read_table(files[0]).to_pylist()
    assert set(rows[0]) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    assert len({row["prompt"][0]["content"] for row in rows}) == len(rows)


@pytest.mark.parametrize("vocab", [512, 20_000])
def test_a_word_is_one_id(vocab: int) -> None:
    tokenizer = prepare.make_tokenizer(vocab, positions=32768)
    ids = list(range(prepare.FIRST_WORD, vocab))
    assert len(tokenizer) == vocab and len({prepare.word(i) for i in ids}) == len(ids)
    assert tokenizer("".join(f" {prepare.word(i)}" for i in ids)).input_ids == ids
    assert tokenizer.decode([*ids[:3], 0], skip_special_tokens=True) == " a b c"


def test_a_second_call_changes_nothing_and_a_cut_file_is_made_again(c0: Path) -> None:
    workload = prepare.WORKLOADS["C0"]
    weights = (c0 / "model" / "model.safetensors").read_bytes()
    assert not prepare.prepare(c0, workload, seed=0)
    (c0 / "model" / "model.safetensors").write_bytes(weights[:-1])
    assert prepare.prepare(c0, workload, seed=0)
    assert (c0 / "model" / "model.safetensors").read_bytes() == weights
    assert json.loads((c0 / "stamp.json").read_text())["seed"] == 0


def test_reward_is_noise_that_the_text_decides() -> None:
    scores = [reward.compute_score("bench/words", f" {prepare.word(i)}", "", {}) for i in range(prepare.FIRST_WORD, 1029)]
    assert scores[0] == reward.compute_score("bench/words", " a", "") == pytest.approx(0.4917846, abs=1e-6)
    assert 0 <= min(scores) < 0.01 and 0.99 < max(scores) < 1
    assert sum(scores) / len(scores) == pytest.approx(0.5, abs=0.03)
