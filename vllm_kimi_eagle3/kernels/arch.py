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
class MlaDecodeConfig:
    """How ``mla_decode`` is launched.

    Attributes:
        block_m: rows (query tokens times heads) of a program; more rows are more programs.
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


@dataclass(frozen=True)
class MhaDecodeConfig:
    """How ``mha_decode`` is launched; as of :class:`MlaDecodeConfig`.

    Attributes:
        block_m: rows (query tokens times the query heads of a key head) of a program.
        block_n: cache rows in a tile.
        num_warps: warps of a program.
        num_stages: Triton's pipeline depth; ``num_stages - 1`` tiles are in flight.
        programs_per_sm: programs that a multiprocessor holds at once; the grid is that many.
        min_tiles: the fewest tiles of a program; fewer, and adding up costs more than it wins.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    min_tiles: int


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
    MlaDecodeConfig(16, 32, 4, 3, 1, 2),
    # 74 KiB: one beside 32 rows.
    MlaDecodeConfig(32, 32, 4, 2, 1, 2),
)
# The next fp8 tile waits in registers, 36 of a thread's; 54 and 72 KiB.
_SMALL_FP8 = (
    MlaDecodeConfig(16, 32, 4, 1, 1, 2),
    MlaDecodeConfig(32, 32, 4, 1, 1, 2),
)
# The same tiles, and twice the shared memory: two programs a multiprocessor hide each other's
# waits (H200: 215 us for 302); registers (2 x 128 threads x 255) allow no third.
_LARGE_BF16 = (
    MlaDecodeConfig(16, 32, 4, 3, 2, 2),
    MlaDecodeConfig(32, 32, 4, 2, 2, 2),
)
_LARGE_FP8 = (
    MlaDecodeConfig(16, 32, 4, 1, 2, 2),
    MlaDecodeConfig(32, 32, 4, 1, 2, 2),
)
# 164 KiB a multiprocessor hold two programs of 16 rows only with one tile in flight each.
_A100_BF16 = (MlaDecodeConfig(16, 32, 4, 2, 2, 2), _LARGE_BF16[1])
# 112 KiB, twice into 228. The queries are read from shared memory once a tile: tiles of 64 halve
# that, which is what bounds 32 rows here (H200: 168 us for 215).
_HOPPER_BF16 = (
    MlaDecodeConfig(16, 32, 4, 3, 2, 2),
    MlaDecodeConfig(32, 64, 4, 2, 2, 1),
)

_MLA_DECODE: dict[tuple[int, int], tuple[tuple[MlaDecodeConfig, ...], ...]] = {
    # capability: (bf16 and fp16, fp8), each by rows. 8.0 and 8.6 have no fp8 instructions.
    (8, 0): (_A100_BF16, ()),
    (8, 6): (_SMALL_BF16, ()),
    (8, 9): (_SMALL_BF16, _SMALL_FP8),
    (9, 0): (_HOPPER_BF16, _LARGE_FP8),
    (10, 0): (_LARGE_BF16, _LARGE_FP8),
    (12, 0): (_SMALL_BF16, _SMALL_FP8),
    (12, 1): (_SMALL_BF16, _SMALL_FP8),
}


def mla_decode_configs(capability: tuple[int, int]) -> tuple[MlaDecodeConfig, ...]:
    """Every configuration that the table has for a capability."""
    wide, fp8 = _table(capability)
    return wide + fp8


def mla_decode_config(arch: Arch, *, rows: int, fp8: bool) -> MlaDecodeConfig:
    """The configuration for ``rows`` = query tokens times heads, and the cache's kind.

    Raises:
        ValueError: an fp8 cache on a GPU without fp8 instructions.
    """
    table = _table(arch.capability)[fp8]
    if not table:
        raise ValueError(f"{arch.name} has no fp8 instructions; use a bfloat16 KV cache")
    return next((c for c in table if c.block_m >= rows), table[-1])


def _table(
    capability: tuple[int, int],
) -> tuple[tuple[MlaDecodeConfig, ...], tuple[MlaDecodeConfig, ...]]:
    wide, fp8 = _MLA_DECODE[max(c for c in CAPABILITIES if c <= capability)]
    return wide, fp8


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
    MhaDecodeConfig(16, 32, 4, 3, 2, 4),
    MhaDecodeConfig(32, 32, 4, 3, 2, 4),
    MhaDecodeConfig(64, 32, 8, 3, 1, 4),
)
_MHA_LARGE = (
    MhaDecodeConfig(16, 64, 4, 3, 2, 2),
    MhaDecodeConfig(32, 64, 4, 3, 2, 2),
    MhaDecodeConfig(64, 64, 8, 3, 1, 2),
)
# The next fp8 tile waits in registers, 32 of a thread's for 64 tokens; beside 32 rows half of it.
_MHA_FP8 = (
    MhaDecodeConfig(16, 64, 4, 1, 2, 2),
    MhaDecodeConfig(32, 32, 4, 1, 2, 4),
    MhaDecodeConfig(64, 32, 8, 1, 1, 4),
)

_MHA_DECODE: dict[tuple[int, int], tuple[tuple[MhaDecodeConfig, ...], ...]] = {
    # capability: (bf16 and fp16, fp8), each by rows. 8.0 and 8.6 have no fp8 instructions.
    (8, 0): (_MHA_LARGE, ()),
    (8, 6): (_MHA_SMALL, ()),
    (8, 9): (_MHA_SMALL, _MHA_FP8),
    (9, 0): (_MHA_LARGE, _MHA_FP8),
    (10, 0): (_MHA_LARGE, _MHA_FP8),
    (12, 0): (_MHA_SMALL, _MHA_FP8),
    (12, 1): (_MHA_SMALL, _MHA_FP8),
}


def mha_decode_configs(capability: tuple[int, int]) -> tuple[MhaDecodeConfig, ...]:
    """Every configuration that the table has for a capability."""
    wide, fp8 = _MHA_DECODE[max(c for c in CAPABILITIES if c <= capability)]
    return wide + fp8


def mha_decode_config(arch: Arch, *, rows: int, itemsize: int) -> MhaDecodeConfig:
    """The configuration for ``rows`` of a key head and a cache of ``itemsize`` bytes a number.

    Raises:
        ValueError: an fp8 cache on a GPU without fp8 instructions.
    """
    wide, fp8 = _MHA_DECODE[max(c for c in CAPABILITIES if c <= arch.capability)]
    table = fp8 if itemsize == 1 else wide
    if not table:
        raise ValueError(f"{arch.name} has no fp8 instructions; use a bfloat16 KV cache")
    config = next((c for c in table if c.block_m >= rows), table[-1])
    if itemsize == 4:
        # For tests: float32 in the tiles' memory of bfloat16.
        config = replace(config, block_n=config.block_n // 2, min_tiles=config.min_tiles * 2)
    return config
