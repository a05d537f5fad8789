"""Which decoder layers each model chunk of a pipeline has."""

from __future__ import annotations

from megarl.errors import ModelError, explain
from megarl.types import Layout


def deal_layers(layers: int, layout: Layout) -> tuple[range, ...]:
    """The layers of each chunk, in the order in which a token meets them: chunk ``c`` of stage ``p`` is entry ``c * stages + p``.

    Every chunk has the same number or one more. What is left over goes to the chunks in the middle, since the first one has the embedding
    too and the last one the output layer. Raises ModelError for fewer layers than chunks.
    """
    chunks = layout.pipeline * layout.virtual_pipeline
    if layers < chunks:
        raise ModelError(
            explain(
                "more model chunks than layers",
                got=f"num_hidden_layers = {layers}; {layout.pipeline} stages of {layout.virtual_pipeline} chunks",
                expected="at least one layer a chunk",
                do="use fewer pipeline stages, or fewer model chunks of each",
            )
        )
    each, left = divmod(layers, chunks)
    middle = sorted(range(chunks), key=lambda chunk: (chunk in (0, chunks - 1), chunk))
    more = set(middle[:left])
    dealt, start = [], 0
    for chunk in range(chunks):
        stop = start + each + (chunk in more)
        dealt.append(range(start, stop))
        start = stop
    return tuple(dealt)
