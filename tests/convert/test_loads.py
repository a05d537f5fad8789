"""What is written loads as it is: by transformers, with the source's logits, and by vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from megarl.convert.to_hf import to_hf
from megarl.convert.to_megatron import to_megatron
from tests.data.tokenizers import byte_level
from tests.weights.families import VOCAB, save_model

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 32, 38, 46]])


def there_and_back(source: Path, tmp_path: Path) -> Path:
    to_megatron(source, tmp_path / "megatron", quiet=True)
    to_hf(tmp_path / "megatron", tmp_path / "back", shard_bytes=60_000, quiet=True)
    return tmp_path / "back"


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_neox", "gemma3", "deepseek_v3"])
def test_transformers_computes_the_same_logits(name: str, tmp_path: Path) -> None:
    source = save_model(name, tmp_path / "source")
    back = there_and_back(source, tmp_path)
    with torch.no_grad():
        models = [AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval() for directory in (source, back)]
        a, b = (model(TOKENS).logits for model in models)
    assert a.shape == (1, 18, VOCAB) and a.std() > 0.1
    assert torch.equal(a, b)


def test_transformers_computes_the_same_values(tmp_path: Path) -> None:
    settings = AutoConfig.from_pretrained(save_model("qwen2", tmp_path / "source"), num_labels=1, pad_token_id=0)
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_config(settings, dtype=torch.float32).save_pretrained(tmp_path / "critic")
    back = there_and_back(tmp_path / "critic", tmp_path)
    with torch.no_grad():
        models = [AutoModelForSequenceClassification.from_pretrained(directory).eval() for directory in (tmp_path / "critic", back)]
        a, b = (model(TOKENS).logits for model in models)
    assert a.shape == (1, 1) and a.abs().item() > 1e-4
    assert torch.equal(a, b)


VLLM = """
import json, sys
from megarl.rollout.environment import prepare_environment
prepare_environment()
from vllm import LLM, SamplingParams
llm = LLM(model=sys.argv[1], dtype="float32", enforce_eager=True, kv_cache_memory_bytes=64 << 20, max_model_len=64,
          enable_chunked_prefill=False, max_num_batched_tokens=256, max_num_seqs=4, enable_prefix_caching=False)
greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
(drawn,) = llm.chat([{"role": "user", "content": "hello there"}], greedy, use_tqdm=False)
print(json.dumps([list(drawn.prompt_token_ids), list(drawn.outputs[0].token_ids)]))
"""


@pytest.mark.cluster
@pytest.mark.slow
def test_vllm_chats_as_transformers_does(tmp_path: Path) -> None:
    """With the tokenizer and the chat template that came along."""
    tokenizer = byte_level(280)
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"
    sizes = {"hidden_size": 128, "intermediate_size": 176, "vocab_size": len(tokenizer)}
    source = save_model("qwen2", tmp_path / "source", **sizes)
    tokenizer.save_pretrained(source)
    back = there_and_back(source, tmp_path)
    done = subprocess.run([sys.executable, "-c", VLLM, str(back)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    prompt, drawn = json.loads(done.stdout.splitlines()[-1])
    assert tokenizer.decode(prompt) == "[user] hello there"
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(12):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert drawn == tokens[len(prompt) :]
