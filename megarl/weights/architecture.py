"""What a family computes beyond the words of megatron-core's configuration: the layers of ours are built from it."""

from __future__ import annotations

from dataclasses import dataclass

# How a layer adds attention and MLP to the residual stream x. N are norms.
SEQUENTIAL = "sequential"  # x += attention(N1(x)); x += mlp(N2(x))
PARALLEL = "parallel"  # x += attention(N1(x)) + mlp(N2(x)): GPT-NeoX
SANDWICH = "sandwich"  # x += N2(attention(N1(x))); x += N4(mlp(N3(x))): Gemma 2 and 3


@dataclass(frozen=True)
class Architecture:
    """One value a model; tuples have one entry a decoder layer, counted over the whole model."""

    block: str = SEQUENTIAL
    windows: tuple[int | None, ...] = ()  # newest tokens that a query sees, its own among them; None: all. (): all, in every layer
    # Key of ``rope_parameters`` in config.json (as transformers 5 has it) whose rotary positions the layer takes; None: there is one set
    # for all layers. (): None in every layer.
    ropes: tuple[str | None, ...] = ()
    attention_scale: float | None = None  # factor of query times key; None: 1 / sqrt(head size)
    attention_softcap: float | None = None  # c: scores become c tanh(scores / c) before the softmax
    output_softcap: float | None = None  # the same of the logits
    embedding_scale: float | None = None  # factor of the token embeddings, rounded to their dtype first

    def window(self, layer: int) -> int | None:
        """What layer ``layer`` sees; None: everything before."""
        return self.windows[layer] if self.windows else None

    def rope(self, layer: int) -> str | None:
        """Whose rotary positions layer ``layer`` takes."""
        return self.ropes[layer] if self.ropes else None
