# SPDX-License-Identifier: Apache-2.0
"""What the release's classes and ours make of a server's configuration, without a GPU.

    python attention_probe.py JOBS.json RESULTS.json

`JOBS.json` names the targets and drafters. A GPU's worker asks vLLM's registry for TRITON_MLA, and
so does this; the layer and the batches are made by hand, of the release's own classes. The kernel
runs in Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

HEADS, RANK, ROPE, NOPE, V = 4, 512, 64, 32, 32  # The tiny Kimi's.
PAGE = 16


def registry() -> dict[str, Any]:
    """What stands in vLLM's registry without the plugin, with it, switched off, taken back."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from vllm_kimi_eagle3 import patches
    from vllm_kimi_eagle3.host import find_host
    from vllm_kimi_eagle3.patches import mla_attention
    from vllm_kimi_eagle3.settings import Settings

    backend = AttentionBackendEnum.TRITON_MLA
    host = find_host()
    only = (mla_attention.PATCH,)
    said: dict[str, Any] = {"stock": backend.get_path()}

    def state() -> list[Any]:
        (status,) = patches.apply(host, Settings(), only)
        return [status.state.value, status.verified, status.reason]

    said["state"] = state()
    said["ours"] = backend.get_path()
    patches.apply(host, Settings(disabled=frozenset({"mla-attention"})), only)
    said["disabled"] = backend.get_path()
    register_backend(backend, "other.plugin.Backend")
    said["state after another's"] = state()
    patches.revert(only)
    said["another's"] = backend.get_path()
    backend.clear_override()
    said["state again"] = state()
    said["again"] = backend.get_path()
    register_backend(backend, "other.plugin.Backend")
    said["state before another's"] = state()
    said["another's, later"] = backend.get_path()
    # The jobs that follow are with the plugin's.
    backend.clear_override()
    patches.apply(host, Settings(), only)
    return said


@functools.cache
def made(engine: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    arguments = {"dtype": "bfloat16", "max_model_len": 128, "max_num_seqs": 4, **json.loads(engine)}
    return EngineArgs(
        trust_remote_code=True, enforce_eager=True, **arguments
    ).create_engine_config()


def config_of(job: dict[str, Any]) -> Any:
    config = copy.deepcopy(made(json.dumps(job["engine"])))
    for path, value in job.get("set", {}).items():
        # What a configuration refuses on a CPU, or needs files for that would show nothing more.
        *owners, name = path.split(".")
        setattr(functools.reduce(getattr, owners, config), name, value)
    return config


def in_config(config: Any, act: Callable[[], Any]) -> Any:
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(config):
        return act()


def backend_of(config: Any) -> Any:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return in_config(config, AttentionBackendEnum.TRITON_MLA.get_class)


def builder_of(backend: Any, config: Any) -> Any:
    """The back-end's metadata builder for a group with one layer, which is a stand-in."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    layer = SimpleNamespace(
        num_heads=HEADS,
        q_lora_rank=None,
        kv_lora_rank=RANK,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=V,
        prefill_backend=SimpleNamespace(clone=lambda: None),
    )
    context = config.compilation_config.static_forward_context
    context["layer"] = layer
    spec = MLAAttentionSpec(
        block_size=PAGE, num_kv_heads=1, head_size=RANK + ROPE, dtype=torch.bfloat16
    )
    try:
        return in_config(
            config,
            lambda: backend.get_builder_cls()(spec, ["layer"], config, torch.device("cpu")),
        )
    finally:
        del context["layer"]


def batch(query_lens: list[int], seq_lens: list[int], num_tokens: int | None = None) -> Any:
    """A step's metadata. `num_tokens`: with the padding of a full CUDA graph."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    pages = -(-max(seq_lens) // PAGE)
    known = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": lens,
        "_seq_lens_cpu": lens,
        "seq_lens_cpu_upper_bound": lens,
        "_num_computed_tokens_cpu": lens - torch.tensor(query_lens, dtype=torch.int32),
        "num_reqs": len(query_lens),
        "num_actual_tokens": num_tokens or sum(query_lens),
        "max_query_len": max(query_lens),
        "max_seq_len": max(seq_lens),
        # Each request's pages apart from the others', in no order.
        "block_table_tensor": torch.randperm(len(seq_lens) * pages, dtype=torch.int32).view(
            len(seq_lens), pages
        ),
        "slot_mapping": torch.zeros(num_tokens or sum(query_lens), dtype=torch.int64),
        "causal": True,
    }
    fields = {f.name for f in dataclasses.fields(CommonAttentionMetadata)}
    return CommonAttentionMetadata(**{k: v for k, v in known.items() if k in fields})


def split(builder: Any, step: Any, *, capture: bool = False) -> Any:
    """Decodes, their tokens, and prefills of a step, or the class of what it raised."""
    try:
        made = builder.build_for_cudagraph_capture(step) if capture else builder.build(0, step)
    except Exception as error:
        return type(error).__name__
    return [made.num_decodes, made.num_decode_tokens, made.num_prefills]


def classes(job: dict[str, Any]) -> dict[str, Any]:
    """What is resolved and declared for a server."""
    config = config_of(job)
    backend = backend_of(config)
    builder_class = backend.get_builder_cls()
    k = getattr(config.speculative_config, "num_speculative_tokens", 0) or 0
    said = {
        "backend": name_of(backend),
        "name": backend.get_name(),
        "is_stock": backend is stock_backend(),
        "graphs": builder_class.get_cudagraph_support(config, None).name,
        "fp8": backend.supports_kv_cache_dtype("fp8"),
    }
    if "set" not in job:  # Which would be refused here.
        # As a K2.5's model has it while it builds its language model, from 0.17 on.
        inner = config.with_hf_config(
            config.model_config.hf_text_config, architectures=["DeepseekV2ForCausalLM"]
        )
        said["backend within"] = name_of(backend_of(inner))
        said["same plan within"] = plan_in(inner) == plan_in(config)
    if not config.model_config.use_mla:
        return said
    builder = builder_of(backend, config)
    said["threshold"] = builder.reorder_batch_threshold
    verify = batch([k + 1] * 2, [20, 40])
    said["verify"] = split(builder, verify)
    said["capture"] = split(builder, verify, capture=True)
    said["decode"] = split(builder, batch([1] * 3, [20, 40, 1]))
    said["padded"] = split(builder, batch([k + 1] * 2 + [0], [20, 40, 0], 3 * (k + 1)))
    said["ragged"] = split(builder, batch([1, k + 1, 2], [20, 40, 60]))
    return said


def name_of(backend: Any) -> str:
    return f"{backend.__module__}.{backend.__qualname__}"


def plan_in(config: Any) -> Any:
    from vllm_kimi_eagle3.attention.plan import plan_of

    return in_config(config, lambda: plan_of(config))


def stock_backend() -> Any:
    from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend

    return TritonMLABackend


def layer_of(backend: Any, config: Any, kv_cache_dtype: str) -> Any:
    """The back-end's layer, made as `MLAAttention` makes it."""
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.platforms import current_platform
    from vllm.v1.attention.backend import AttentionType

    if getattr(mla_attention, "flash_attn_varlen_func", None) is None:
        # Prefill's, which a CPU build lacks, and without which no layer is made up to 0.20.
        mla_attention.flash_attn_varlen_func = prefill
    # A GPU's multiprocessors, which stock's kernel asks for; not every release's CPU has an answer.
    type(current_platform).num_compute_units = classmethod(lambda cls, device_id=0: 1)

    return in_config(
        config,
        lambda: backend.get_impl_cls()(
            num_heads=HEADS,
            head_size=RANK + ROPE,
            scale=(NOPE + ROPE) ** -0.5,
            num_kv_heads=1,
            alibi_slopes=None,
            sliding_window=None,
            kv_cache_dtype=kv_cache_dtype,
            logits_soft_cap=None,
            attn_type=AttentionType.DECODER,
            kv_sharing_target_layer_name=None,
            q_lora_rank=None,
            kv_lora_rank=RANK,
            qk_nope_head_dim=NOPE,
            qk_rope_head_dim=ROPE,
            qk_head_dim=NOPE + ROPE,
            v_head_dim=V,
            kv_b_proj=SimpleNamespace(weight=torch.zeros(1)),
            indexer=None,
        ),
    )


def prefill(*arguments: Any, **more: Any) -> None:
    raise AssertionError("a decode or verify step was taken for prefill")


def steps(job: dict[str, Any]) -> dict[str, Any]:
    """How far the layer is from the plain-torch reference, per kind of step."""
    config = config_of(job)
    kv_cache_dtype = config.cache_config.cache_dtype
    backend = backend_of(config)
    builder = builder_of(backend, config)
    try:
        layer = layer_of(backend, config, kv_cache_dtype)
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    said: dict[str, Any] = {
        "kv_cache_dtype": layer.kv_cache_dtype,
        "quantises queries": layer.supports_quant_query_input,
    }
    if backend is stock_backend():
        return said  # Its kernel does not run in the interpreter: it is compiled without one here.
    k = config.speculative_config.num_speculative_tokens
    fp8 = kv_cache_dtype == "fp8"
    with recorded() as launches:
        compile_all(config, torch.uint8 if fp8 else torch.bfloat16)
        compiled = {launch[0] for launch in launches}
        for name, (query_lens, seq_lens, tokens) in {
            "decode": ([1] * 3, [1, 37, 70], 3),
            "verify": ([k + 1] * 3, [k + 1, 37, 70], 3 * (k + 1)),
            "padded": ([k + 1] * 2 + [0], [37, 70, 0], 3 * (k + 1)),
            "ragged": ([1, k + 1, 2], [37, k + 1, 70], k + 4),
            # Fewer drafts for all, as at the end of the context.
            "short": ([2] * 3, [2, 37, 70], 6),
            # Without a graph: tokens that pad a step of a data-parallel rank are of no request.
            "one padded": ([1], [37], 4),
            "drafts padded": ([1] * 5, [1, 37, 70, 5, 6], 8),
            "ragged, padded": ([k + 1, 2], [37, 70], 8),
            "ragged, as many": ([k + 1, 2, 0], [37, 70, 0], 3 * (k + 1)),
            "padding alone": ([0] * 4, [0, 0, 0, 1], 16),
            # More requests than a call takes.
            "many": ([k + 1] * 35, list(range(4, 39)), 35 * (k + 1)),
            "many, ragged": ([1, k + 1, 2] * 8, list(range(4, 28)), 8 * (k + 4)),
        }.items():
            launches.clear()
            step = batch(query_lens, seq_lens, tokens)
            said[name] = distance(layer, builder.build(0, step), fp8, query_lens)
            said[name]["launches"] = [launch[1] for launch in launches]
            said[name]["not compiled"] = sum(launch[0] not in compiled for launch in launches)
        launches.clear()
        # Into a graph goes nothing that depends on the step, and any length is right there.
        step = builder.build_for_cudagraph_capture(batch([2] * 3, [2, 37, 70]))
        said["capture"] = distance(layer, step, fp8, [2] * 3)
        said["capture"]["launches"] = [launch[1] for launch in launches]
    return said


def compile_all(config: Any, cache_dtype: torch.dtype) -> None:
    from vllm_kimi_eagle3.attention import backend

    backend.compile_kernels(
        plan_in(config),
        query_dtype=torch.bfloat16,
        cache_dtype=cache_dtype,
        page_size=PAGE,
        device=torch.device("cpu"),
    )


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[Any, list[int]]]]:
    """Every call of the kernel: by what Triton compiles once more, and query length and batch.

    The interpreter compiles nothing, so this is by the rules: constants, and of strides and
    pointers whether 16 divides them.
    """
    from vllm_kimi_eagle3.attention import backend
    from vllm_kimi_eagle3.kernels.arch import arch_of
    from vllm_kimi_eagle3.kernels.mla_decode import combine_shape

    launches: list[tuple[Any, list[int]]] = []
    original = backend.mla_decode

    def aligned(tensor: torch.Tensor) -> tuple[Any, ...]:
        return tensor.dtype, tensor.data_ptr() % 16, [n % 16 for n in tensor.stride()[:-1]]

    def record(q: Any, kv_cache: Any, block_table: Any, seq_lens: Any, **more: Any) -> Any:
        latent, rope = q if isinstance(q, tuple) else (q[..., :RANK], q[..., RANK:])
        requests, query_len = seq_lens.shape[0], more["query_len"]
        rows = requests * query_len * latent.shape[1]
        shape = combine_shape(arch_of(latent.device), rows, RANK)
        key = (
            *(query_len, requests > 16, more["max_batch"], shape, kv_cache.shape[1]),
            *(aligned(latent), aligned(rope), aligned(kv_cache), block_table.data_ptr() % 16),
            *(aligned(seq_lens), aligned(more["workspace"]), more["kv_scale"] is None),
        )
        launches.append((str(key), [query_len, requests]))
        return original(q, kv_cache, block_table, seq_lens, **more)

    backend.mla_decode = record
    try:
        yield launches
    finally:
        backend.mla_decode = original


def distance(layer: Any, metadata: Any, fp8: bool, query_lens: list[int]) -> dict[str, Any]:
    """Of the layer from the reference, which takes one request at a time.

    Args:
        query_lens: of the requests; what is behind them pads the step.
    """
    from vllm_kimi_eagle3.kernels.reference import mla_decode_reference

    torch.manual_seed(0)
    tokens, decode = metadata.num_decode_tokens, metadata.decode
    # As vLLM's layer has them: a product by heads, and a slice of the projection.
    q_nope = torch.randn(HEADS, tokens, RANK).bfloat16().transpose(0, 1)
    q_rope = torch.randn(tokens, HEADS, NOPE + ROPE).bfloat16()[..., NOPE:]
    blocks = decode.block_table.numel()
    cache = torch.randn(blocks, PAGE, RANK + ROPE).bfloat16()
    scale = torch.tensor(0.5)
    if fp8:
        cache = (cache / scale).to(torch.float8_e4m3fn)
    # What no request has may be anything.
    before = SimpleNamespace(_k_scale=scale, _q_scale=torch.tensor(1.0))
    q: Any = (q_nope, q_rope)
    if fp8 and hasattr(layer, "_forward_decode"):
        # 0.15's own forward asks for one tensor here.
        q = layer._decode_concat_quant_fp8_op(q_nope, q_rope, before._q_scale)
    forward = getattr(layer, "forward_mqa", None) or layer._forward_decode
    out, lse = forward(q, cache, metadata, before)
    used = sum(query_lens)
    parts = [
        mla_decode_reference(
            part,
            cache,
            decode.block_table[i : i + 1],
            decode.seq_lens[i : i + 1],
            scale=layer.scale,
            query_len=query_lens[i],
            kv_scale=scale if fp8 else None,
        )
        for i, part in enumerate(torch.cat((q_nope, q_rope), dim=-1)[:used].split(query_lens))
        if query_lens[i]
    ]
    said: dict[str, Any] = {
        "shape": list(out.shape),
        "dtypes": [str(out.dtype), str(lse.dtype)],
        "padding": bool((out[used:] == 0).all() and (lse[used:] == -torch.inf).all()),
    }
    if not parts:
        return said
    expected, expected_lse = (torch.cat(part) for part in zip(*parts, strict=True))
    said["out"] = (out[:used].double() - expected).abs().max().item()
    said["lse"] = (lse[:used].double() - expected_lse).abs().max().item()
    return said


def reserved(job: dict[str, Any]) -> dict[str, Any]:
    """The bytes that the layer, the builder and a step have vLLM's workspace manager hold."""
    from vllm.v1.worker import workspace

    from vllm_kimi_eagle3.kernels.arch import arch_of
    from vllm_kimi_eagle3.kernels.mla_decode import workspace_numel

    config = config_of(job)
    backend = backend_of(config)
    workspace.init_workspace_manager(torch.device("cpu"))
    manager = workspace.current_workspace_manager()

    def taken() -> int:
        return manager._workspace_size_bytes(manager._current_workspaces[0])

    try:
        # The manager empties an accelerator's cache when it grows, and there is none.
        torch.accelerator.empty_cache = lambda: None
        said = {"at first": taken()}
        layer = layer_of(backend, config, "auto")
        said["with the layer"] = taken()
        builder = builder_of(backend, config)
        said["with the builder"] = taken()
        workspace.lock_workspace()
        k = config.speculative_config.num_speculative_tokens
        full = config.scheduler_config.max_num_seqs
        said["most"] = 4 * workspace_numel(
            max_batch=full + -full % 16,
            query_len=k + 1,
            heads=HEADS,
            kv_lora_rank=RANK,
            arch=arch_of(torch.device("cpu")),
        )
        query_lens = [k + 1] * full
        distance(layer, builder.build(0, batch(query_lens, query_lens)), False, query_lens)
        said["after a full step"] = taken()
        return said
    finally:
        workspace.reset_workspace_manager()


def plan(job: dict[str, Any]) -> dict[str, Any]:
    """What is decided for a server, and what the log says of it."""
    import os

    from vllm_kimi_eagle3.attention import backend

    os.environ.update(job.get("env", {}))
    try:
        config = config_of(job)
        made = plan_in(config)
        graphs = backend.MlaDecodeMetadataBuilder.get_cudagraph_support(config, None).name
        return {**dataclasses.asdict(made), "graphs": graphs, "log": backend._summary(made)}
    finally:
        for name in job.get("env", {}):
            del os.environ[name]


def page(job: dict[str, Any]) -> dict[str, Any]:
    """The page size that the release's rule for any GPU comes to, by the layers' back-ends."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.platforms.interface import Platform
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    class Layer(AttentionLayerBase):
        def __init__(self, backend: Any) -> None:
            self.backend = backend

        def get_attn_backend(self) -> Any:
            return self.backend

        def get_kv_cache_spec(self, vllm_config: Any) -> None:
            return None

    if not hasattr(Platform, "update_block_size_for_backend"):
        return {"no rule": True}
    said = {}
    for name, more in (("mla", ()), ("mla and flash", (FlashAttentionBackend,))):
        config = config_of(job)
        config.compilation_config.static_forward_context.update(
            (str(i), Layer(b)) for i, b in enumerate((backend_of(config), *more))
        )
        Platform.update_block_size_for_backend(config)
        said[name] = config.cache_config.block_size
    return said


JOBS = {"page": page, "classes": classes, "steps": steps, "reserved": reserved, "plan": plan}


def main() -> None:
    from tests.kernels.interpreter import exact_numbers

    exact_numbers()
    jobs = json.loads(Path(sys.argv[1]).read_text())
    said: dict[str, Any] = {"registry": registry()}
    for name, job in jobs.items():
        kind = job.pop("kind")
        started = time.monotonic()
        try:
            said[name] = {**JOBS[kind](job), "seconds": round(time.monotonic() - started, 1)}
        except Exception:
            said[name] = {"error": traceback.format_exc()}
    Path(sys.argv[2]).write_text(json.dumps(said, indent=1))


if __name__ == "__main__":
    main()
