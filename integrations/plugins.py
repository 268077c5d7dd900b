"""The functions that vLLM and SGLang find by ncclguard's entry points and call in each of their processes."""

from __future__ import annotations

import contextlib


def vllm() -> None:
    """Register both ends of the weight transfer "ncclguard"; what they need is imported when one is made."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    module = "ncclguard.integrations.vllm"
    with contextlib.suppress(ValueError):  # it is registered
        WeightTransferEngineFactory.register_engine("ncclguard", module, "NcclguardEngine")
        WeightTransferTrainerFactory.register_engine("ncclguard", module, "NcclguardTrainerEngine")


def sglang() -> None:
    """Register the backend "ncclguard" with torch, for SGLang's /init_weights_update_group."""
    import torch.distributed  # noqa: F401  # which ncclguard's import waits for
