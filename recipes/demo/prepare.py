"""Make the demo's data and model from a seed: no download, the same bytes each time.

The task is to spell a word of three or four letters backward: "reverse: tac" -> "cat". It is small enough to be learnt on
two CPU cores in minutes and has the parts of a real run: chat messages and a template, an end-of-sequence token, held-out
words that no training file contains, and a reward function. Words are random letters, so that nothing but the rule helps.

    python recipes/demo/prepare.py [--out build/demo] [--seed 0]
"""

import argparse
import hashlib
import json
import random
import string
import sys
from pathlib import Path

LETTERS = "abcdefghijkl"  # twelve make the warm start twice as quick as twenty-six, and still leave 22,464 words
TRAIN_ROWS = 8192  # the recipe reads them about twice
SFT_ROWS = 8192  # the warm start sees the training words too; the held-out ones are in no training file
VAL_ROWS = 512
OUTPUT_VERSION = 3  # raise it when what this script writes changes, so that an older output is made again

PAD, END, USER, ASSISTANT, UNKNOWN = "<|pad|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|unk|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_words(seed: int) -> tuple[list[str], list[str]]:
    """Distinct words (train, held-out), one in six of three letters and the others of four, in an order that the seed decides."""
    rng = random.Random(seed)
    words: set[str] = set()
    ordered = []
    while len(ordered) < TRAIN_ROWS + VAL_ROWS:
        word = "".join(rng.choices(LETTERS, k=3 if len(ordered) % 6 == 0 else 4))
        if word not in words:
            words.add(word)
            ordered.append(word)
    return ordered[VAL_ROWS:], ordered[:VAL_ROWS]


def make_row(word: str, split: str, index: int) -> dict:
    """One row in verl's schema; the longest prompt is 16 tokens with the chat template, the longest answer 5."""
    return {
        "data_source": "demo/reverse",
        "prompt": [{"role": "user", "content": f"reverse: {word}"}],
        "ability": "spelling",
        "reward_model": {"style": "rule", "ground_truth": word[::-1]},
        "extra_info": {"split": split, "index": index},
    }


def write_data(out: Path, seed: int) -> None:
    """Write train.parquet, val.parquet and sft.parquet (the warm start's part of the training words)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    train, val = make_words(seed)
    for name, split, words in (("train", "train", train), ("val", "test", val), ("sft", "train", train[-SFT_ROWS:])):
        rows = [make_row(word, split, index) for index, word in enumerate(words)]
        pq.write_table(pa.Table.from_pylist(rows), out / f"{name}.parquet")


def make_tokenizer():
    """Qwen2's byte-level tokenizer without merges: one id per letter.

    It has 33 ids, an odd number on purpose: tensor parallelism must pad the vocabulary. The class is the model family's own,
    since transformers loads that one for a qwen2 directory, whatever the directory says.
    """
    from transformers import Qwen2Tokenizer

    space = "\u0120"  # how byte-level tokenizers write a space
    tokens = [PAD, END, USER, ASSISTANT, UNKNOWN, space, ":", *string.ascii_lowercase]
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[],
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[USER, ASSISTANT],
        model_max_length=64,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def write_model(out: Path, seed: int) -> None:
    """Write a Hugging Face directory: a Qwen2 of 0.3M parameters with random weights, its tokenizer and generation settings."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,  # one finds the letter's place, one copies it; a stage of the critic's pipeline each
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def fingerprint(out: Path) -> dict[str, str]:
    """sha256 of each file below ``out``, the stamp itself left out."""
    files = sorted(path for path in out.rglob("*") if path.is_file() and path.name != "stamp.json")
    return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def prepare(out: Path, seed: int) -> bool:
    """Write data and model below ``out`` unless they lie there whole already; True when something was written."""
    stamp = out / "stamp.json"
    if stamp.exists():
        made = json.loads(stamp.read_text())
        if (made["version"], made["seed"], made["files"]) == (OUTPUT_VERSION, seed, fingerprint(out)):
            return False
    (out / "model").mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    write_data(out, seed)
    write_model(out / "model", seed)
    stamp.write_text(json.dumps({"version": OUTPUT_VERSION, "seed": seed, "files": fingerprint(out)}, indent=1))
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the demo's data and model from a seed.")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    written = prepare(args.out, args.seed)
    print(
        f"{args.out}: {'written' if written else 'already complete'} (seed {args.seed}; "
        f"{TRAIN_ROWS} training, {SFT_ROWS} warm-start and {VAL_ROWS} held-out words)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
