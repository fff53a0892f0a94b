# SPDX-License-Identifier: Apache-2.0
"""What the GPUs are, and the launch tables that follow from it: the only file that knows hardware.

Sizes are of the CUDA programming guide's table of compute capabilities; the number of
multiprocessors is read from the device, since cards of one architecture differ in it. Imports
torch only to look at a device: ``check`` reckons with these tables where there is neither torch
nor a GPU.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

KIB = 1024


@dataclass(frozen=True)
class DecodeConfig:
    """How ``mla_decode`` or ``mha_decode`` is launched.

    Attributes:
        block_m: rows (query tokens times the heads that share a cache row) of a program; more
            rows are more programs.
        block_n: cache rows in a tile.
        num_warps: warps of a program.
        num_stages: Triton's pipeline depth; ``num_stages - 1`` tiles are in flight.
        programs_per_sm: programs that a multiprocessor holds at once; the grid is that many.
        min_tiles: the fewest tiles of a program; fewer, and combining costs more than it wins.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    min_tiles: int


_Table = dict[tuple[int, int], tuple[tuple[DecodeConfig, ...], tuple[DecodeConfig, ...]]]
"""A launch table, by capability: (bf16 and fp16, fp8), each by rows; no fp8 before 8.9."""


@dataclass(frozen=True)
class Arch:
    """A GPU.

    Attributes:
        name: as in ``sm_120``.
        capability: ``(major, minor)``.
        shared_per_block: bytes of shared memory that one program can have.
        shared_per_sm: bytes of shared memory of a multiprocessor; each program costs a KiB more.
        sm_count: multiprocessors.
    """

    name: str
    capability: tuple[int, int]
    shared_per_block: int
    shared_per_sm: int
    sm_count: int

    @property
    def max_programs(self) -> int:
        """The most programs that any configuration of the table starts."""
        return self.sm_count * max(c.programs_per_sm for c in mla_decode_configs(self.capability))

    @property
    def max_block_m(self) -> int:
        """The most rows of a program in any configuration of the table."""
        return max(c.block_m for c in mla_decode_configs(self.capability))


# (bytes a block, bytes a multiprocessor, multiprocessors of the largest card known). 8.6, 8.9 and
# 12.x have 100 KiB a multiprocessor, 1 of it reserved per block.
_MEMORY: dict[tuple[int, int], tuple[int, int, int]] = {
    (8, 0): (163 * KIB, 164 * KIB, 108),
    (8, 6): (99 * KIB, 100 * KIB, 84),
    (8, 9): (99 * KIB, 100 * KIB, 142),
    (9, 0): (227 * KIB, 228 * KIB, 132),
    (10, 0): (227 * KIB, 228 * KIB, 148),
    (12, 0): (99 * KIB, 100 * KIB, 188),
    (12, 1): (99 * KIB, 100 * KIB, 48),
}
CAPABILITIES = tuple(_MEMORY)


def arch(capability: tuple[int, int], sm_count: int | None = None) -> Arch:
    """The architecture of a compute capability.

    Args:
        capability: ``(major, minor)``; one not in the table is taken as the nearest below it.
        sm_count: multiprocessors; None takes the largest card's of the table.

    Raises:
        ValueError: below 8.0, which has no bfloat16 tensor cores.
    """
    known = [c for c in CAPABILITIES if c <= capability]
    if not known:
        raise ValueError(
            f"compute capability {capability[0]}.{capability[1]} has no bfloat16 tensor cores; "
            "mla_decode needs 8.0 or newer"
        )
    per_block, per_sm, most = _MEMORY[max(known)]
    name = f"sm_{capability[0]}{capability[1]}"
    return Arch(name, capability, per_block, per_sm, sm_count or most)


# Triton's interpreter: few programs, so that small tests have requests cut in parts.
_INTERPRETER = Arch("interpreter", (12, 0), 99 * KIB, 100 * KIB, 5)


def arch_of(device: torch.device) -> Arch:
    """The architecture of a device; for the CPU, where Triton interprets, sm_120's table."""
    import torch

    if device.type == "cpu":
        return _INTERPRETER
    return _arch_of_index(device.index if device.index is not None else torch.cuda.current_device())


@functools.cache
def _arch_of_index(index: int) -> Arch:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return arch((properties.major, properties.minor), properties.multi_processor_count)


# Registers: 32 rows x 512 float32 over 128 threads are 128 of a thread's 255. 64 rows would be all
# of them, and 8 warps share so narrow a tile badly: the second four read what the first four read.
# Shared memory: the queries, rows x 576 x 2 bytes (18 KiB for 16 rows, 36 for 32), and for bf16
# block_n x 576 x 2 bytes (36 KiB for 32) a tile in flight; for fp8 one converted tile.
_SMALL_BF16 = (
    # 92 KiB: two tiles in flight beside 16 rows.
    DecodeConfig(16, 32, 4, 3, 1, 2),
    # 74 KiB: one beside 32 rows.
    DecodeConfig(32, 32, 4, 2, 1, 2),
)
# The next fp8 tile waits in registers, 36 of a thread's; 54 and 72 KiB.
_SMALL_FP8 = (
    DecodeConfig(16, 32, 4, 1, 1, 2),
    DecodeConfig(32, 32, 4, 1, 1, 2),
)
# The same tiles, and twice the shared memory: two programs a multiprocessor hide each other's
# waits (H200: 215 us for 302); registers (2 x 128 threads x 255) allow no third.
_LARGE_BF16 = (
    DecodeConfig(16, 32, 4, 3, 2, 2),
    DecodeConfig(32, 32, 4, 2, 2, 2),
)
_LARGE_FP8 = (
    DecodeConfig(16, 32, 4, 1, 2, 2),
    DecodeConfig(32, 32, 4, 1, 2, 2),
)
# 164 KiB a multiprocessor hold two programs of 16 rows only with one tile in flight each.
_A100_BF16 = (DecodeConfig(16, 32, 4, 2, 2, 2), _LARGE_BF16[1])
# 112 KiB, twice into 228. The queries are read from shared memory once a tile: tiles of 64 halve
# that, which is what bounds 32 rows here (H200: 168 us for 215).
_HOPPER_BF16 = (
    DecodeConfig(16, 32, 4, 3, 2, 2),
    DecodeConfig(32, 64, 4, 2, 2, 1),
)

_MLA_DECODE: _Table = {
    (8, 0): (_A100_BF16, ()),
    (8, 6): (_SMALL_BF16, ()),
    (8, 9): (_SMALL_BF16, _SMALL_FP8),
    (9, 0): (_HOPPER_BF16, _LARGE_FP8),
    (10, 0): (_LARGE_BF16, _LARGE_FP8),
    (12, 0): (_SMALL_BF16, _SMALL_FP8),
    (12, 1): (_SMALL_BF16, _SMALL_FP8),
}


def mla_decode_configs(capability: tuple[int, int]) -> tuple[DecodeConfig, ...]:
    """Every configuration that the table has for a capability."""
    return _configs(_MLA_DECODE, capability)


def mla_decode_config(arch: Arch, *, rows: int, fp8: bool) -> DecodeConfig:
    """The configuration for ``rows`` = query tokens times heads, and the cache's kind.

    Raises:
        ValueError: an fp8 cache on a GPU without fp8 instructions.
    """
    return _config(_MLA_DECODE, arch, rows=rows, fp8=fp8)


def workspace_numel(
    *, max_batch: int, query_len: int, heads: int, kv_lora_rank: int, arch: Arch
) -> int:
    """How many float32 elements ``mla_decode`` needs at most.

    For any batch up to ``max_batch``, any query length up to ``query_len`` and any lengths: a
    partial result of ``kv_lora_rank`` values and one log-sum-exp per row, for every program and
    every request, since a program's part may begin in one request and end in another.
    """
    rows = heads * query_len
    # More rows than a block are more programs side by side, each with a smaller share of them.
    in_programs = max(rows, arch.max_programs * min(rows, arch.max_block_m))
    return (in_programs + max_batch * rows) * (kv_lora_rank + 1)


# A tile of 64 tokens is 32 KiB of bf16 keys and values of 128 columns, two of them in flight 64;
# one of 32 tokens half of it. Two programs a multiprocessor, so that one loads while the other
# looks up its pages or adds up. 128 tokens are the least that a program takes: all of them are in
# flight at once, so fewer would not be done sooner. 64 rows, of first passes only, are one program
# of twice the warps: their sum would take half of 128 threads' registers.
_MHA_SMALL = (
    DecodeConfig(16, 32, 4, 3, 2, 4),
    DecodeConfig(32, 32, 4, 3, 2, 4),
    DecodeConfig(64, 32, 8, 3, 1, 4),
)
_MHA_LARGE = (
    DecodeConfig(16, 64, 4, 3, 2, 2),
    DecodeConfig(32, 64, 4, 3, 2, 2),
    DecodeConfig(64, 64, 8, 3, 1, 2),
)
# The next fp8 tile waits in registers, 32 of a thread's for 64 tokens; beside 32 rows half of it.
_MHA_FP8 = (
    DecodeConfig(16, 64, 4, 1, 2, 2),
    DecodeConfig(32, 32, 4, 1, 2, 4),
    DecodeConfig(64, 32, 8, 1, 1, 4),
)

_MHA_DECODE: _Table = {
    (8, 0): (_MHA_LARGE, ()),
    (8, 6): (_MHA_SMALL, ()),
    (8, 9): (_MHA_SMALL, _MHA_FP8),
    (9, 0): (_MHA_LARGE, _MHA_FP8),
    (10, 0): (_MHA_LARGE, _MHA_FP8),
    (12, 0): (_MHA_SMALL, _MHA_FP8),
    (12, 1): (_MHA_SMALL, _MHA_FP8),
}


def mha_decode_configs(capability: tuple[int, int]) -> tuple[DecodeConfig, ...]:
    """Every configuration that the table has for a capability."""
    return _configs(_MHA_DECODE, capability)


def mha_decode_config(arch: Arch, *, rows: int, itemsize: int) -> DecodeConfig:
    """The configuration for ``rows`` of a key head and a cache of ``itemsize`` bytes a number.

    Raises:
        ValueError: an fp8 cache on a GPU without fp8 instructions.
    """
    config = _config(_MHA_DECODE, arch, rows=rows, fp8=itemsize == 1)
    if itemsize == 4:
        # For tests: float32 in the tiles' memory of bfloat16.
        config = replace(config, block_n=config.block_n // 2, min_tiles=config.min_tiles * 2)
    return config


def _configs(table: _Table, capability: tuple[int, int]) -> tuple[DecodeConfig, ...]:
    wide, fp8 = table[_known(capability)]
    return wide + fp8


def _config(table: _Table, arch: Arch, *, rows: int, fp8: bool) -> DecodeConfig:
    """The first with as many rows, or the one with the most.

    Raises:
        ValueError: an fp8 cache on a GPU without fp8 instructions.
    """
    configs = table[_known(arch.capability)][fp8]
    if not configs:
        raise ValueError(f"{arch.name} has no fp8 instructions; use a bfloat16 KV cache")
    return next((c for c in configs if c.block_m >= rows), configs[-1])


def _known(capability: tuple[int, int]) -> tuple[int, int]:
    """The capability of the tables that a GPU's is taken as."""
    return max(c for c in CAPABILITIES if c <= capability)
