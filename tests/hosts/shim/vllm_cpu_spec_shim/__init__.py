# SPDX-License-Identifier: Apache-2.0
"""TEST ONLY: lets vLLM's old CPU builds run EAGLE-3 so that the plugin can be tested without a GPU.

A second general plugin. It changes nothing of what the plugin under test changes: it only stands
in for what the CPU *runner* lacks beside the GPU runner of the same release, and it does so by
letting the GPU runner's own methods run (`worker.py`). What it stands in for:

0.15.1
    What it does for 0.16.0, and two things of the K2.5 model: it asks CUDA for the current device,
    and its loader maps the fused MLA projection although MLA is off (the CPU build has no MLA).
0.16.0 to 0.19.1
    `CPUModelRunner.__init__` asserts that there is no speculation. Its `load_model` neither loads a
    drafter nor sets aux layers: `GPUModelRunner.load_model` runs instead. The methods that copy on
    CUDA streams get streams that do nothing.
0.20.2 to 0.21.0
    `CPUModelRunner.load_model` never sets aux layers: `GPUModelRunner.load_model` runs instead. The
    runner's C++ stand-ins for Triton kernels lack arguments that they are called with (0.20.2:
    `SYNTHETIC_MODE`): the kernels stay, and Triton's interpreter runs them.
0.22.1 and later
    Nothing: `register()` returns at once.

With `CPU_PAGED_ATTENTION=1`, on every release, attention is `paged_attention.py`; with
`COMPARE_DRAFTS=1` the plugin's drafts are compared with stock's (`compare_drafts.py`).

Below 0.22 set `TRITON_INTERPRET=1` and `CUDA_VISIBLE_DEVICES=""`: vLLM's small kernels for
speculation then run in Triton's interpreter.
"""

from __future__ import annotations

import os
import re

WORKER = "vllm_cpu_spec_shim.worker.SpecCPUWorker"
STOCK_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"


def release() -> tuple[int, int]:
    """Major and minor version of the vLLM in this process."""
    import vllm

    match = re.match(r"(\d+)\.(\d+)", vllm.__version__)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def register() -> None:
    """Make the CPU platform choose `SpecCPUWorker`; nothing from 0.22 on."""
    if os.environ.get("CPU_PAGED_ATTENTION") == "1":
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        # By name: the module imports vLLM's attention, which is not whole yet here.
        paged = "vllm_cpu_spec_shim.paged_attention.PagedBackend"
        register_backend(AttentionBackendEnum.CPU_ATTN, paged)
    if os.environ.get("COMPARE_DRAFTS") == "1":
        from vllm_cpu_spec_shim import compare_drafts

        compare_drafts.register()
    if release() >= (0, 22):
        return
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config.__func__
    if getattr(stock, "cpu_spec_shim", False):
        return

    def check_and_update_config(cls, vllm_config):  # type: ignore[no-untyped-def]
        stock(cls, vllm_config)
        if vllm_config.parallel_config.worker_cls == STOCK_WORKER:
            vllm_config.parallel_config.worker_cls = WORKER

    check_and_update_config.cpu_spec_shim = True  # type: ignore[attr-defined]
    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
