"""How pipeline stages tell each other the shapes of what they are about to send, for micro-batches of unequal length.

megatron-core's own exchange (``P2PCommunicator._communicate_shapes``) has two faults under an interleaved pipeline. With two stages each is
the other's previous and next one, and it posts sends in another order than receives, so that the shape of a gradient is taken for that of
an activation, which goes unnoticed only while all micro-batches are equally long. And it waits for its sends before the tensors are posted
for which the peer waits: NCCL buffers so little a message, gloo does not, and both stages wait for ever.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

_DIMENSIONS = 3  # of a hidden state: tokens, 1, hidden
_Shape = list[int]


def install() -> None:
    """Exchange shapes in the order in which tensors are exchanged, from now on; safe to call twice."""
    P2PCommunicator._communicate_shapes = _communicate_shapes  # type: ignore[method-assign]


def _communicate_shapes(
    self: P2PCommunicator,
    tensor_send_next: torch.Tensor | None,
    tensor_send_prev: torch.Tensor | None,
    recv_prev: bool,
    recv_next: bool,
) -> tuple[_Shape, _Shape]:
    """Shapes of what comes from the previous and from the next stage; zeros where nothing does."""
    for request in vars(self).pop("_shape_sends", {}).values():
        request[0].wait()  # at once: the tensor behind the shape has arrived
    device = torch.cuda.current_device()
    sent = {name: _shape_of(tensor, device) for name, tensor in (("send_next", tensor_send_next), ("send_prev", tensor_send_prev))}
    received = {
        name: torch.empty(_DIMENSIONS, dtype=torch.int64, device=device) if wanted else None
        for name, wanted in (("recv_prev", recv_prev), ("recv_next", recv_next))
    }
    requests = p2p_communication._p2p_ops(
        **{f"tensor_{name}": tensor for name, tensor in (sent | received).items()},
        group=self.pp_group,
        prev_pipeline_rank=self.prev_rank,
        next_pipeline_rank=self.next_rank,
    )
    # Sends are waited for at the next exchange. Until then their buffers are kept.
    vars(self)["_shape_sends"] = {name: (requests[name], sent[name]) for name in sent if name in requests}
    return _arrived(requests, received, "recv_prev"), _arrived(requests, received, "recv_next")


def _shape_of(tensor: torch.Tensor | None, device: Any) -> torch.Tensor | None:
    return None if tensor is None else torch.tensor(tensor.size(), dtype=torch.int64, device=device)


def _arrived(requests: dict[str, Any], received: dict[str, torch.Tensor | None], name: str) -> _Shape:
    shape = received[name]
    if shape is None:
        return [0] * _DIMENSIONS
    requests[name].wait()
    return shape.tolist()
