"""The lengths of one model, by the symbols that weight tables use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Rows of embedding and output layer per tensor-parallel rank are a multiple of this: 16 bf16 numbers are the 32 bytes
# that tensor cores want aligned, and a tiny vocabulary isn't doubled by it.
VOCABULARY_MULTIPLE = 16


def padded_vocab_size(vocab: int, tensor: int) -> int:
    """Rows of embedding and output layer over all ``tensor`` ranks: ``vocab`` rounded up to a multiple of 16 per rank."""
    multiple = tensor * VOCABULARY_MULTIPLE
    return -(-vocab // multiple) * multiple


@dataclass(frozen=True)
class ModelSizes:
    """The numbers of one model, in elements."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    query_groups: int  # key/value heads
    head_dim: int
    vocab: int
    tied: bool  # output layer = embedding
    experts: int = 0  # of each mixture layer; 0: a dense model
    expert_ffn: int = 0  # of one expert
    more: Mapping[str, int] = field(default_factory=dict)  # lengths that one family alone has

    def of(self, symbol: str) -> int:
        """The length behind a symbol: hidden, ffn, vocab, q, kv, head, experts, expert_ffn, one, those of ``more``; or a sum, "q+kv+kv"."""
        return sum(self._one(part) for part in symbol.split("+"))

    def _one(self, symbol: str) -> int:
        lengths = {"hidden": self.hidden, "ffn": self.ffn, "vocab": self.vocab, "one": 1, "head": self.head_dim}
        lengths |= {"q": self.heads * self.head_dim, "kv": self.query_groups * self.head_dim}
        lengths |= {"experts": self.experts, "expert_ffn": self.expert_ffn}
        return (lengths | dict(self.more))[symbol]
