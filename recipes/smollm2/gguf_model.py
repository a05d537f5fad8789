"""A GGUF file of the Llama family as a Hugging Face directory: numbers dequantised to float32, configuration, tokenizer.

transformers reads GGUF too, but only with a further package (accelerate), and it would load the tokenizer of the model family's own
class, which splits numbers otherwise than this model was trained with. The format is what the package ``gguf`` reads; the names of
tensors and the order of rows are those that llama.cpp's converter writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megarl.errors import ModelError, explain

TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTSIDE_LAYERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
CONTROL_TOKEN = 3  # GGUF's token type of <|im_start|> and its kin
END_OF_TEXT = "<|endoftext|>"  # ends what the model was pretrained on; an answer may end with it instead of <|im_end|>
PRE_TOKENIZER = "smollm"


def write_hf_directory(gguf_file: Path, out: Path) -> str:
    """Write config.json, generation_config.json, model.safetensors (float32) and the tokenizer's files; returns the quantisation.

    The package ``gguf`` must be importable. Raises ModelError for a file that is no GGUF, or of another family or tokenizer.
    """
    import gguf
    from safetensors.numpy import save_file
    from transformers import GenerationConfig

    try:
        reader = gguf.GGUFReader(gguf_file)
    except ValueError as error:
        raise ModelError(explain("no GGUF file", where=str(gguf_file), got=error)) from error
    facts = Facts(reader, gguf_file)
    config = model_config(facts, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    tokenizer = make_tokenizer(facts)
    tensors = read_tensors(reader, facts.size("attention.head_count"), facts.size("attention.head_count_kv"))
    check_tensors(tensors, config.to_dict(), gguf_file)

    config.save_pretrained(out)
    eos = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END_OF_TEXT)]
    GenerationConfig(bos_token_id=tokenizer.bos_token_id, eos_token_id=eos, pad_token_id=tokenizer.pad_token_id).save_pretrained(out)
    tokenizer.save_pretrained(out)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return quantisation(reader)


class Facts:
    """The key/value part of a GGUF file of the Llama family.

    Raises ModelError for another family, and for a key that the file lacks.
    """

    def __init__(self, reader: Any, file: Path):
        self._fields, self._file = reader.fields, file
        for key, expected in (("general.architecture", "llama"), ("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", PRE_TOKENIZER)):
            if self[key] != expected:
                do = "use a GGUF file of SmolLM2"
                raise ModelError(
                    explain(f"{key} of this file is of another model", where=str(file), got=self[key], expected=expected, do=do)
                )

    def __getitem__(self, key: str) -> Any:
        if key not in self._fields:
            raise ModelError(explain("a key is missing", where=str(self._file), expected=key, do="use a GGUF file of SmolLM2"))
        return self._fields[key].contents()

    def size(self, key: str) -> int:
        """An integer below ``llama.``."""
        return int(self["llama." + key])


def model_config(facts: Facts, *, tied: bool) -> Any:
    """The configuration as transformers writes it. GGUF keeps float32: 1e-5 reads 9.99999975e-06 and is rounded back."""
    from transformers import LlamaConfig

    hidden, heads = facts.size("embedding_length"), facts.size("attention.head_count")
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(facts["tokenizer.ggml.tokens"]),
        hidden_size=hidden,
        intermediate_size=facts.size("feed_forward_length"),
        num_hidden_layers=facts.size("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=facts.size("attention.head_count_kv"),
        head_dim=hidden // heads,
        max_position_embeddings=facts.size("context_length"),
        rms_norm_eps=float(f"{facts['llama.attention.layer_norm_rms_epsilon']:.4g}"),
        rope_parameters={"rope_type": "default", "rope_theta": float(facts["llama.rope.freq_base"])},
        tie_word_embeddings=tied,
        bos_token_id=int(facts["tokenizer.ggml.bos_token_id"]),
        eos_token_id=int(facts["tokenizer.ggml.eos_token_id"]),
        pad_token_id=int(facts["tokenizer.ggml.padding_token_id"]),
        dtype="float32",
    )


def read_tensors(reader: Any, heads: int, kv_heads: int) -> dict[str, np.ndarray]:
    """Hugging Face name -> float32 numbers, in Hugging Face's order of rows."""
    import gguf

    tensors = {}
    for tensor in reader.tensors:
        # A copy: dequantize passes on the file's own memory where there is nothing to dequantise.
        numbers = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        name = hf_name(tensor.name)
        if name.endswith("q_proj.weight"):
            numbers = halves_from_pairs(numbers, heads)
        elif name.endswith("k_proj.weight"):
            numbers = halves_from_pairs(numbers, kv_heads)
        tensors[name] = np.ascontiguousarray(numbers)
    return tensors


def hf_name(name: str) -> str:
    """``blk.7.attn_q.weight`` -> ``model.layers.7.self_attn.q_proj.weight``; a name that is no tensor of this family goes through."""
    if name in OUTSIDE_LAYERS:
        return OUTSIDE_LAYERS[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in TENSORS:
        return f"model.layers.{parts[1]}.{TENSORS[parts[2]]}.{parts[3]}"
    return name


def halves_from_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of the query or key projection: GGUF turns neighbours (2i, 2i+1) of a head, Hugging Face (i, i + head_dim / 2)."""
    dim = rows.shape[0] // heads
    return rows.reshape(heads, dim // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def check_tensors(tensors: dict[str, np.ndarray], hf_config: dict[str, Any], file: Path) -> None:
    """Raise ModelError unless names and shapes are exactly those of megarl's table of the family, which all its parts load by."""
    from megarl.weights.families import model_family

    expected = {name: tuple(shape) for name, shape in model_family(hf_config).hf_tensors(hf_config).items()}
    got = {name: numbers.shape for name, numbers in tensors.items()}
    wrong = sorted(name for name in expected.keys() | got.keys() if expected.get(name) != got.get(name))
    if wrong:
        name = wrong[0]
        what = f"{len(wrong)} tensors are not those of the model, {name} among them"
        raise ModelError(explain(what, where=str(file), got=got.get(name), expected=expected.get(name)))


def quantisation(reader: Any) -> str:
    """How many tensors are of which type: "210 Q4_1, 61 F32, 1 Q8_0"."""
    types = [tensor.tensor_type.name for tensor in reader.tensors]
    return ", ".join(f"{types.count(kind)} {kind}" for kind in sorted(set(types), key=lambda kind: (-types.count(kind), kind)))


def make_tokenizer(facts: Facts) -> Any:
    """The byte-level tokenizer that the file holds. What ``smollm`` means: each digit by itself, then GPT-2's way of cutting words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    core.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    core.add_special_tokens(special)
    named = {name: tokens[facts[f"tokenizer.ggml.{key}_token_id"]] for name, key in SPECIAL_TOKENS.items()}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        additional_special_tokens=[token for token in special if token not in named.values()],
        model_max_length=facts.size("context_length"),
        clean_up_tokenization_spaces=False,
        **named,
    )
    tokenizer.chat_template = facts["tokenizer.chat_template"]
    return tokenizer


SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}


def answer(directory: Path, question: str, max_new_tokens: int) -> str:
    """What the model in ``directory`` answers, greedily, by transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    messages = [{"role": "user", "content": question}]
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**tokens, max_new_tokens=max_new_tokens, do_sample=False)[0, tokens["input_ids"].shape[1] :]
    return tokenizer.decode(ids, skip_special_tokens=True)
