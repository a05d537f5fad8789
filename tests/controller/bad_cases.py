"""Every fault of input that a start must find: what is spoiled, how ``train`` and ``validate`` end, and what they say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from tests.controller.bad_place import RECIPE, WORDS, change_json, change_weights, row, write_rows

NORM = "model.layers.1.input_layernorm.weight"
WEIGHTS = "model/model.safetensors"


@dataclass(frozen=True)
class Case:
    """One fault. ``code``: of train; ``validate``: of validate, 0 where it needs more than validate reads."""

    name: str
    spoil: Callable[[], Any] | str  # a function of the current directory, or overrides
    code: int
    says: tuple[str, ...] = ()
    validate: int | None = None  # None: as train


def _each_row(**changes: Any) -> Callable[[], None]:
    """Row 2 of the data changed."""
    return lambda: write_rows([row(word) if i != 2 else row(word, **changes) for i, word in enumerate(WORDS)])


def _retyped(**changes: Any) -> Callable[[], None]:
    return lambda: write_rows([row(word, **changes) for word in WORDS])


def _without(*columns: str) -> Callable[[], None]:
    return lambda: write_rows([{k: v for k, v in row(word).items() if k not in columns} for word in WORDS])


def _damage_a_page() -> None:
    data = bytearray(Path("rows.parquet").read_bytes())
    data[4:60] = b"\xff" * 56
    Path("rows.parquet").write_bytes(data)


def _cut(file: str, size: int) -> Callable[[], None]:
    return lambda: Path(file).write_bytes(Path(file).read_bytes()[:size])


def _directory(file: str) -> Callable[[], None]:
    def spoil() -> None:
        Path(file).unlink()
        Path(file).mkdir()

    return spoil


def _only_pickle() -> None:
    Path(WEIGHTS).rename("model/pytorch_model.bin")


def _index(missing: bool) -> None:
    names = [*json.loads(Path(WEIGHTS).read_bytes()[8 : 8 + int.from_bytes(Path(WEIGHTS).read_bytes()[:8], "little")])]
    names.remove("__metadata__")
    weight_map = dict.fromkeys(names, "model.safetensors") | ({NORM: "model-00002-of-00002.safetensors"} if missing else {})
    Path("model/model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _weights_twice() -> None:
    """Equal weights here; that they may differ is what the refusal is for."""
    shard = "model-00001-of-00001.safetensors"
    _index(False)
    _swap("model/model.safetensors.index.json", '"model.safetensors"', f'"{shard}"')()
    shutil.copy(WEIGHTS, f"model/{shard}")


def _oasst_without_text() -> None:
    write_rows([{"message_id": "a", "parent_id": None, "role": "prompter"}])


def _sharded_without_index() -> None:
    Path(WEIGHTS).rename("model/model-00001-of-00001.safetensors")


def _more_layers(tensors: dict[str, torch.Tensor]) -> None:
    tensors.update({name.replace("layers.1.", "layers.2."): t.clone() for name, t in tensors.items() if "layers.1." in name})


def _set(name: str, value: Any) -> Callable[[], None]:
    return lambda: change_weights(lambda tensors: tensors.update({name: value}))


def _poison(value: float) -> Callable[[], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value

    return lambda: change_weights(change)


def _template(text: str | None) -> Callable[[], None]:
    file = Path("model/chat_template.jinja")
    return lambda: file.write_text(text) if text is not None else file.unlink()


def _file(name: str, text: str) -> Callable[[], None]:
    return lambda: Path(name).write_text(text)


def _swap(name: str, old: str, new: str) -> Callable[[], None]:
    def spoil() -> None:
        text = Path(name).read_text()
        assert old in text
        Path(name).write_text(text.replace(old, new))

    return spoil


def _no_eos() -> None:
    _swap("model/tokenizer_config.json", '"<|im_end|>"', "null")()
    change_json("model/generation_config.json", eos_token_id=None)


def _default_eos() -> None:
    """The tokenizer's class has a default of its own, and adds it to the vocabulary."""
    change_json("model/tokenizer_config.json", eos_token=None)
    change_json("model/generation_config.json", eos_token_id=None)


def _vocab_cut() -> None:
    """A model of 24 ids under a tokenizer of 33: the r of "reverse" is id 24."""
    change_json("model/config.json", vocab_size=24)
    change_weights(lambda t: t.update({"model.embed_tokens.weight": t["model.embed_tokens.weight"][:24].clone()}))


def _long_samples() -> None:
    """4,008 tokens take 33 blocks of 128 tokens of 1 KiB, with the block that is vLLM's own."""
    change_json("model/config.json", max_position_embeddings=8192)
    Path("recipe.yaml").write_text(RECIPE.replace("8}", "3992, kv_cache_mib: 4}").replace("dir: run", "dir: fresh"))


CASES = (
    Case("missing file", lambda: Path("rows.parquet").unlink(), 2, ("data file not found", "rows.parquet")),
    Case("directory as file", _directory("rows.parquet"), 2, ("directory", "rows.parquet")),
    Case("no rows", lambda: pq.write_table(pa.Table.from_pylist([row()]).slice(0, 0), "rows.parquet"), 3, ("without rows",)),
    Case("zero bytes", _file("rows.parquet", ""), 3, ("not a parquet file",)),
    Case("text", _file("rows.parquet", "hello"), 3, ("not a parquet file",)),
    Case("truncated parquet", _cut("rows.parquet", 900), 3, ("not a parquet file", "rows.parquet")),
    Case("damaged page", _damage_a_page, 3, ("rows.parquet", "do:")),
    Case("missing column", _without("prompt"), 3, ("missing columns: prompt", "data_source, reward_model")),
    Case("missing columns", _without("prompt", "reward_model"), 3, ("missing columns: prompt, reward_model",)),
    Case("wrong prompt key", "data.prompt_key=question", 3, ("missing columns: question", "data.prompt_key")),
    Case("null prompt", _each_row(prompt=None), 3, ("row 2", "column prompt")),
    Case("string prompt", _retyped(prompt="reverse: a"), 3, ("row 0", "wrap a plain string")),
    Case("numeric prompt", _retyped(prompt=3), 3, ("row 0", "int")),
    Case("message without content", _each_row(prompt=[{"role": "user"}]), 3, ("row 2", "content")),
    Case("message without role", _each_row(prompt=[{"content": "x"}]), 3, ("row 2", "role")),
    Case("no messages", _each_row(prompt=[]), 3, ("row 2", "non-empty")),
    Case("null truth", _each_row(reward_model={"style": "rule", "ground_truth": None}), 3, ("row 2", "ground truth")),
    Case("reward_model no struct", _retyped(reward_model="cat"), 3, ("row 0", "reward_model")),
    Case("null source", _each_row(data_source=None), 3, ("row 2", "data_source")),
    Case("numeric source", _retyped(data_source=7), 3, ("row 0", "data_source")),
    Case("extra_info text", _retyped(extra_info="{}"), 3, ("row 0", "extra_info")),
    Case("binary column", _retyped(image=b"\x00"), 3, ("row 0", "image", "bytes"), 0),
    Case("overlong", "data.max_prompt_tokens=15", 3, ("row 2", "16 tokens", "at most 15", "data.truncation"), 0),
    Case("all dropped", "data.max_prompt_tokens=3 data.truncation=drop", 3, ("no prompt left", "8 dropped"), 0),
    Case("too few held out", "data.val_files=[rows.parquet] data.val_prompts=9", 3, ("8 rows", "at least 9"), 0),
    Case("no model directory", lambda: shutil.rmtree("model"), 2, ("model", "no such directory")),
    Case("hub name", "model=Qwen/Qwen2-0.5B", 2, ("Qwen/Qwen2-0.5B", "local directory")),
    Case("model is a file", "model=reward.py", 2, ("reward.py",)),
    Case("no config.json", lambda: Path("model/config.json").unlink(), 2, ("config.json",)),
    Case("no weights", lambda: Path(WEIGHTS).unlink(), 2, ("model = model", "weights")),
    Case("only pickled weights", _only_pickle, 2, ("pytorch_model.bin", "safetensors", "save_pretrained")),
    Case("shards without index", _sharded_without_index, 2, ("index",)),
    Case("index without its shard", lambda: _index(True), 2, ("model-00002-of-00002.safetensors", "missing")),
    Case("index no JSON", _file("model/model.safetensors.index.json", "{"), 2, ("index",)),
    Case("index of another form", _file("model/model.safetensors.index.json", '{"weight_map": ["a"]}'), 2, ("index",)),
    Case("index names a tensor of no file", lambda: (_index(False), change_weights(lambda t: t.pop(NORM))), 2, (NORM,), 0),
    Case("truncated weights", _cut(WEIGHTS, 5000), 2, ("model.safetensors",)),
    Case("weights half gone", _cut(WEIGHTS, 200000), 2, ("model.safetensors",)),
    Case("zero-byte weights", _file(WEIGHTS, ""), 2, ("model.safetensors",)),
    Case("another shape", _set(NORM, torch.ones(64)), 2, (NORM, "(64,)", "(128,)"), 0),
    Case("a layer missing", lambda: change_json("model/config.json", num_hidden_layers=3, layer_types=None), 2, ("layers.2",), 0),
    Case("layers left over", lambda: change_weights(_more_layers), 2, ("layers.2", "config.json"), 0),
    Case("a tensor left over", _set("adapter.weight", torch.ones(3)), 2, ("adapter.weight",), 0),
    Case("tied with another head", _set("lm_head.weight", torch.ones(33, 128)), 2, ("lm_head.weight", "tie_word_embeddings"), 0),
    Case("int8 weights", _set(NORM, torch.ones(128, dtype=torch.int8)), 2, (NORM, "I8"), 0),
    Case("NaN in weights", _poison(float("nan")), 2, ("up_proj", "finite"), 0),
    Case("inf in weights", _poison(float("inf")), 2, ("up_proj", "finite"), 0),
    Case("unknown family", lambda: change_json("model/config.json", model_type="t5"), 2, ("t5", "qwen2"), 0),
    Case("template raises", _template("{{ raise_exception('no system turn') }}"), 3, ("no system turn", "row 0"), 0),
    Case("template with an unknown filter", _template("{{ messages | nonsense }}"), 2, ("nonsense", "chat template"), 0),
    Case("template with a syntax error", _template("{% for m in messages %}"), 2, ("chat template", "endfor"), 0),
    Case("template divides by zero", _template("{{ 1 / 0 }}"), 3, ("chat template failed", "ZeroDivisionError"), 0),
    Case("template says nothing", _template("{# nothing #}"), 3, ("without tokens", "row 0"), 0),
    Case("no template", _template(None), 2, ("chat template", "chat_template.jinja"), 0),
    Case("no tokenizer", lambda: Path("model/tokenizer_config.json").unlink(), 2, ("tokenizer",)),
    Case("no tokenizer.json", lambda: Path("model/tokenizer.json").unlink(), 2, ("tokenizer",), 0),
    Case("damaged tokenizer", _file("model/tokenizer.json", "{"), 2, ("tokenizer",), 0),
    Case("tokenizer of a form unknown here", _swap("model/tokenizer.json", '"BPE"', '"New"'), 2, ("tokenizer.json", "untagged"), 0),
    Case("no end of sequence", _no_eos, 2, ("no end-of-sequence token", "generation_config.json"), 0),
    Case("an end that is a class's default", _default_eos, 2, ("'<|endoftext|>' (33)", "0 to 32"), 0),
    Case("an end outside the vocabulary", lambda: change_json("model/generation_config.json", eos_token_id=33), 2, ("33", "vocab"), 0),
    Case("ids outside the vocabulary", _vocab_cut, 2, ("row 0", "id 24", "vocab_size 24"), 0),
    Case("no reward file", lambda: Path("reward.py").unlink(), 2, ("reward file not found",)),
    Case("no reward function", "reward.name=score", 2, ("no function 'score'", "compute_score")),
    Case("reward syntax error", _file("reward.py", "def compute_score(:\n"), 2, ("reward.py",)),
    Case("reward import error", _file("reward.py", "import nonsense_module\ndef compute_score(**k): return 1"), 2, ("nonsense_module",), 0),
    Case("reward signature", _file("reward.py", "def compute_score(answer): return 1.0\n"), 2, ("signature", "answer")),
    Case("reward signature of one more", _file("reward.py", "def compute_score(a, **k): return 1.0\n"), 2, ("signature", "'a'")),
    Case("reward file is no text", lambda: Path("reward.py").write_bytes(b"\xff\x00"), 2, ("not Python",)),
    Case("reward file exits", _file("reward.py", "import sys\ndef compute_score(**k): return 1\nsys.exit(3)\n"), 2, ("SystemExit",), 0),
    Case("greedy", "rollout.temperature=0", 2, ("rollout.temperature", "greedy")),
    Case("negative temperature", "rollout.temperature=-1", 2, ("rollout.temperature",)),
    Case("a temperature that vLLM changes", "rollout.temperature=0.005", 2, ("rollout.temperature", "0.01")),
    Case("infinite temperature", "rollout.temperature=.inf", 2, ("rollout.temperature", "finite")),
    Case("infinite learning rate", "actor.optim.lr=.inf", 2, ("actor.optim.lr", "finite")),
    Case("top_p 0", "rollout.top_p=0", 2, ("rollout.top_p",)),
    Case("top_p above 1", "rollout.top_p=1.1", 2, ("rollout.top_p",)),
    Case("top_k 0", "rollout.top_k=0", 2, ("rollout.top_k",)),
    Case("top_k 1", "rollout.top_k=1", 2, ("rollout.top_k", "greedy")),
    Case("stop tokens that are ignored", "rollout.ignore_eos=true rollout.stop_token_ids=[5]", 2, ("rollout.ignore_eos",)),
    Case("stop texts that are ignored", "rollout.ignore_eos=true rollout.stop_tokens=[a]", 2, ("rollout.ignore_eos",)),
    Case("a stop id twice", "rollout.stop_token_ids=[5,5]", 2, ("rollout.stop_token_ids", "twice")),
    Case("a negative stop id", "rollout.stop_token_ids=[-1]", 2, ("rollout.stop_token_ids",)),
    Case("an empty stop text", "rollout.stop_tokens=['']", 2, ("rollout.stop_tokens",)),
    Case("a stop id outside the vocabulary", "rollout.stop_token_ids=[33]", 2, ("rollout.stop_token_ids", "33", "32")),
    Case("a stop text of two tokens", "rollout.stop_tokens=[ab]", 2, ("rollout.stop_tokens", "'ab'", "'a' (7), 'b' (8)"), 0),
    Case("a stop text that is unknown", "rollout.stop_tokens=[Z]", 2, ("rollout.stop_tokens", "'Z'"), 0),
    Case("samples beyond the positions", "rollout.max_response_tokens=60", 2, ("max_position_embeddings", "76")),
    Case("no sample in flight", "rollout.max_concurrent_samples=0", 2, ("rollout.max_concurrent_samples",)),
    Case("a cache too small", _long_samples, 2, ("rollout.kv_cache_mib", "at least 5"), 0),
    Case("an engine that can't cut the heads", "rollout.tensor_parallel=3", 2, ("rollout.tensor_parallel", "num_attention_heads")),
    Case("layers that don't divide", "actor.layout.pipeline=3", 2, ("actor.layout", "pipeline 3", "num_hidden_layers")),
    Case("a critic's layers that don't divide", "critic.layout.pipeline=3", 2, ("critic.layout", "pipeline 3", "num_hidden_layers")),
    Case("a thousand thousand ranks", "actor.layout.tensor=1000000", 2, ("tensor 1000000", "num_attention_heads")),
    Case("experts of a dense model", "actor.layout.expert=2 actor.layout.data=2", 2, ("expert 2", "without experts")),
    Case("no data files", "data.train_files=[]", 2, ("no data files",)),
    Case("an unknown sink", "run.sinks=[foo]", 2, ("run.sinks", "tensorboard | wandb")),
    Case("a seed too large", "run.seed=18446744073709551616", 2, ("run.seed", "2**32 - 1")),
    Case("an adapter's configuration", _file("model/adapter_config.json", "{}"), 2, ("adapter_config.json", "merge it")),
    Case("an adapter's weights", lambda: shutil.copy(WEIGHTS, "model/adapter_model.safetensors"), 2, ("adapter_model", "merge it")),
    Case("weights twice", _weights_twice, 2, ("model.safetensors.index.json", "model-00001-of-00001.safetensors", "remove one")),
    Case("OpenAssistant's form without text", _oasst_without_text, 3, ("missing columns of OpenAssistant's form: text",)),
    Case("one response for grpo", "algorithm.advantage_estimator=grpo", 2, ("2 or more",)),
    Case("samples that don't divide", "rollout.prompts_per_step=5", 2, ("5 / 4 = 1.25",)),
    Case("run.dir below a file", "run.dir=reward.py/run", 2, ("run directory", "reward.py")),
    Case("run.dir is a file", "run.dir=reward.py", 2, ("run directory", "reward.py")),
)  # fmt: skip
