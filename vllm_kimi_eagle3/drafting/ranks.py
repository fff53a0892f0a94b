# SPDX-License-Identifier: Apache-2.0
"""What the tensor-parallel ranks decide together.

Each rank finds out by itself what can serve and what is fastest. A rank that drafted otherwise than
the others would wait for their collectives, or, where each has the whole drafter, round otherwise
and draft other tokens. Here they agree, on the CPU and while the server starts. To be called
outside :func:`~.replicated.as_tp_group`: where the drafter is replicated, the target's ranks have
to agree all the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def first_rank() -> bool:
    """True on the rank that speaks for all."""
    from vllm.distributed.parallel_state import get_tp_group

    return bool(get_tp_group().rank_in_group == 0)


def on_every_rank(done: bool) -> bool:
    """True if ``done`` is true on every rank; all of them have to ask."""
    return set_on_every_rank([done])[0]


def set_on_every_rank(flags: Sequence[bool]) -> list[bool]:
    """Each flag, if it is set on every rank; all of them have to ask, with as many flags."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return list(flags)
    least = torch.tensor([int(flag) for flag in flags], dtype=torch.int32, device="cpu")
    torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return [bool(flag) for flag in least.tolist()]
