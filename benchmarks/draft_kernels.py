# SPDX-License-Identifier: Apache-2.0
"""The drafter's kernels, each against what stock runs in its place, on the GPU that is there.

    python benchmarks/draft_kernels.py [--only skinny_gemm head_keys] [--width shard full]
        [--tokens 1 8 16 32] [--kv bf16 fp8] [--quick] [--out ROWS]

A case is a kernel at a shape of Kimi-K2.5's drafters: `shard` is one rank of TP=8, `full` the whole
drafter. It is checked before it is timed: the result over poisoned outputs against the float64
reference. A wrong one is not timed, and the exit code is 1. Then CUDA graphs of the sides are
replayed in turns. A graph holds as many launches, each over tensors of its own, as make what they
read several times the L2 cache, so that weights and caches come from memory as they do between
the layers of a model.

Stock is vLLM's own op where vLLM can be imported (rms_norm, fused_add_rms_norm, silu_and_mul,
rotary_embedding, reshape_and_cache_flash, concat_and_cache_mla, flash_attn_varlen_func), cuBLAS for
products, and torch for the rest; a row says which. vLLM is not needed. What its compiler fuses is
not taken apart here: draft_step.py times whole draft steps against it.

A row has the median with the 20th and 80th percentile for each side, how many times as long stock
takes, the copy bandwidth of the same run, and the share of it that the least bytes of a launch
make. `--sweep` adds launch configurations of the products that are not in the table. `--dry-run`
checks tiny cases on a CPU, in Triton's interpreter, and times nothing.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional  # noqa: E402

from benchmarks import rows  # noqa: E402
from benchmarks.gpu import capture, copy_bandwidth, gpu_facts, measure  # noqa: E402
from vllm_kimi_eagle3.kernels import draft_reference as elementwise  # noqa: E402
from vllm_kimi_eagle3.kernels import product_reference as products  # noqa: E402
from vllm_kimi_eagle3.kernels.add_rms_norm import add_rms_norm  # noqa: E402
from vllm_kimi_eagle3.kernels.draft_inputs import draft_inputs  # noqa: E402
from vllm_kimi_eagle3.kernels.draft_state import (  # noqa: E402
    DraftBuffers,
    next_step,
    stage_inputs,
    stage_tail,
    take_rows,
)
from vllm_kimi_eagle3.kernels.fc_norm import fc_norm  # noqa: E402
from vllm_kimi_eagle3.kernels.head_argmax import head_keys, ids_of, top_ids  # noqa: E402
from vllm_kimi_eagle3.kernels.head_products import head_products  # noqa: E402
from vllm_kimi_eagle3.kernels.mha_decode import make_workspace, mha_decode  # noqa: E402
from vllm_kimi_eagle3.kernels.mha_reference import (  # noqa: E402
    ids_of_keys,
    mha_decode_reference,
    next_step_reference,
)
from vllm_kimi_eagle3.kernels.mla_rope_kv_write import mla_latents, mla_rope_q  # noqa: E402
from vllm_kimi_eagle3.kernels.rope_kv_write import rope_kv_write  # noqa: E402
from vllm_kimi_eagle3.kernels.silu_mul import silu_mul  # noqa: E402
from vllm_kimi_eagle3.kernels.skinny_gemm import (  # noqa: E402
    MAX_ROWS,
    ProductConfig,
    skinny_gemm,
    workspace_for,
)

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
KV_DTYPES = {"bf16": BF16, "fp8": FP8}
EPS = 1e-5
# A graph's launches read so many times as much as the L2 cache holds, if as many suffice, and their
# tensors fit.
L2_CACHES = 3
MOST_LAUNCHES = 64
MOST_BYTES = 6e9
MEASURED_MS = 20.0  # Per case and side.
ROUNDS = (7, 40)
OURS, STOCK = "ours", "stock"
# Relative to the largest magnitude of a result: one rounding to bfloat16, two, and one to fp8.
ONCE, TWICE, TO_FP8 = 2**-8, 2**-7, 2**-4 + 2**-7


@dataclass(frozen=True)
class Sizes:
    """A drafter, or one rank's part of it."""

    hidden: int = 7168
    heads: int = 8
    kv_heads: int = 1
    head_dim: int = 128
    intermediate: int = 2304
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    rope_dim: int = 64
    nope_dim: int = 128
    page: int = 64
    vocabularies: tuple[int, ...] = (4000, 20480)
    target_vocabulary: int = 163840
    contexts: tuple[int, ...] = (512, 8192)

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """Columns and inner size of each product."""
        attention = (self.heads + 2 * self.kv_heads) * self.head_dim
        mla_head = self.nope_dim + self.rope_dim
        latents = self.q_lora_rank + self.kv_lora_rank + self.rope_dim
        return {
            "qkv": (attention, 2 * self.hidden),
            "o": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
            "qkv_a": (latents, 2 * self.hidden),
            "q_b": (self.heads * mla_head, self.q_lora_rank),
        }


SIZES = {
    "shard": Sizes(),
    "full": Sizes(heads=64, kv_heads=8, intermediate=18432, vocabularies=(32000, 163840)),
    "tiny": Sizes(
        hidden=96, heads=4, kv_heads=2, head_dim=64, intermediate=80, q_lora_rank=48,
        kv_lora_rank=32, rope_dim=16, nope_dim=32, page=16, vocabularies=(70, 200),
        target_vocabulary=200, contexts=(40,),
    ),
}  # fmt: skip


@functools.cache
def vllm_ops() -> Any:
    """vLLM's custom ops, or None where they cannot be had."""
    if not torch.cuda.is_available():
        return None
    try:
        import vllm._custom_ops as ops

        return ops if hasattr(torch.ops._C, "rms_norm") else None
    except Exception:
        return None


@functools.cache
def flash_attention() -> Any:
    """vLLM's copy of FlashAttention, or None."""
    if vllm_ops() is None or torch.cuda.get_device_capability() != (9, 0):
        return None
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        return flash_attn_varlen_func
    except Exception:
        return None


@functools.cache
def shared_workspace(device: torch.device) -> Tensor:
    """One workspace serves all products that run after each other."""
    return workspace_for(device)


@functools.cache
def embedding_table(hidden: int, device: torch.device) -> Tensor:
    """A part of an embedding."""
    return torch.randn(4096, hidden, device=device).to(BF16)


@functools.cache
def cos_sin_table(width: int, device: torch.device, dtype: torch.dtype = BF16) -> Tensor:
    """Cosines and sines of 9000 positions."""
    angles = torch.arange(9000.0)[:, None] * 10000.0 ** -(torch.arange(0, width, 2) / width)
    return torch.cat([angles.cos(), angles.sin()], -1).to(dtype).to(device)


def relative_error(*pairs: tuple[Tensor, Tensor]) -> float:
    """The largest error of (result, reference) relative to the reference's largest magnitude;
    infinite where a result is not finite."""
    worst = 0.0
    for got, exact in pairs:
        error = float((got.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-30))
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


def mismatch(*pairs: tuple[Tensor, Tensor]) -> float:
    """0 where all whole numbers are equal, and infinite otherwise."""
    return 0.0 if all(torch.equal(a.long(), b.long()) for a, b in pairs) else math.inf


def rms_norm(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Stock's."""
    if vllm_ops() is None:
        return functional.rms_norm(x, x.shape[-1:], weight, EPS)
    out = torch.empty_like(x) if out is None else out
    vllm_ops().rms_norm(out, x, weight, EPS)
    return out


def rotated(x: Tensor, positions: Tensor, cos_sin: Tensor, neox: bool) -> Tensor:
    """Rotary embedding of [T, heads, width] as vLLM's `forward_native` has it."""
    cos, sin = cos_sin[positions][:, None].chunk(2, -1)
    if neox:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


class Case:
    """One launch of a kernel, over tensors of its own.

    Attributes:
        kernel: the function's name.
        shape: what the row says of it.
        least_bytes: that a launch has to read and to write.
        allowed: the largest relative error.
        stock_is: what `stock` calls.
    """

    kernel: str
    shape: dict[str, Any]
    least_bytes: int
    allowed: float = ONCE
    stock_is: str = "torch"

    def reset(self, seed: int) -> None:
        """New inputs in the same tensors; outputs hold NaN."""
        raise NotImplementedError

    def ours(self) -> object:
        """Launch the kernel."""
        raise NotImplementedError

    def stock(self) -> object:
        """What serves in its place."""
        raise NotImplementedError

    def check(self) -> float:
        """The relative error of what `ours` left, infinite if that is nonsense."""
        raise NotImplementedError

    def results(self) -> list[Tensor]:
        """What `ours` writes."""
        raise NotImplementedError

    def sides(self) -> dict[str, Callable[[], object]]:
        """Everything that is timed."""
        return {OURS: self.ours, STOCK: self.stock}

    def sweep(self) -> dict[str, Callable[[], object]]:
        """Further launch configurations."""
        return {}


def fill(seed: int, *tensors: Tensor) -> None:
    """Normally distributed numbers."""
    generator = torch.Generator(tensors[0].device).manual_seed(seed)
    for tensor in tensors:
        if tensor.dtype == FP8:
            for part in tensor.split(1024):
                numbers = torch.empty(part.shape, device=part.device).normal_(generator=generator)
                part.copy_(numbers.to(FP8))
        else:
            tensor.normal_(generator=generator)


def integers(seed: int, most: int, *shape: int, device: torch.device) -> Tensor:
    """int64 from 0 to `most` - 1."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(0, most, shape, generator=generator, device=device)


def poison(*tensors: Tensor) -> None:
    """NaN, or a number that no result has."""
    for tensor in tensors:
        if tensor.dtype == FP8:
            tensor.view(torch.uint8).fill_(0x7F)
        else:
            tensor.fill_(torch.nan if tensor.is_floating_point() else 7777)


class DraftInputs(Case):
    kernel = "draft_inputs"

    def __init__(self, sizes: Sizes, tokens: int, device: torch.device) -> None:
        self.table = embedding_table(sizes.hidden, device)
        self.hidden = torch.empty(tokens, sizes.hidden, dtype=BF16, device=device)
        self.norms = torch.empty(2, sizes.hidden, dtype=BF16, device=device)
        self.ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.out = torch.empty(tokens, 2 * sizes.hidden, dtype=BF16, device=device)
        self.shape = {"hidden": sizes.hidden}
        self.allowed = TWICE
        self.stock_is = "embedding, 2 x rms_norm, cat"
        self.least_bytes = 2 * (4 * self.hidden.numel() + self.norms.numel())

    def reset(self, seed: int) -> None:
        fill(seed, self.hidden, self.norms)
        self.ids.copy_(integers(seed, 4096, len(self.ids), device=self.ids.device))
        poison(self.out)

    def keywords(self) -> dict[str, Any]:
        return {
            "input_norm": self.norms[0], "hidden_norm": self.norms[1], "eps": EPS,
            "token_ids": self.ids, "embed_table": self.table,
        }  # fmt: skip

    def ours(self) -> object:
        return draft_inputs(self.hidden, **self.keywords(), out=self.out)

    def stock(self) -> object:
        embeds = functional.embedding(self.ids, self.table)
        normed = rms_norm(embeds, self.norms[0]), rms_norm(self.hidden, self.norms[1])
        return torch.cat(normed, -1)

    def check(self) -> float:
        exact = elementwise.draft_inputs_reference(self.hidden, **self.keywords())
        return relative_error((self.out, exact))

    def results(self) -> list[Tensor]:
        return [self.out]


class FcNorm(Case):
    kernel = "fc_norm"

    def __init__(self, sizes: Sizes, tokens: int, chunks: int, device: torch.device) -> None:
        width = 3 * sizes.hidden // chunks
        self.hidden = torch.empty(tokens, 3 * sizes.hidden, dtype=BF16, device=device)
        self.weights = torch.empty(chunks, width, dtype=BF16, device=device)
        self.out = torch.empty_like(self.hidden)
        self.shape = {"columns": width, "chunks": chunks}
        self.allowed = TWICE
        self.stock_is = "rms_norm" if chunks == 1 else f"{chunks} x rms_norm, cat"
        self.least_bytes = 2 * (2 * self.hidden.numel() + self.weights.numel())

    def reset(self, seed: int) -> None:
        fill(seed, self.hidden, self.weights)
        poison(self.out)

    def ours(self) -> object:
        return fc_norm(self.hidden, self.weights, EPS, out=self.out)

    def stock(self) -> object:
        if len(self.weights) == 1:
            return rms_norm(self.hidden, self.weights[0])
        parts = self.hidden.chunk(len(self.weights), -1)
        return torch.cat(
            [rms_norm(x.contiguous(), w) for x, w in zip(parts, self.weights, strict=True)], -1
        )

    def check(self) -> float:
        exact = elementwise.fc_norm_reference(self.hidden, self.weights, EPS)
        return relative_error((self.out, exact))

    def results(self) -> list[Tensor]:
        return [self.out]


class AddRmsNorm(Case):
    kernel = "add_rms_norm"

    def __init__(self, sizes: Sizes, tokens: int, device: torch.device) -> None:
        shape = (tokens, sizes.hidden)
        self.x, self.residual, self.out, self.sum_out, self.stock_x, self.stock_residual = (
            torch.empty(shape, dtype=BF16, device=device) for _ in range(6)
        )
        self.weight = torch.empty(sizes.hidden, dtype=BF16, device=device)
        self.shape = {"hidden": sizes.hidden}
        self.allowed = TWICE
        self.stock_is = "fused_add_rms_norm" if vllm_ops() else "torch: add, rms_norm"
        self.least_bytes = 2 * (4 * self.x.numel() + self.weight.numel())

    def reset(self, seed: int) -> None:
        fill(seed, self.x, self.residual, self.weight)
        self.stock_x.copy_(self.x)
        self.stock_residual.copy_(self.residual)
        poison(self.out, self.sum_out)

    def ours(self) -> object:
        return add_rms_norm(
            self.x, self.residual, self.weight, EPS, out=self.out, sum_out=self.sum_out
        )

    def stock(self) -> object:
        if vllm_ops() is not None:
            return vllm_ops().fused_add_rms_norm(
                self.stock_x, self.stock_residual, self.weight, EPS
            )
        total = self.x + self.residual
        return rms_norm(total, self.weight), total

    def check(self) -> float:
        exact = elementwise.add_rms_norm_reference(self.x, self.residual, self.weight, EPS)
        return relative_error((self.out, exact[0]), (self.sum_out, exact[1]))

    def results(self) -> list[Tensor]:
        return [self.out, self.sum_out]


class SiluMul(Case):
    kernel = "silu_mul"

    def __init__(self, sizes: Sizes, tokens: int, device: torch.device) -> None:
        self.gate_up = torch.empty(tokens, 2 * sizes.intermediate, dtype=BF16, device=device)
        self.out = torch.empty(tokens, sizes.intermediate, dtype=BF16, device=device)
        self.shape = {"intermediate": sizes.intermediate}
        self.allowed = TWICE
        self.stock_is = "silu_and_mul" if vllm_ops() else "torch: silu, mul"
        self.stock_out = torch.empty_like(self.out)
        self.least_bytes = 2 * (self.gate_up.numel() + self.out.numel())

    def reset(self, seed: int) -> None:
        fill(seed, self.gate_up)
        poison(self.out)

    def ours(self) -> object:
        return silu_mul(self.gate_up, out=self.out)

    def stock(self) -> object:
        if vllm_ops() is not None:
            return torch.ops._C.silu_and_mul(self.stock_out, self.gate_up)
        gate, up = self.gate_up.chunk(2, -1)
        return functional.silu(gate) * up

    def check(self) -> float:
        return relative_error((self.out, elementwise.silu_mul_reference(self.gate_up)))

    def results(self) -> list[Tensor]:
        return [self.out]


def places(seed: int, tokens: int, blocks: int, page: int, device: torch.device) -> Tensor:
    """Distinct slots, the last of them -1 if there are several tokens."""
    generator = torch.Generator(device).manual_seed(seed)
    slots = torch.randperm(blocks * page, generator=generator, device=device)[:tokens]
    if tokens > 1:
        slots[-1] = -1
    return slots


class RopeKvWrite(Case):
    kernel = "rope_kv_write"

    def __init__(
        self, sizes: Sizes, tokens: int, kv: str, device: torch.device, *, by_heads: bool = False
    ) -> None:
        self.sizes, self.kv, dtype = sizes, kv, KV_DTYPES[kv]
        heads, kv_heads, dim = sizes.heads, sizes.kv_heads, sizes.head_dim
        self.given = torch.empty(tokens, (heads + 2 * kv_heads) * dim, dtype=BF16, device=device)
        self.qkv, self.stock_qkv = torch.empty_like(self.given), torch.empty_like(self.given)
        self.blocks = 2 + tokens // sizes.page
        # Pages of tokens (NHD), or of heads (HND).
        first, second = (kv_heads, sizes.page) if by_heads else (sizes.page, kv_heads)
        cache = torch.empty(2, self.blocks, first, second, dim, dtype=dtype, device=device)
        self.cache = cache.transpose(2, 3) if by_heads else cache
        self.before = torch.empty_like(self.cache)
        self.positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.slots = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.cos_sin = cos_sin_table(dim, device)
        self.scale = torch.full((), 0.5 if kv == "fp8" else 1.0, device=device)
        self.shape = {
            "heads": heads, "kv_heads": kv_heads, "kv": kv, "layout": "HND" if by_heads else "NHD",
        }  # fmt: skip
        self.allowed = TO_FP8 if kv == "fp8" else TWICE
        self.stock_is = (
            "rotary_embedding, reshape_and_cache_flash" if vllm_ops() else "torch: rope, index_put"
        )
        written = 2 * tokens * kv_heads * dim
        self.least_bytes = 2 * (2 * self.given.numel() - written // 2) + written * dtype.itemsize

    def reset(self, seed: int) -> None:
        fill(seed, self.given)
        fill(seed + 1, self.cache)
        self.before.copy_(self.cache)
        self.qkv.copy_(self.given)
        self.stock_qkv.copy_(self.given)
        self.positions.copy_(
            integers(seed, 9000, len(self.positions), device=self.positions.device)
        )
        self.slots.copy_(
            places(seed, len(self.slots), self.blocks, self.sizes.page, self.slots.device)
        )

    def keywords(self) -> dict[str, Any]:
        scales = {"k_scale": self.scale, "v_scale": self.scale} if self.kv == "fp8" else {}
        return {
            "heads": self.sizes.heads, "kv_heads": self.sizes.kv_heads,
            "head_dim": self.sizes.head_dim, **scales,
        }  # fmt: skip

    def ours(self) -> object:
        return rope_kv_write(
            self.qkv, self.positions, self.cos_sin, self.slots, self.cache[0], self.cache[1],
            page_size=self.sizes.page, **self.keywords(),
        )  # fmt: skip

    def stock(self) -> object:
        heads, kv_heads, dim = self.sizes.heads, self.sizes.kv_heads, self.sizes.head_dim
        widths = [heads * dim, kv_heads * dim, kv_heads * dim]
        q, k, v = self.stock_qkv.split(widths, -1)
        if ops := vllm_ops():
            ops.rotary_embedding(self.positions, q, k, dim, self.cos_sin, True)
            cache = self.before.view(torch.uint8) if self.kv == "fp8" else self.before
            return ops.reshape_and_cache_flash(
                k.unflatten(-1, (kv_heads, dim)), v.unflatten(-1, (kv_heads, dim)), cache[0],
                cache[1], self.slots, "fp8" if self.kv == "fp8" else "auto", self.scale, self.scale,
            )  # fmt: skip
        q, k = (
            rotated(x.unflatten(-1, (-1, dim)), self.positions, self.cos_sin, True) for x in (q, k)
        )
        k, v = ((x / self.scale).to(self.cache.dtype) for x in (k, v.unflatten(-1, (-1, dim))))
        at = self.slots.clamp(min=0)
        kind = torch.uint8 if self.kv == "fp8" else BF16
        for cache, new in zip(self.before, (k, v), strict=True):
            cache.view(kind)[at // self.sizes.page, at % self.sizes.page] = new.view(kind)
        return q

    def check(self) -> float:
        q, k, k_cache, v_cache = elementwise.rope_kv_write_reference(
            self.given, self.positions, self.cos_sin, self.slots, self.before[0], self.before[1],
            **self.keywords(),
        )  # fmt: skip
        got = self.qkv.unflatten(-1, (-1, self.sizes.head_dim))
        heads, kv_heads = self.sizes.heads, self.sizes.kv_heads
        written = self.slots[self.slots >= 0]
        at = written // self.sizes.page, written % self.sizes.page
        exact = relative_error(
            (got[:, :heads], q), (got[:, heads : heads + kv_heads], k),
            (got[:, heads + kv_heads :], self.given.unflatten(-1, (-1, self.sizes.head_dim))[
                :, heads + kv_heads :
            ].double()),
        )  # fmt: skip
        if exact > TWICE:
            return math.inf
        # Nothing else in the caches was touched.
        for cache, before in zip(self.cache, self.before, strict=True):
            same = before.clone()
            same[at] = cache[at]
            if not torch.equal(same.view(torch.uint8), cache.contiguous().view(torch.uint8)):
                return math.inf
        return relative_error(
            (self.cache[0][at].float(), k_cache[at]), (self.cache[1][at].float(), v_cache[at])
        )

    def results(self) -> list[Tensor]:
        return [self.qkv, self.cache.contiguous().view(torch.uint8)]


class MlaLatents(Case):
    kernel = "mla_latents"

    def __init__(self, sizes: Sizes, tokens: int, kv: str, device: torch.device) -> None:
        self.sizes, self.kv, dtype = sizes, kv, KV_DTYPES[kv]
        self.widths = [sizes.q_lora_rank, sizes.kv_lora_rank, sizes.rope_dim]
        row = sizes.kv_lora_rank + sizes.rope_dim
        self.given = torch.empty(tokens, sum(self.widths), dtype=BF16, device=device)
        self.qkv_a, self.stock_qkv_a = torch.empty_like(self.given), torch.empty_like(self.given)
        self.blocks = 2 + tokens // sizes.page
        self.cache = torch.empty(self.blocks, sizes.page, row, dtype=dtype, device=device)
        self.before = torch.empty_like(self.cache)
        self.q_norm = torch.empty(sizes.q_lora_rank, dtype=BF16, device=device)
        self.kv_norm = torch.empty(sizes.kv_lora_rank, dtype=BF16, device=device)
        self.out = torch.empty(tokens, sizes.q_lora_rank, dtype=BF16, device=device)
        self.positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.slots = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.cos_sin = cos_sin_table(sizes.rope_dim, device)
        self.scale = torch.full((), 0.5 if kv == "fp8" else 1.0, device=device)
        self.shape = {"q_lora_rank": sizes.q_lora_rank, "kv": kv}
        self.allowed = TO_FP8 if kv == "fp8" else TWICE
        self.stock_is = (
            "2 x rms_norm, rotary_embedding, concat_and_cache_mla"
            if vllm_ops()
            else "torch: 2 x rms_norm, rope, index_put"
        )
        self.least_bytes = 2 * (self.given.numel() + self.out.numel()) + tokens * row * (
            dtype.itemsize
        )

    def reset(self, seed: int) -> None:
        fill(seed, self.given, self.q_norm, self.kv_norm)
        fill(seed + 1, self.cache)
        self.before.copy_(self.cache)
        self.qkv_a.copy_(self.given)
        self.stock_qkv_a.copy_(self.given)
        self.positions.copy_(
            integers(seed, 9000, len(self.positions), device=self.positions.device)
        )
        self.slots.copy_(
            places(seed, len(self.slots), self.blocks, self.sizes.page, self.slots.device)
        )
        poison(self.out)

    def keywords(self) -> dict[str, Any]:
        return {
            "q_lora_rank": self.widths[0], "kv_lora_rank": self.widths[1],
            "rope_dim": self.widths[2], "q_norm": self.q_norm, "kv_norm": self.kv_norm, "eps": EPS,
            "kv_scale": self.scale if self.kv == "fp8" else None,
        }  # fmt: skip

    def ours(self) -> object:
        return mla_latents(
            self.qkv_a, self.positions, self.cos_sin, self.slots, self.cache,
            page_size=self.sizes.page, out=self.out, **self.keywords(),
        )  # fmt: skip

    def stock(self) -> object:
        q, latent, key = self.stock_qkv_a.split(self.widths, -1)
        q = rms_norm(q.contiguous(), self.q_norm)
        latent = rms_norm(latent.contiguous(), self.kv_norm)
        if ops := vllm_ops():
            ops.rotary_embedding(
                self.positions, key[:, None], None, self.sizes.rope_dim, self.cos_sin, False
            )
            cache = self.before.view(torch.uint8) if self.kv == "fp8" else self.before
            ops.concat_and_cache_mla(
                latent, key, cache, self.slots, "fp8" if self.kv == "fp8" else "auto", self.scale
            )
            return q
        key = rotated(key[:, None], self.positions, self.cos_sin, False)[:, 0]
        row = (torch.cat([latent, key], -1) / self.scale).to(self.cache.dtype)
        at = self.slots.clamp(min=0)
        kind = torch.uint8 if self.kv == "fp8" else BF16
        self.before.view(kind)[at // self.sizes.page, at % self.sizes.page] = row.view(kind)
        return q

    def check(self) -> float:
        q, _, cache = elementwise.mla_latents_reference(
            self.given, self.positions, self.cos_sin, self.slots, self.before, **self.keywords()
        )
        written = self.slots[self.slots >= 0]
        at = written // self.sizes.page, written % self.sizes.page
        same = self.before.clone()
        same[at] = self.cache[at]
        if relative_error((self.out, q)) > TWICE or not torch.equal(
            same.view(torch.uint8), self.cache.view(torch.uint8)
        ):
            return math.inf
        return relative_error((self.cache[at].float(), cache[at]))

    def results(self) -> list[Tensor]:
        return [self.out, self.cache.view(torch.uint8)]


class MlaRopeQ(Case):
    kernel = "mla_rope_q"

    def __init__(self, sizes: Sizes, tokens: int, device: torch.device) -> None:
        self.sizes = sizes
        width = sizes.nope_dim + sizes.rope_dim
        self.given = torch.empty(tokens, sizes.heads, width, dtype=BF16, device=device)
        self.q, self.stock_q = torch.empty_like(self.given), torch.empty_like(self.given)
        self.positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.cos_sin = cos_sin_table(sizes.rope_dim, device)
        self.shape = {"heads": sizes.heads}
        self.stock_is = "rotary_embedding" if vllm_ops() else "torch: rope"
        self.least_bytes = 2 * 2 * tokens * sizes.heads * sizes.rope_dim

    def reset(self, seed: int) -> None:
        fill(seed, self.given)
        self.q.copy_(self.given)
        self.stock_q.copy_(self.given)
        self.positions.copy_(
            integers(seed, 9000, len(self.positions), device=self.positions.device)
        )

    def keywords(self) -> dict[str, Any]:
        return {"nope_dim": self.sizes.nope_dim, "rope_dim": self.sizes.rope_dim}

    def ours(self) -> object:
        return mla_rope_q(self.q, self.positions, self.cos_sin, **self.keywords())

    def stock(self) -> object:
        rope = self.stock_q[..., self.sizes.nope_dim :]
        if ops := vllm_ops():
            return ops.rotary_embedding(
                self.positions, rope, None, self.sizes.rope_dim, self.cos_sin, False
            )
        rope.copy_(rotated(rope, self.positions, self.cos_sin, False))
        return rope

    def check(self) -> float:
        nope, rope = elementwise.mla_rope_q_reference(
            self.given, self.positions, self.cos_sin, **self.keywords()
        )
        return relative_error((self.q, torch.cat([nope, rope], -1)))

    def results(self) -> list[Tensor]:
        return [self.q]


class MhaDecode(Case):
    kernel = "mha_decode"

    def __init__(
        self,
        sizes: Sizes,
        tokens: int,
        kv: str,
        device: torch.device,
        *,
        context: int,
        query_len: int = 1,
        by_heads: bool = False,
    ) -> None:
        self.sizes, self.kv, self.query_len, self.context = sizes, kv, query_len, context
        heads, kv_heads, dim, page = sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.page
        batch, dtype = tokens, KV_DTYPES[kv]
        self.q = torch.empty(batch * query_len, heads, dim, dtype=BF16, device=device)
        each = -(-context // page)
        first, second = (kv_heads, page) if by_heads else (page, kv_heads)
        shape = (2, batch * each, first, second, dim)
        cache = torch.empty(shape, dtype=dtype, device=device)
        self.cache = cache.transpose(2, 3) if by_heads else cache
        self.table = torch.zeros(batch, 2 * each, dtype=torch.int32, device=device)
        self.lens = torch.full((batch,), context, dtype=torch.int32, device=device)
        self.starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * query_len
        self.out = torch.empty_like(self.q)
        self.scale = dim**-0.5
        self.kv_scale = torch.full((), 0.5, device=device)
        self.workspace = make_workspace(
            max_batch=batch, query_len=query_len, heads=heads, kv_heads=kv_heads, head_dim=dim,
            device=device,
        )  # fmt: skip
        self.shape = {
            "heads": heads, "kv_heads": kv_heads, "kv": kv, "query_len": query_len, "ctx": context,
            "layout": "HND" if by_heads else "NHD",
        }  # fmt: skip
        self.allowed = 2**-6
        self.flash = flash_attention() if kv == "bf16" and not by_heads else None
        self.stock_is = (
            "flash_attn_varlen_func" if self.flash else "torch: sdpa over contiguous bf16 keys"
        )
        self.gathered: tuple[Tensor, Tensor] | None = None
        self.least_bytes = (
            2 * batch * context * kv_heads * dim * dtype.itemsize + 2 * 2 * self.q.numel()
        )

    def reset(self, seed: int) -> None:
        fill(seed, self.q)
        fill(seed + 1, self.cache)
        generator = torch.Generator(self.q.device).manual_seed(seed)
        blocks = self.cache.shape[1]
        order = torch.randperm(blocks, generator=generator, device=self.q.device).int()
        each = blocks // len(self.lens)
        self.table[:, :each] = order.view(-1, each)
        self.gathered = None
        poison(self.out)

    def scales(self) -> dict[str, Tensor]:
        return {"k_scale": self.kv_scale, "v_scale": self.kv_scale} if self.kv == "fp8" else {}

    def ours(self) -> object:
        return mha_decode(
            self.q, self.cache[0], self.cache[1], self.table, self.lens, scale=self.scale,
            query_len=self.query_len, workspace=self.workspace, out=self.out, **self.scales(),
        )  # fmt: skip

    def stock(self) -> object:
        if self.flash is not None:
            return self.flash(
                self.q, self.cache[0], self.cache[1], max_seqlen_q=self.query_len,
                cu_seqlens_q=self.starts, max_seqlen_k=self.context, seqused_k=self.lens,
                softmax_scale=self.scale, causal=True, block_table=self.table,
            )  # fmt: skip
        if self.gathered is None:
            batch, each = len(self.lens), self.cache.shape[1] // len(self.lens)
            at = self.table[:, :each].long()
            factor = self.kv_scale if self.kv == "fp8" else 1.0
            k, v = (
                (cache[at].flatten(1, 2)[:, : self.context].float() * factor)
                .to(BF16).transpose(1, 2).contiguous()
                for cache in self.cache
            )  # fmt: skip
            seen = torch.arange(self.context, device=self.q.device)
            seen = seen <= self.context - self.query_len + seen[: self.query_len, None]
            self.gathered, self.mask = (k, v), seen if self.query_len > 1 else None
            assert batch == k.shape[0]
        q = self.q.unflatten(0, (-1, self.query_len)).transpose(1, 2)
        return functional.scaled_dot_product_attention(
            q, *self.gathered, attn_mask=self.mask, scale=self.scale, enable_gqa=True
        )

    def check(self) -> float:
        exact = mha_decode_reference(
            self.q, self.cache[0], self.cache[1], self.table, self.lens, scale=self.scale,
            query_len=self.query_len, **self.scales(),
        )  # fmt: skip
        return relative_error((self.out, exact))

    def results(self) -> list[Tensor]:
        return [self.out]


def swept_configs(rows_: int, device: torch.device) -> Iterator[tuple[str, ProductConfig, int]]:
    """Launch configurations of products that are worth a try, and parts of the inner size."""
    block_t = next(t for t in (16, 32, 64) if t >= min(rows_, MAX_ROWS))
    shared = 98 * 1024
    if device.type == "cuda":
        shared = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    for block_n, block_k, warps, stages in itertools.product(
        (16, 32, 64, 128), (64, 128, 256), (4, 8), (3, 4, 6)
    ):
        size = (block_n + block_t) * block_k * 2 * (stages - (block_t < 64))
        # From 8 to 40 KiB a tile; a warp has eight columns at least.
        if size > shared or not 8 * 1024 <= block_n * block_k * 2 <= 40 * 1024:
            continue
        if block_n < 8 * warps:
            continue
        config = ProductConfig(block_t, block_n, block_k, warps, stages, 1)
        for splits in (1, 2, 3, 4, 6, 8, 12):
            yield f"{block_n}x{block_k} w{warps} s{stages} /{splits}", config, splits


class SkinnyGemm(Case):
    kernel = "skinny_gemm"
    stock_is = "cuBLAS"

    def __init__(self, name: str, columns: int, size_k: int, tokens: int, device: torch.device):
        self.x = torch.empty(tokens, size_k, dtype=BF16, device=device)
        self.weight = torch.empty(columns, size_k, dtype=BF16, device=device)
        self.out = torch.empty(tokens, columns, dtype=BF16, device=device)
        self.workspace = shared_workspace(device)
        self.shape = {"product": name, "columns": columns, "inner": size_k}
        self.least_bytes = 2 * (self.x.numel() + self.weight.numel() + self.out.numel())

    def reset(self, seed: int) -> None:
        fill(seed, self.x, self.weight)
        poison(self.out)

    def ours(self) -> object:
        return skinny_gemm(self.x, self.weight, out=self.out, workspace=self.workspace)

    def stock(self) -> object:
        return functional.linear(self.x, self.weight)

    def check(self) -> float:
        worst = 0.0
        for out, weight in zip(self.out.split(8192, 1), self.weight.split(8192), strict=True):
            exact = products.skinny_gemm_reference(self.x, weight)
            worst = max(worst, relative_error((out, exact)))
        return worst

    def results(self) -> list[Tensor]:
        return [self.out]

    def sides(self) -> dict[str, Callable[[], object]]:
        whole = functools.partial(skinny_gemm, self.x, self.weight, out=self.out)
        return {**super().sides(), "ours, not split": whole}

    def sweep(self) -> dict[str, Callable[[], object]]:
        return {
            name: functools.partial(
                skinny_gemm, self.x, self.weight, out=self.out, config=config, splits=splits,
                workspace=self.space(config, splits),
            )
            for name, config, splits in swept_configs(len(self.x), self.x.device)
        }  # fmt: skip

    def space(self, config: ProductConfig, splits: int) -> Tensor:
        """A workspace for more parts than the table has."""
        parts = splits * (len(self.weight) + config.block_n) * config.block_t
        return sweep_workspace(1 << (parts - 1).bit_length(), self.x.device)


@functools.cache
def sweep_workspace(parts: int, device: torch.device) -> Tensor:
    """A workspace for so many elements of parts."""
    return torch.zeros(workspace_for(device, rows=1).numel() + parts, device=device)


class HeadKeys(Case):
    kernel = "head_keys"

    def __init__(self, sizes: Sizes, vocabulary: int, tokens: int, device: torch.device) -> None:
        self.x = torch.empty(tokens, sizes.hidden, dtype=BF16, device=device)
        self.weight = torch.empty(vocabulary, sizes.hidden, dtype=BF16, device=device)
        self.keys = torch.empty(tokens, dtype=torch.int64, device=device)
        self.workspace = shared_workspace(device)
        self.target_vocabulary = sizes.target_vocabulary
        # A shard's columns are a part of the draft vocabulary; scattering follows the gather.
        whole = sizes == SIZES["full"]
        self.d2t: Tensor | None = None
        if vocabulary < sizes.target_vocabulary:
            chosen = torch.randperm(sizes.target_vocabulary, device=device)[:vocabulary]
            self.d2t = chosen.sort().values - torch.arange(vocabulary, device=device)
        self.scatters = whole and self.d2t is not None
        self.shape = {"columns": vocabulary, "hidden": sizes.hidden}
        self.stock_is = "cuBLAS, scatter, argmax" if self.scatters else "cuBLAS, argmax"
        self.least_bytes = 2 * (self.x.numel() + self.weight.numel()) + 8 * tokens

    def reset(self, seed: int) -> None:
        fill(seed, self.x, self.weight)
        poison(self.keys)

    def keywords(self) -> dict[str, Any]:
        return {"rows": len(self.weight), "d2t": self.d2t, "keys_out": self.keys}

    def ours(self) -> object:
        return head_keys(self.x, self.weight, **self.keywords(), workspace=self.workspace)

    def stock(self) -> object:
        logits = functional.linear(self.x, self.weight)
        if self.scatters:
            assert self.d2t is not None
            scattered = logits.new_full((len(logits), self.target_vocabulary), -torch.inf)
            targets = torch.arange(len(self.d2t), device=logits.device) + self.d2t
            scattered[:, targets] = logits
            logits = scattered
        return logits.argmax(-1)

    def check(self) -> float:
        """How far the chosen column's exact logit is from the best one's, and the key's own logit
        from the exact one."""
        parts = [
            products.head_logits_reference(self.x, part, rows=len(part))
            for part in self.weight.split(8192)
        ]
        logits = torch.cat(parts, -1)
        draft = torch.arange(len(self.weight), device=logits.device)
        targets = draft if self.d2t is None else draft + self.d2t
        chosen = torch.searchsorted(targets, ids_of(self.keys)).clamp(max=len(targets) - 1)
        if not torch.equal(targets[chosen], ids_of(self.keys)):
            return math.inf
        exact = logits.gather(1, chosen[:, None])[:, 0]
        code = (self.keys >> 32).int()
        held = torch.where(code < 0, code ^ 0x7FFFFFFF, code).view(torch.float32)
        return relative_error((exact, logits.amax(-1)), (held, exact))

    def results(self) -> list[Tensor]:
        return [self.keys]

    def sides(self) -> dict[str, Callable[[], object]]:
        alone = functools.partial(head_keys, self.x, self.weight, **self.keywords())
        return {**super().sides(), "ours, no workspace": alone}

    def sweep(self) -> dict[str, Callable[[], object]]:
        return {
            name: functools.partial(
                head_keys, self.x, self.weight, **self.keywords(), config=config, splits=splits,
                workspace=SkinnyGemm.space(self, config, splits),  # type: ignore[arg-type]
            )
            for name, config, splits in swept_configs(len(self.x), self.x.device)
            if splits == 1 or len(self.x) <= config.block_t
        }  # fmt: skip


class TopIds(Case):
    kernel = "top_ids"
    stock_is = "torch: amax, and, sub"

    def __init__(self, ranks: int, tokens: int, device: torch.device) -> None:
        self.keys = torch.zeros(ranks, tokens, dtype=torch.int64, device=device)
        self.out = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.shape = {"ranks": ranks}
        self.least_bytes = 8 * (self.keys.numel() + tokens)

    def reset(self, seed: int) -> None:
        device = self.keys.device
        code = integers(seed, 2**32, *self.keys.shape, device=device) - 2**31
        low = integers(seed + 1, 2**20, *self.keys.shape, device=device)
        self.keys.copy_((code << 32) | (0x7FFFFFFF - low))
        poison(self.out)

    def ours(self) -> object:
        return top_ids(self.keys, out=self.out)

    def stock(self) -> object:
        return ids_of(self.keys.amax(0))

    def check(self) -> float:
        return mismatch((self.out, ids_of_keys(self.keys)))

    def results(self) -> list[Tensor]:
        return [self.out]


class HeadProducts(Case):
    kernel = "head_products"
    stock_is = "cuBLAS: bmm"

    def __init__(self, sizes: Sizes, which: str, tokens: int, device: torch.device) -> None:
        self.whole = torch.empty(
            sizes.heads, 2 * sizes.nope_dim, sizes.kv_lora_rank, dtype=BF16, device=device
        )
        # Views of kv_b_proj, as the release makes them.
        uk = self.whole[:, : sizes.nope_dim]
        uv = self.whole[:, sizes.nope_dim :].transpose(1, 2)
        self.weight = uk if which == "W_UK" else uv
        heads, size_k, columns = self.weight.shape
        extra = sizes.rope_dim if which == "W_UK" else 0
        self.rows = torch.empty(tokens, heads, size_k + extra, dtype=BF16, device=device)
        self.x = self.rows[..., :size_k]
        self.out = torch.empty(tokens, heads, columns, dtype=BF16, device=device)
        self.stock_out = torch.empty_like(self.out)
        self.shape = {"weight": which, "heads": heads}
        self.least_bytes = 2 * (self.weight.numel() + self.x.numel() + self.out.numel())

    def reset(self, seed: int) -> None:
        fill(seed, self.rows, self.whole)
        poison(self.out)

    def ours(self) -> object:
        return head_products(self.x, self.weight, out=self.out)

    def stock(self) -> object:
        return torch.bmm(self.x.transpose(0, 1), self.weight, out=self.stock_out.transpose(0, 1))

    def check(self) -> float:
        exact = products.head_products_reference(self.x, self.weight)
        return relative_error((self.out, exact))

    def results(self) -> list[Tensor]:
        return [self.out]


class NextStep(Case):
    kernel = "next_step"

    def __init__(self, sizes: Sizes, tokens: int, device: torch.device, ranks: int = 8) -> None:
        self.page, self.limit = sizes.page, 1000
        pages = self.limit // sizes.page + 1
        self.keys = torch.zeros(ranks, tokens, dtype=torch.int64, device=device)
        self.given_positions, self.positions, self.slots, self.ids = (
            torch.zeros(tokens, dtype=torch.int64, device=device) for _ in range(4)
        )
        self.given_lens, self.lens = (
            torch.zeros(tokens, dtype=torch.int32, device=device) for _ in range(2)
        )
        self.stock_positions, self.stock_lens = self.positions.clone(), self.lens.clone()
        self.table = torch.zeros(tokens, pages, dtype=torch.int32, device=device)
        self.drafts = torch.zeros(tokens, 3, dtype=torch.int64, device=device)
        self.shape = {"ranks": ranks}
        self.stock_is = "torch: as propose has it in 0.17.1"
        self.least_bytes = tokens * (8 * ranks + 2 * 8 + 2 * 4 + 4 + 3 * 8)

    def reset(self, seed: int) -> None:
        device, tokens = self.keys.device, self.keys.shape[1]
        code = integers(seed, 2**32, *self.keys.shape, device=device) - 2**31
        low = integers(seed + 1, 2**20, *self.keys.shape, device=device)
        self.keys.copy_((code << 32) | (0x7FFFFFFF - low))
        self.given_positions.copy_(integers(seed, self.limit - 1, tokens, device=device))
        self.given_lens.copy_(self.given_positions + 1)
        if tokens > 2:
            self.given_positions[0], self.given_lens[0] = self.limit - 1, self.limit
            self.given_positions[1], self.given_lens[1] = 0, 0
        self.table.copy_(integers(seed + 2, 5000, *self.table.shape, device=device))
        for mine in (self.positions, self.stock_positions):
            mine.copy_(self.given_positions)
        for lens in (self.lens, self.stock_lens):
            lens.copy_(self.given_lens)
        poison(self.slots, self.ids, self.drafts)

    def ours(self) -> object:
        return next_step(
            self.keys, self.positions, self.lens, self.table, self.slots, self.ids, self.drafts, 0,
            page_size=self.page, max_model_len=self.limit,
        )  # fmt: skip

    def stock(self) -> object:
        ids = ids_of(self.keys.amax(0))
        positions, lens = self.stock_positions, self.stock_lens
        positions += 1
        past = positions >= self.limit
        clamped = torch.where(past, 0, positions)
        lens += 1
        lens.masked_fill_(past, 1)
        block = self.table.gather(1, (clamped // self.page)[:, None])[:, 0]
        slots = block * self.page + clamped % self.page
        slots.masked_fill_(past, -1)
        # So that the next replay is like this one.
        positions -= 1
        lens -= 1
        return ids, slots

    def check(self) -> float:
        past = torch.zeros_like(self.given_lens, dtype=torch.bool)
        positions, slots, lens = next_step_reference(
            self.given_positions, self.given_lens, self.table, past, page_size=self.page,
            max_model_len=self.limit,
        )  # fmt: skip
        ids = ids_of_keys(self.keys)
        there = self.given_lens > 0  # What a padding row drafts is nobody's.
        return mismatch(
            (self.positions, positions), (self.slots, slots), (self.lens, lens),
            (self.ids[there], ids[there]), (self.drafts[there, 0], ids[there]),
        )  # fmt: skip

    def results(self) -> list[Tensor]:
        return [self.positions, self.slots, self.lens, self.ids, self.drafts]


class Staged(Case):
    """`stage_inputs` and `stage_tail`: the copies into a graph's buffers."""

    def __init__(self, sizes: Sizes, tokens: int, device: torch.device, *, tail: bool) -> None:
        self.kernel = "stage_tail" if tail else "stage_inputs"
        self.tail, self.page, self.limit, self.q = tail, sizes.page, 9000, 4
        rows_, pages = tokens * self.q, self.limit // sizes.page + 1
        width = sizes.hidden if tail else 3 * sizes.hidden
        self.hidden = torch.empty(rows_, width, dtype=BF16, device=device)
        self.ids, self.positions, self.slots = (
            torch.zeros(rows_, dtype=torch.int64, device=device) for _ in range(3)
        )
        self.next_ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.lens, self.rejected = (
            torch.zeros(tokens, dtype=torch.int32, device=device) for _ in range(2)
        )
        self.samples = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.table = torch.zeros(tokens, pages, dtype=torch.int32, device=device)
        self.buffers, self.stock_buffers = (
            DraftBuffers.of(
                max_batch=tokens, query_len=self.q, steps=3, pages=pages, device=device,
                width=None if tail else width, hidden_size=width if tail else None,
            )
            for _ in range(2)
        )  # fmt: skip
        self.shape = {"query_len": self.q, "columns": width, "pages": pages}
        self.stock_is = "torch: copies and gathers"
        copied = tokens if tail else rows_
        # What a proposal reads of a block table depends on the lengths: it is not counted.
        self.least_bytes = 2 * 2 * copied * width + 8 * (2 if tail else 6) * copied

    def reset(self, seed: int) -> None:
        device, tokens = self.hidden.device, len(self.lens)
        fill(seed, self.hidden)
        lens = integers(seed, self.limit - 100, tokens, device=device) + self.q
        self.lens.copy_(lens)
        first = (lens - self.q)[:, None] + torch.arange(self.q, device=device)
        self.positions.copy_(first.flatten())
        self.ids.copy_(integers(seed + 1, 1000, len(self.ids), device=device))
        self.slots.copy_(integers(seed + 2, 100000, len(self.slots), device=device))
        self.next_ids.copy_(integers(seed + 3, 1000, tokens, device=device))
        self.rejected.copy_(integers(seed + 4, self.q, tokens, device=device))
        place = self.q - 1 - self.rejected.long()
        self.samples.copy_(torch.arange(tokens, device=device) * self.q + place)
        self.table.copy_(integers(seed + 5, 5000, *self.table.shape, device=device))
        poison(*self.results())

    def ours(self) -> object:
        more = {"token_indices_to_sample": self.samples, "num_rejected": self.rejected}
        if self.tail:
            return stage_tail(
                self.buffers, len(self.lens), draft_token_ids=self.next_ids,
                positions=self.positions, seq_lens=self.lens, block_table=self.table,
                hidden=self.hidden, page_size=self.page, max_model_len=self.limit, **more,
            )  # fmt: skip
        return stage_inputs(
            self.buffers, len(self.lens), target_token_ids=self.ids,
            target_positions=self.positions, next_token_ids=self.next_ids, seq_lens=self.lens,
            slot_mapping=self.slots, block_table=self.table, hidden=self.hidden,
            page_size=self.page, **more,
        )  # fmt: skip

    def stock(self) -> object:
        b = self.stock_buffers
        b.block_table.copy_(self.table)
        at = self.positions[self.samples]
        lens = self.lens - self.rejected
        if not self.tail:
            b.token_ids[:-1].copy_(self.ids[1:])
            b.token_ids[self.samples] = self.next_ids.int()
            b.positions.copy_(self.positions)
            b.slots.copy_(self.slots)
            b.seq_lens.copy_(self.lens)
            b.sample_indices.copy_(self.samples)
            b.step_positions.copy_(at)
            b.step_seq_lens.copy_(lens)
            b.hidden.copy_(self.hidden)
            return b
        b.drafts[:, 0].copy_(self.next_ids)
        b.step_token_ids.copy_(self.next_ids)
        at += 1
        past = at >= self.limit
        clamped = torch.where(past, 0, at)
        block = self.table.gather(1, (clamped // self.page)[:, None])[:, 0]
        b.step_positions.copy_(clamped)
        b.step_seq_lens.copy_((lens + 1).masked_fill_(past, 1))
        b.step_slots.copy_((block * self.page + clamped % self.page).masked_fill_(past, -1))
        torch.index_select(self.hidden, 0, self.samples, out=b.step_hidden)
        return b

    def check(self) -> float:
        self.stock()
        ours, wanted = self.buffers, self.stock_buffers
        if self.tail:
            pairs = [
                (ours.drafts[:, 0], wanted.drafts[:, 0]),
                (ours.step_token_ids, wanted.step_token_ids),
                (ours.step_positions, wanted.step_positions),
                (ours.step_seq_lens, wanted.step_seq_lens),
                (ours.step_slots, wanted.step_slots),
            ]
            hidden = ours.step_hidden, wanted.step_hidden
        else:
            # Past the place to sample an id is of a rejected token, whatever it is.
            kept = (
                torch.arange(self.q, device=self.table.device)
                <= (self.samples - torch.arange(len(self.lens), device=self.table.device) * self.q)[
                    :, None
                ]
            )
            kept = kept.flatten()
            pairs = [
                (ours.token_ids[kept], wanted.token_ids[kept]),
                (ours.positions, wanted.positions),
                (ours.slots, wanted.slots),
                (ours.seq_lens, wanted.seq_lens),
                (ours.sample_indices, wanted.sample_indices),
                (ours.step_positions, wanted.step_positions),
                (ours.step_seq_lens, wanted.step_seq_lens),
            ]
            hidden = ours.hidden, wanted.hidden
        for request, length in enumerate(self.lens.tolist()):
            pages = -(-length // self.page)
            pairs.append((ours.block_table[request, :pages], self.table[request, :pages]))
        assert hidden[0] is not None
        assert hidden[1] is not None
        return mismatch(*pairs, (hidden[0].view(torch.int16), hidden[1].view(torch.int16)))

    def results(self) -> list[Tensor]:
        b = self.buffers
        if self.tail:
            return [
                b.step_positions,
                b.step_seq_lens,
                b.step_slots,
                b.step_token_ids,
                b.step_hidden,
            ]
        return [b.token_ids, b.positions, b.slots, b.seq_lens, b.sample_indices, b.hidden]


class TakeRows(Case):
    kernel = "take_rows"
    stock_is = "torch: 2 x index_select"

    def __init__(self, sizes: Sizes, tokens: int, device: torch.device) -> None:
        shape = (tokens * 4, sizes.hidden)
        self.sources = (
            torch.empty(shape, dtype=BF16, device=device),
            torch.empty(shape, dtype=BF16, device=device),
        )
        self.outs = tuple(
            torch.empty(tokens, sizes.hidden, dtype=BF16, device=device) for _ in range(2)
        )
        self.indices = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.shape = {"hidden": sizes.hidden}
        self.least_bytes = 2 * 4 * tokens * sizes.hidden + 8 * tokens

    def reset(self, seed: int) -> None:
        fill(seed, *self.sources)
        most = len(self.sources[0])
        self.indices.copy_(integers(seed, most, len(self.indices), device=self.indices.device))
        poison(*self.outs)

    def ours(self) -> object:
        return take_rows(self.sources, self.indices, self.outs)

    def stock(self) -> object:
        return [source.index_select(0, self.indices) for source in self.sources]

    def check(self) -> float:
        pairs = zip(self.outs, self.sources, strict=True)
        return relative_error(*((out, source[self.indices].double()) for out, source in pairs))

    def results(self) -> list[Tensor]:
        return list(self.outs)


Factory = Callable[[], Case]


def cases(
    width: str, tokens: int, kvs: Sequence[str], device: torch.device, quick: bool = False
) -> Iterator[tuple[str, Factory]]:
    """Kernel and maker of every case for so many tokens (of attention: requests)."""
    sizes = SIZES[width]
    make = functools.partial
    shard = width != "full"
    yield "draft_inputs", make(DraftInputs, sizes, tokens, device)
    for chunks in (3, 1):
        yield "fc_norm", make(FcNorm, sizes, tokens, chunks, device)
    yield "add_rms_norm", make(AddRmsNorm, sizes, tokens, device)
    yield "silu_mul", make(SiluMul, sizes, tokens, device)
    for kv, by_heads in itertools.product(kvs, (False, True)):
        if not (quick and by_heads):
            yield "rope_kv_write", make(RopeKvWrite, sizes, tokens, kv, device, by_heads=by_heads)
    for kv in kvs:
        yield "mla_latents", make(MlaLatents, sizes, tokens, kv, device)
    yield "mla_rope_q", make(MlaRopeQ, sizes, tokens, device)
    for kv, context, (query_len, by_heads) in itertools.product(
        kvs, sizes.contexts, ((1, False), (4, False), (1, True))
    ):
        if quick and (by_heads or query_len > 1):
            continue
        yield (
            "mha_decode",
            make(
                MhaDecode, sizes, tokens, kv, device, context=context, query_len=query_len,
                by_heads=by_heads,
            ),
        )  # fmt: skip
    for name, (columns, size_k) in sizes.products.items():
        if tokens <= MAX_ROWS:
            yield "skinny_gemm", make(SkinnyGemm, name, columns, size_k, tokens, device)
    for vocabulary in sizes.vocabularies:
        yield "head_keys", make(HeadKeys, sizes, vocabulary, tokens, device)
    for which in ("W_UK", "W_UV"):
        yield "head_products", make(HeadProducts, sizes, which, tokens, device)
    if shard:
        yield "top_ids", make(TopIds, 8, tokens, device)
        yield "next_step", make(NextStep, sizes, tokens, device)
        for tail in (False, True):
            yield (
                ("stage_tail" if tail else "stage_inputs"),
                make(Staged, sizes, tokens, device, tail=tail),
            )
        yield "take_rows", make(TakeRows, sizes, tokens, device)


class Bench:
    """One run over some cases."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device("cpu" if options.dry_run else "cuda")
        self.l2_bytes, self.bandwidth = 0, 0.0
        self.facts: dict[str, Any] = {}
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
            properties = torch.cuda.get_device_properties(self.device)
            self.l2_bytes = properties.L2_cache_size
            self.bandwidth = copy_bandwidth()
            self.facts = gpu_facts()  # Now, with the clocks up.
            stock = "vLLM's ops" if vllm_ops() else "no vLLM"
            print(f"{self.facts}, copy {self.bandwidth / 1e12:.2f} TB/s, {stock}", flush=True)

    def case(self, width: str, tokens: int, make: Factory) -> dict[str, Any]:
        """Check and time one case; the row."""
        first = make()
        first.reset(0)
        row: dict[str, Any] = {
            **self.facts, "kernel": first.kernel, "width": width, "tokens": tokens, **first.shape,
            "least_bytes": first.least_bytes, "stock_is": first.stock_is,
            "copy_tb_s": round(self.bandwidth / 1e12, 3), "l2_mb": round(self.l2_bytes / 1e6),
        }  # fmt: skip
        first.ours()
        row["error"], row["allowed"] = first.check(), first.allowed
        if not row["error"] <= first.allowed:
            row["wrong"] = True
            return row
        if self.device.type != "cuda":
            first.stock()  # It runs, at least.
            return row
        launches = max(1, min(
            math.ceil(L2_CACHES * self.l2_bytes / first.least_bytes), MOST_LAUNCHES,
            int(MOST_BYTES // first.least_bytes),
        ))  # fmt: skip
        copies = [first, *(make() for _ in range(launches - 1))]
        for seed, case in enumerate(copies):
            case.reset(seed)
        row["launches_per_graph"] = launches
        by_side = [case.sides() for case in copies]
        if self.options.sweep:
            for case, sides in zip(copies, by_side, strict=True):
                sides.update(case.sweep())
        runs = {}
        for side in by_side[0]:
            try:
                runs[side] = capture([sides[side] for sides in by_side])
            except Exception as error:  # One launch configuration too large must not end the run.
                row[side] = {"failed": f"{type(error).__name__}: {error}"[:300]}
                torch.cuda.synchronize()
        times = measure(runs, launches, ms=MEASURED_MS, rounds=ROUNDS)
        for side, us in times.items():
            row[side] = {"us": rows.spread(us)}
            median = row[side]["us"]["median"]
            row[side]["share"] = round(first.least_bytes / self.bandwidth * 1e6 / median, 3)
        for side in runs:
            if side != STOCK and STOCK in runs:
                ratio = row[STOCK]["us"]["median"] / row[side]["us"]["median"]
                row[side]["stock_over_this"] = round(ratio, 2)
        return row

    def run(self) -> int:
        """All cases within the seconds given; 1 if any was wrong or failed."""
        options, started, done, bad = self.options, time.monotonic(), 0, 0
        for width, tokens in itertools.product(options.width, options.tokens):
            for kernel, make in cases(width, tokens, options.kv, self.device, options.quick):
                if options.only and kernel not in options.only:
                    continue
                if time.monotonic() - started > options.seconds:
                    continue
                try:
                    row = self.case(width, tokens, make)
                except Exception as error:
                    print(f"{kernel} {width} {tokens}: {type(error).__name__}: {error}"[:400])
                    bad += 1
                    continue
                done += 1
                failed = "failed" in row.get(OURS, {}) or "failed" in row.get(STOCK, {})
                bad += bool(row.get("wrong") or failed)
                print(describe(row), flush=True)
                if options.out is not None:
                    rows.append(options.out, row)
        print(f"{done} cases in {time.monotonic() - started:.0f} s; {bad} wrong or failed")
        return int(bad > 0)


def describe(row: dict[str, Any]) -> str:
    """A line for the screen, and with a sweep one more for the best of it."""
    skipped = {
        "gpu", "driver", "sm_clock_mhz", "memory_clock_mhz", "power_limit_w", "capability",
        "kernel", "least_bytes", "stock_is", "copy_tb_s", "l2_mb", "error", "allowed", "wrong",
        "launches_per_graph", "width", "tokens",
    }  # fmt: skip
    shape = " ".join(
        f"{name} {value}"
        for name, value in row.items()
        if name not in skipped and not isinstance(value, dict)
    )
    words = [f"{row['kernel']} {row['width']} {row['tokens']:3} | {shape:48}"]
    known = [OURS, "ours, not split", "ours, no workspace", STOCK]
    sides = {name: value for name, value in row.items() if isinstance(value, dict)}
    for side in known:
        if "us" in sides.get(side, {}):
            about = sides[side]
            words.append(f"{side}: {about['us']['median']:8.2f} us {about['share']:4.0%}")
        elif side in sides:
            words.append(f"{side}: {sides[side]['failed'][:100]}")
    if "us" in sides.get(OURS, {}) and "stock_over_this" in sides[OURS]:
        words.append(f"{sides[OURS]['stock_over_this']:.2f}x of {row['stock_is']}")
    words.append(f"{'WRONG ' if row.get('wrong') else ''}err {row['error']:.1e}")
    line = " | ".join(words)
    swept = sorted(
        (value["us"]["median"], name)
        for name, value in sides.items()
        if name not in known and "us" in value
    )
    if swept:
        line += "\n    best: " + ", ".join(f"{name} {us:.2f}" for us, name in swept[:8])
    return line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", nargs="+", default=[], help="kernels, by the function's name")
    parser.add_argument("--width", nargs="+", choices=list(SIZES), default=["shard", "full"])
    parser.add_argument("--tokens", nargs="+", type=int, help="default: 1 4 8 16 32")
    parser.add_argument("--kv", nargs="+", choices=list(KV_DTYPES), default=["bf16", "fp8"])
    parser.add_argument("--quick", action="store_true", help="1 and 16 tokens, fewer layouts")
    parser.add_argument("--sweep", action="store_true", help="configurations of the products")
    parser.add_argument("--seconds", type=float, default=900.0, help="start no case after these")
    parser.add_argument("--out", type=Path, help="append the rows to this file")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    if options.tokens is None:
        options.tokens = [1, 16] if options.quick else [1, 4, 8, 16, 32]
    if options.dry_run:
        from tests.kernels.interpreter import exact_numbers, patch_once

        exact_numbers()
        patch_once()
        options.width, options.tokens = ["tiny"], [1, 5]
    elif options.kv != ["bf16"] and torch.cuda.get_device_capability() < (8, 9):
        options.kv = ["bf16"]  # No fp8 instructions.
    with torch.inference_mode():
        return Bench(options).run()


if __name__ == "__main__":
    sys.exit(main())
