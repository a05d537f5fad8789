"""Make the model, tokenizer and prompts of one benchmark workload from a seed: no download, nothing but shapes that are published.

Weights are random, so that only sizes count. Each word of the tokenizer is one token id and each prompt is a number of words, so
that prompts have exactly as many ids as the workload says. The recipe of the same name reads what this writes.

    python recipes/bench/prepare.py S0 [--out build/bench/S0] [--seed 0]
"""

import argparse
import json
import random
import string
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

OUTPUT_VERSION = 1  # raise it when what this script writes changes, so that an older output is made again
STAMP = "stamp.json"

END, PAD, SPACE = "<|end|>", "<|pad|>", "\u0120"  # the last: how byte-level tokenizers write a space
LETTERS = string.ascii_lowercase
FIRST_WORD = 3 + len(LETTERS)  # ids below it are the two special tokens, the space and the letters alone
CHAT_TEMPLATE = "{{ messages[0]['content'] }}"  # the words and nothing else


@dataclass(frozen=True)
class Shape:
    """The numbers of a Qwen2 model; those of Qwen2.5 as its config.json has them."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    dtype: str = "bfloat16"
    positions: int = 32768


@dataclass(frozen=True)
class Workload:
    """A shape, and as many prompts as eight steps draw, so that no step sees those of another."""

    shape: Shape
    prompts: int
    prompt_tokens: int


SMALL = Shape(hidden=896, layers=24, heads=14, kv_heads=2, ffn=4864, vocab=151936)  # Qwen2.5-0.5B
MEDIUM = Shape(hidden=1536, layers=28, heads=12, kv_heads=2, ffn=8960, vocab=151936)  # Qwen2.5-1.5B
TINY = Shape(hidden=128, layers=2, heads=4, kv_heads=2, ffn=256, vocab=512, dtype="float32", positions=128)

WORKLOADS = {
    "C0": Workload(TINY, prompts=8 * 16, prompt_tokens=32),
    "S0": Workload(SMALL, prompts=8 * 32, prompt_tokens=512),
    "S1": Workload(MEDIUM, prompts=8 * 64, prompt_tokens=1024),
    "S4": Workload(SMALL, prompts=8 * 512, prompt_tokens=1024),
}


def word(token: int) -> str:
    """The word of a token id from ``FIRST_WORD`` on: a to z, aa to zz, aaa and so on. Every beginning of a word is a word too."""
    number, letters = token - FIRST_WORD + 1, ""
    while number:
        number, letter = divmod(number - 1, len(LETTERS))
        letters = LETTERS[letter] + letters
    return letters


def make_tokenizer(vocab: int, positions: int):
    """Qwen2's byte-level tokenizer over ``vocab`` ids, where " abc" is one of them.

    The class is the model family's own, since transformers loads that one for a qwen2 directory whatever the directory says. Its
    merges add one letter to a shorter word, so that a text of words has one reading.
    """
    from transformers import Qwen2Tokenizer

    words = [word(token) for token in range(FIRST_WORD, vocab)]
    tokens = [END, PAD, SPACE, *LETTERS, *(SPACE + text for text in words)]
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[(SPACE + text[:-1], text[-1]) for text in words],
        pad_token=PAD,
        eos_token=END,
        unk_token=None,
        model_max_length=positions,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def model_config(shape: Shape, *, eos: int, pad: int):
    """The configuration as transformers writes it."""
    from transformers import Qwen2Config

    return Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.positions,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        use_sliding_window=False,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
        dtype=shape.dtype,
    )


def write_model(out: Path, shape: Shape, seed: int) -> None:
    """Write a Hugging Face directory: configuration, tokenizer, and weights ~ N(0, 0.02) with norms of 1 and biases of 0."""
    import torch
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    from megarl.weights.families import model_family, read_hf_config

    tokenizer = make_tokenizer(shape.vocab, shape.positions)
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    model_config(shape, eos=eos, pad=pad).save_pretrained(out)
    GenerationConfig(eos_token_id=eos, pad_token_id=pad).save_pretrained(out)
    tokenizer.save_pretrained(out)

    generator = torch.Generator().manual_seed(seed)
    hf_config = read_hf_config(out)
    tensors = {}
    for name, dims in model_family(hf_config).hf_tensors(hf_config).items():
        tensor = tensors[name] = torch.empty(dims, dtype=getattr(torch, shape.dtype))
        if len(dims) > 1:
            tensor.normal_(0.0, 0.02, generator=generator)
        else:
            tensor.fill_(1.0 if name.endswith("norm.weight") else 0.0)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def make_row(tokens: list[int], index: int) -> dict:
    """One row in verl's schema."""
    return {
        "data_source": "bench/words",
        "prompt": [{"role": "user", "content": "".join(f" {word(token)}" for token in tokens)}],
        "ability": "none",
        "reward_model": {"style": "rule", "ground_truth": ""},
        "extra_info": {"split": "train", "index": index},
    }


def write_data(out: Path, workload: Workload, seed: int) -> None:
    """Write train.parquet: prompts of random words, all of the same number."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = random.Random(seed)
    ids = range(FIRST_WORD, workload.shape.vocab)
    rows = [make_row(rng.choices(ids, k=workload.prompt_tokens), index) for index in range(workload.prompts)]
    pq.write_table(pa.Table.from_pylist(rows), out / "train.parquet")


def sizes_of(out: Path) -> dict[str, int]:
    """Bytes of each file below ``out``, the stamp itself left out: gigabytes of weights aren't read again to find them whole."""
    files = sorted(path for path in out.rglob("*") if path.is_file() and path.name != STAMP)
    return {str(path.relative_to(out)): path.stat().st_size for path in files}


def prepare(out: Path, workload: Workload, seed: int) -> bool:
    """Write model and prompts below ``out`` unless they lie there whole already; True when something was written."""
    stamp = out / STAMP
    wanted = {"version": OUTPUT_VERSION, "seed": seed, "workload": asdict(workload)}
    if stamp.exists() and json.loads(stamp.read_text()) == wanted | {"files": sizes_of(out)}:
        return False
    (out / "model").mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    write_data(out, workload, seed)
    write_model(out / "model", workload.shape, seed)
    stamp.write_text(json.dumps(wanted | {"files": sizes_of(out)}, indent=1))
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the model and prompts of a benchmark workload from a seed.")
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: build/bench/WORKLOAD")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    out = args.out or Path("build/bench") / args.workload
    workload = WORKLOADS[args.workload]
    written = prepare(out, workload, args.seed)
    print(
        f"{out}: {'written' if written else 'already complete'} (seed {args.seed}; "
        f"{workload.prompts} prompts of {workload.prompt_tokens} tokens)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
