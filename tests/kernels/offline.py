# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernel's launches for GPUs that are not there, and says what they take.

    python -m tests.kernels.offline [--json] [--arch sm_120 ...] [--config block_n=32,num_warps=8]
        [--kernels verify|drafter]

Without arguments, every configuration of every architecture's launch table: first `mla_decode`'s,
then those of the drafter's kernels. The launcher runs as it
does on a GPU, over tensors of the CPU: only Triton's driver is replaced, by one that names the
wanted GPU, and a launch ends after the compilation. So what is compiled is what a launch there
would compile, alignments and all. Registers, shared memory and spills are read from the binary with
the `cuobjdump` and `nvdisasm` that Triton ships. Nothing is said about results or speed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from vllm_kimi_eagle3.kernels import arch as architectures
from vllm_kimi_eagle3.kernels import draft_state, mha_decode
from vllm_kimi_eagle3.kernels import mla_decode as kernels

from .cases import SCALE, P, R

KV_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
PROGRAMS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclasses.dataclass(frozen=True)
class Launch:
    """What a launch is compiled for besides the GPU."""

    kv: str
    heads: int
    query_len: int
    page: int = 64
    batch: int = 16

    @property
    def kv_dtype(self) -> torch.dtype:
        return KV_DTYPES[self.kv]

    def __str__(self) -> str:
        return (
            f"{self.kv} {self.heads} heads, {self.query_len} tokens, page {self.page}, "
            f"batch {self.batch}"
        )


# Few rows, those of the goals, and the most; tiles within a page and over several; few and many
# requests. Each table's configurations are all among them (a test sees to it).
LAUNCHES = [
    Launch(kv, heads, query_len, page, batch)
    for kv in ("bf16", "fp8")
    for heads, query_len, page, batch in (
        (8, 1, 64, 1), (8, 4, 64, 16), (8, 4, 64, 256), (8, 4, 16, 256), (16, 1, 48, 4),
        (16, 4, 16, 256), (64, 1, 16, 16), (64, 1, 64, 256), (64, 4, 64, 16), (64, 4, 16, 16),
        (128, 9, 64, 256),
    )
] + [Launch("fp16", 8, 4)]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes.

    Attributes:
        shared: bytes of shared memory per block.
        registers: per thread.
        spilled: bytes of stack and local memory per thread.
        spills_in_loop: instructions on local memory in the loop over the tiles; None where
            Triton's `nvdisasm` does not know the GPU (3.6's does not know sm_121).
        seconds: of compilation; next to nothing if it was in Triton's cache.
    """

    kernel: str
    shared: int
    registers: int
    spilled: int
    spills_in_loop: int | None
    num_warps: int
    seconds: float


class NamedGpu:
    """In place of Triton's driver: answers what a compilation asks."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps compiled kernels by device.

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def compiling_for(capability: int) -> Iterator[list[Resources]]:
    """In here launches are compiled for `capability` (120: sm_120), and not run."""
    compiled: list[Resources] = []
    run, before = JITFunction.run, driver._active

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        started = time.perf_counter()
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append(resources(kernel, time.perf_counter() - started))
        return kernel

    JITFunction.run = compile_only
    driver.set_active(NamedGpu(capability))
    try:
        yield compiled
    finally:
        JITFunction.run = run
        driver._active = before


def tool(name: str, *arguments: str) -> str:
    """What one of the programs says that Triton ships."""
    command = [str(PROGRAMS / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def tile_loop(code: str) -> list[str]:
    """The instructions of the smallest loop with most of the matrix instructions; none: []."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    loops: list[list[str]] = []
    for line in code.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif re.search(r"/\*[0-9a-f]{4,}\*/", line):
            instructions.append(line)
            target = re.search(r"BRA.*?(\.L_x_\d+)", line)
            if target and target[1] in labels:  # Backwards, so a loop's end.
                loops.append(instructions[labels[target[1]] :])

    def products(lines: list[str]) -> int:
        return sum("MMA" in line for line in lines)

    most = max((products(loop) for loop in loops), default=0)
    # The loop over requests around it has the same ones, some of them twice.
    return min((loop for loop in loops if most and 2 * products(loop) >= most), key=len, default=[])


def resources(kernel: Any, seconds: float) -> Resources:
    """Of one compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = tool("cuobjdump", "-res-usage", file.name)
        try:
            loop = tile_loop(tool("nvdisasm", "-c", file.name))
        except subprocess.CalledProcessError as error:
            if "Cannot decode architecture" not in error.stderr:
                raise
            loop = None
    found = {name: int(number) for name, number in re.findall(r"([A-Z]+):(\d+)", usage)}
    return Resources(
        kernel=kernel.metadata.name,
        shared=kernel.metadata.shared,
        registers=found["REG"],
        spilled=found["STACK"] + found["LOCAL"],
        spills_in_loop=None
        if loop is None
        else sum("LDL" in line or "STL" in line for line in loop),
        num_warps=kernel.metadata.num_warps,
        seconds=round(seconds, 2),
    )


def compile_launch(
    arch: architectures.Arch, launch: Launch, config: architectures.DecodeConfig
) -> list[Resources]:
    """The kernels of one launch, as it would run on a GPU of that architecture."""
    q_dtype = torch.bfloat16 if launch.kv == "fp8" else launch.kv_dtype
    rows = launch.batch * launch.query_len
    tensors = (
        torch.empty(rows, launch.heads, R + P, dtype=q_dtype),
        torch.empty(2, launch.page, R + P, dtype=launch.kv_dtype),
        torch.zeros(launch.batch, 4096, dtype=torch.int32),
        torch.zeros(launch.batch, dtype=torch.int32),
    )
    most = (arch.sm_count * config.programs_per_sm + launch.batch) * launch.heads
    workspace = torch.empty(most * launch.query_len * (R + 1))  # Never written to.
    scale = torch.ones(1) if launch.kv == "fp8" else None
    arch_of = kernels.arch_of
    kernels.arch_of = lambda device: arch
    try:
        with compiling_for(arch.capability[0] * 10 + arch.capability[1]) as compiled:
            kernels.mla_decode(
                *tensors, scale=SCALE, query_len=launch.query_len, workspace=workspace,
                kv_scale=scale, config=config,
            )  # fmt: skip
    finally:
        kernels.arch_of = arch_of
    return compiled


def launches_of(
    arch: architectures.Arch,
) -> Iterator[tuple[Launch, architectures.DecodeConfig]]:
    """The launches that this architecture can run, each with its table's configuration."""
    for launch in LAUNCHES:
        rows, fp8 = launch.heads * launch.query_len, launch.kv == "fp8"
        try:
            yield launch, architectures.mla_decode_config(arch, rows=rows, fp8=fp8)
        except ValueError:
            continue  # An fp8 cache where there are no fp8 instructions.


@dataclasses.dataclass(frozen=True)
class DrafterLaunch:
    """A launch of one of the drafter's kernels.

    Attributes:
        name: what is launched.
        call: launches it over tensors of the CPU.
        config: of the launch table, where there is one.
        programs_per_sm: how many a multiprocessor shall hold.
    """

    name: str
    call: Callable[[], object]
    config: str = ""
    programs_per_sm: int = 1


# (kind of cache, query heads, key heads, query tokens, page, batch): a rank of 8 and a whole
# drafter, draft steps and first passes, tiles within a page and over several.
MHA_LAUNCHES = [
    (kv, *shape)
    for kv in ("bf16", "fp8")
    for shape in (
        (8, 1, 1, 64, 1), (8, 1, 1, 16, 16), (8, 1, 4, 64, 16), (8, 1, 4, 16, 256),
        (64, 8, 1, 64, 16), (64, 8, 4, 16, 32), (64, 8, 8, 64, 256), (64, 8, 9, 16, 16),
    )
] + [("fp16", 8, 1, 4, 64, 16)]  # fmt: skip


def mha_launches(arch: architectures.Arch) -> Iterator[DrafterLaunch]:
    """`mha_decode` with each configuration of the table."""
    for kv, heads, kv_heads, query_len, page, batch in MHA_LAUNCHES:
        kv_dtype = KV_DTYPES[kv]
        try:
            config = architectures.mha_decode_config(
                arch, rows=heads // kv_heads * query_len, itemsize=kv_dtype.itemsize
            )
        except ValueError:
            continue  # An fp8 cache where there are no fp8 instructions.
        shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": 128, "query_len": query_len}
        numel = mha_decode.workspace_numel(max_batch=batch, arch=arch, **shape)
        cache = torch.empty(2, 2, page, kv_heads, 128, dtype=kv_dtype)
        tensors = (
            torch.empty(
                batch * query_len, heads, 128, dtype=torch.bfloat16 if kv == "fp8" else kv_dtype
            ),
            cache[:, 0],
            cache[:, 1],
            torch.zeros(batch, 4096, dtype=torch.int32),
            torch.zeros(batch, dtype=torch.int32),
        )

        def call(tensors: Any = tensors, query_len: int = query_len, numel: int = numel) -> object:
            before, mha_decode.arch_of = mha_decode.arch_of, lambda device: arch
            try:
                scale = torch.ones(())
                return mha_decode.mha_decode(
                    *tensors, scale=SCALE, query_len=query_len, workspace=torch.empty(numel),
                    k_scale=scale, v_scale=scale,
                )  # fmt: skip
            finally:
                mha_decode.arch_of = before

        yield DrafterLaunch(
            f"mha_decode, {kv} {heads}/{kv_heads} heads, {query_len} tokens, page {page}, "
            f"batch {batch}",
            call,
            str(config),
            config.programs_per_sm,
        )


def state_launches() -> Iterator[DrafterLaunch]:
    """What keeps the state of a proposal."""
    buffers = draft_state.DraftBuffers.of(
        max_batch=4, query_len=4, steps=3, pages=512, device=torch.device("cpu"), width=21504,
        hidden_size=7168,
    )  # fmt: skip
    ints, longs = torch.zeros(4, dtype=torch.int32), torch.zeros(16, dtype=torch.int64)
    table, hidden = buffers.block_table.clone(), torch.empty(16, 21504, dtype=torch.bfloat16)
    staged = {
        "target_token_ids": longs.int(), "target_positions": longs, "next_token_ids": ints,
        "seq_lens": ints, "slot_mapping": longs, "block_table": table, "page_size": 64,
    }  # fmt: skip
    rejected = {"token_indices_to_sample": ints, "num_rejected": ints}
    yield DrafterLaunch("stage_inputs", lambda: draft_state.stage_inputs(buffers, 4, **staged))
    yield DrafterLaunch(
        "stage_inputs, all",
        lambda: draft_state.stage_inputs(buffers, 4, hidden=hidden, **staged, **rejected),
    )
    yield DrafterLaunch(
        "stage_tail",
        lambda: draft_state.stage_tail(
            buffers, 4, draft_token_ids=longs[:4], positions=longs, seq_lens=ints,
            block_table=table, hidden=hidden[:, :7168], page_size=64, max_model_len=32768,
            **rejected,
        ),
    )  # fmt: skip
    rows = (torch.empty(4, 7168), torch.empty(4, 7168))
    for count in (1, 2):
        yield DrafterLaunch(
            f"take_rows, {count}",
            lambda n=count: draft_state.take_rows(
                rows[:n], buffers.sample_indices, tuple(torch.empty_like(row) for row in rows[:n])
            ),
        )
    for chosen in (longs[:4], longs.view(4, 4)[:1], longs.view(4, 4)):
        for step in (0, 1):
            yield DrafterLaunch(
                f"next_step, {tuple(chosen.shape)}, {step}",
                lambda chosen=chosen, step=step: draft_state.next_step(
                    chosen, longs[:4], ints, table, longs[4:8], ints, buffers.drafts, step,
                    page_size=64, max_model_len=32768,
                ),
            )  # fmt: skip


def drafter_launches(arch: architectures.Arch) -> Iterator[DrafterLaunch]:
    """The launches of the drafter's kernels that this architecture can run."""
    yield from mha_launches(arch)
    yield from state_launches()
    # Each kind of kernel says beside its tests what is to be compiled.
    for name in ("test_skinny_gemm", "test_head_argmax", "test_head_products"):
        module = importlib.import_module(f"tests.kernels.{name}")
        for what, call in module.offline_launches(arch):
            yield DrafterLaunch(what, call)
    elementwise = importlib.import_module("tests.kernels.draft_launches")
    for what, call in elementwise.offline_launches(arch.capability):
        yield DrafterLaunch(what, call)


def compiled_rows(
    arch: architectures.Arch, which: tuple[str, ...], changes: dict[str, Any]
) -> Iterator[tuple[dict[str, Any], Resources]]:
    """What a launch is and what each of its kernels takes."""
    if "verify" in which:
        for launch, config in launches_of(arch):
            config = dataclasses.replace(config, **changes)
            about = {
                "arch": arch.name,
                "launch": str(launch),
                "config": str(config),
                "programs_per_sm": config.programs_per_sm,
            }
            for used in compile_launch(arch, launch, config):
                yield about, used
    if "drafter" in which:
        for drafter in drafter_launches(arch):
            about = {
                "arch": arch.name,
                "launch": drafter.name,
                "config": drafter.config,
                "programs_per_sm": drafter.programs_per_sm,
            }
            with compiling_for(arch.capability[0] * 10 + arch.capability[1]) as compiled:
                drafter.call()
            for used in compiled:
                yield about, used


def parse_changes(text: str) -> dict[str, Any]:
    """`block_n=32,num_warps=8`; values are JSON."""
    pairs = (word.partition("=") for word in text.split(",") if word)
    return {name: json.loads(value) for name, _, value in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--arch", nargs="+", help="sm_120 ...; default: all of the table")
    parser.add_argument("--config", default="", help="what to change in mla_decode's")
    parser.add_argument(
        "--kernels", nargs="+", choices=("verify", "drafter"), default=("verify", "drafter")
    )
    parser.add_argument("--json", action="store_true", help="one object a line")
    options = parser.parse_args()
    if type(kernels._attend) is not JITFunction:
        sys.exit("TRITON_INTERPRET is set: nothing can be compiled")
    for capability in architectures.CAPABILITIES:
        arch = architectures.arch(capability)
        if options.arch and arch.name not in options.arch:
            continue
        for about, used in compiled_rows(arch, options.kernels, parse_changes(options.config)):
            if options.json:
                print(json.dumps({**about, **dataclasses.asdict(used)}), flush=True)
            else:
                print(
                    f"{arch.name} {about['launch']}: {used.kernel} {used.shared} B shared, "
                    f"{used.registers} registers, {used.spilled} B spilled "
                    f"({used.spills_in_loop} times in the loop), {used.seconds} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
