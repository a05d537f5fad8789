"""vLLM on a CPU multiplies with a repacked copy of each weight and throws the plain one away. Keep it, so that slices can be written.

With the plain weight kept, a sync is the same on every device: write slices in place; on a CPU then repack the modules written. Outputs
are those, bit for bit, of an engine that loaded the weights from disk.
"""

from __future__ import annotations

from collections.abc import Collection

import torch


def keep_plain_weights() -> None:
    """From now on, models built in this process keep the plain weight of each linear layer. A no-op where vLLM doesn't run on a CPU.

    Costs the memory of the weights once more.
    """
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    repack = utils.dispatch_cpu_unquantized_gemm
    if repack.__module__ == __name__:
        return

    def repack_and_keep(layer: torch.nn.Module, remove_weight: bool) -> None:
        repack(layer, remove_weight=False)

    # vLLM's layers look the function up in its module at each call.
    utils.dispatch_cpu_unquantized_gemm = repack_and_keep


def finish_written_modules(model: torch.nn.Module, written: Collection[str]) -> int:
    """Let vLLM process each module that holds one of the parameters ``written`` as it does after loading. Returns their number.

    A tied output layer is a module of its own that shares the embedding's parameter: it is found by identity, not by name.
    """
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return 0
    parameters = dict(model.named_parameters())
    changed = {id(parameters[name]) for name in written}
    count = 0
    for module in model.modules():
        holds = any(id(parameter) in changed for parameter in module.parameters(recurse=False))
        method = vars(module).get("quant_method")
        if holds and isinstance(method, QuantizeMethodBase):
            method.process_weights_after_loading(module)
            count += 1
    return count
