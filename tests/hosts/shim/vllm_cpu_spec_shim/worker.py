# SPDX-License-Identifier: Apache-2.0
"""TEST ONLY: the CPU worker and runner of vLLM 0.15 to 0.21 with the GPU runner's speculation.

No statement of the GPU runner is copied here: `load_model` *is* `GPUModelRunner.load_model`, so the
check that the target supports EAGLE-3, the choice of aux layers and the call that sets them are
upstream's own, word for word. Imported where the worker is: `parallel_config.worker_cls` names it.
"""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Iterator
from typing import Any

import torch
import vllm.v1.worker.cpu_worker
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_cpu_spec_shim import release


class _Stream:
    """Stands in for a CUDA stream or event: on the CPU everything has already happened."""

    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def wait_stream(self, *args: Any) -> None:
        pass

    record = synchronize = wait_stream


@contextlib.contextmanager
def _no_cuda() -> Iterator[None]:
    """The CUDA calls that GPU runner methods make, answered for the CPU.

    Newer CPU builds do the same for the whole process (`vllm.v1.worker.cpu.shm`).
    """
    patch = unittest.mock.patch.object
    memory_usage = staticmethod(lambda device=None: 0.0)
    with (
        patch(torch, "Event", _Stream),
        patch(torch.cuda, "Stream", _Stream),
        patch(torch.cuda, "stream", _Stream),
        patch(torch.cuda, "current_stream", _Stream),
        patch(torch.cuda, "current_device", lambda: "cpu"),
        patch(CpuPlatform, "get_current_memory_usage", memory_usage),
    ):
        yield


class _GpuMethods(GPUModelRunner):
    """Comes between `CPUModelRunner` and `GPUModelRunner` in the MRO of `SpecCPUModelRunner`."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        with _no_cuda():
            super().__init__(vllm_config, device)
        # 0.15 to 0.19: CPUModelRunner.__init__ asserts next that this is None.
        self.hidden_speculative_config = self.speculative_config
        self.speculative_config = None


class SpecCPUModelRunner(CPUModelRunner, _GpuMethods):
    """The CPU runner, with speculation where the stock one asserts that there is none."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.speculative_config = self.hidden_speculative_config

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with _no_cuda():
            GPUModelRunner.load_model(self, *args, **kwargs)

    def _postprocess_triton(self) -> None:
        """0.20 and on: keep the Triton kernels, which the interpreter runs."""

    def _copy_draft_token_ids_to_cpu(self, *args: Any, **kwargs: Any) -> None:
        with _no_cuda():
            GPUModelRunner._copy_draft_token_ids_to_cpu(self, *args, **kwargs)

    def _copy_valid_sampled_token_count(self, *args: Any, **kwargs: Any) -> None:
        with _no_cuda():
            GPUModelRunner._copy_valid_sampled_token_count(self, *args, **kwargs)


class SpecCPUWorker(vllm.v1.worker.cpu_worker.CPUWorker):
    """The CPU worker, building `SpecCPUModelRunner`."""

    def init_device(self) -> None:
        with unittest.mock.patch.object(
            vllm.v1.worker.cpu_worker, "CPUModelRunner", SpecCPUModelRunner
        ):
            super().init_device()


def _load_unfused_on_0_15() -> None:
    """0.15.1: load Kimi-K2.5 without MLA.

    `KimiK25ForConditionalGeneration.load_weights` maps `q_a_proj` and `kv_a_proj_with_mqa` to the
    fused projection whenever the config has the two ranks; with `VLLM_MLA_DISABLE=1` the layers are
    not fused. It reads `kv_lora_rank` for nothing else, so the stock method runs with that hidden.
    """
    from vllm import envs
    from vllm.model_executor.models.kimi_k25 import KimiK25ForConditionalGeneration

    stock = KimiK25ForConditionalGeneration.load_weights

    def load_weights(self: Any, weights: Any) -> Any:
        text_config = self.config.text_config
        with unittest.mock.patch.object(text_config, "kv_lora_rank", None):
            return stock(self, weights)

    if envs.VLLM_MLA_DISABLE:
        KimiK25ForConditionalGeneration.load_weights = load_weights


if release() == (0, 15):
    _load_unfused_on_0_15()
