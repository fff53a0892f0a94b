# SPDX-License-Identifier: Apache-2.0
"""Which ways of running Kimi with EAGLE-3 cannot work on a vLLM, told from the settings alone.

vLLM finds most of them out after the target is loaded, or at the first request, or not at all.
Every limit holds for ranges of releases; the comment beside it says what in their sources it rests
on. What the sources do not show to be wrong is let through. Nothing of vLLM is imported. ``check``
asks for them before a start, and vLLM's own start once its configuration is complete.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from packaging.version import Version

from .checkpoint.aux_layers import default_layers
from .findings import Evidence, Finding, Severity
from .host import V2_RUNNER_SINCE, V2_RUNNER_SWITCH, asked_for_v2, find_host

Runner = Literal["V1", "V2"]
Attention = Literal["llama", "mla"]

_WORKSPACE_CRASH = "https://github.com/vllm-project/vllm/issues/40791"

# The drafter is not asked to support pipeline parallelism itself from this release on.
_DRAFTER_ON_ONE_RANK = Version("0.30")
# "attention_backend" in --speculative-config (pull 39930): read by V1 from this release on, where
# the drafter no longer has the server's choice; by V2 from the other (pull 54826), where it still
# has the server's if it has none of its own.
_DRAFT_BACKEND_V1 = Version("0.21")
_DRAFT_BACKEND_V2 = Version("0.30")
# From here on vLLM no longer forces a back-end on the whole server itself.
_FLASHINFER_MLA_FREE = Version("0.18")
# FlashAttention's DCP path takes its buffer from the workspace that is locked after capture.
_DCP_WORKSPACE = Version("0.20")
# V2's drafter computes the lengths of its own rank (pull 54277).
_DCP_LENGTHS_V2 = Version("0.29")


@dataclass(frozen=True)
class Run:
    """How a Kimi target and its EAGLE-3 drafter are to be run.

    Attributes:
        version: of vLLM; None where it states none, which counts as newer than any.
        runner: the model runner that serves.
        drafter_attention: ``llama`` for any multi-head attention.
        attention_backend: what is forced for the whole server, by the user or by vLLM.
        draft_attention_backend: the one in ``--speculative-config``.
        draft_tensor_parallel_size: as the user wrote it; None if not given.
        replicated: the plugin makes a ``draft_tensor_parallel_size`` of 1 true.
        num_speculative_tokens: None if not known.
        drafter_kv_heads: the drafter's KV heads over all ranks; None if not known.
        aux_layers: the target's layers whose hidden states the drafter reads; None if not known.
        last_rank_start: the first layer of the last pipeline rank; None if not known.
    """

    version: Version | None
    runner: Runner
    drafter_attention: Attention
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    attention_backend: str | None = None
    draft_attention_backend: str | None = None
    draft_tensor_parallel_size: int | None = None
    replicated: bool = False
    num_speculative_tokens: int | None = None
    drafter_kv_heads: int | None = None
    aux_layers: tuple[int, ...] | None = None
    last_rank_start: int | None = None

    def before(self, version: Version) -> bool:
        """True if vLLM is known to be older than ``version``."""
        return self.version is not None and Version(self.version.base_version) < version


def limits(run: Run) -> list[Finding]:
    """Every limit that ``run`` meets, those that refuse it first."""
    found = [
        *_pipeline_parallel(run),
        *_context_parallel(run),
        *_attention_backend(run),
        *_draft_tensor_parallel(run),
    ]
    return sorted(found, key=lambda finding: finding.severity is not Severity.FAILS)


def _evidence(run: Run, key: str, value: object) -> Evidence:
    release = None if run.version is None else str(run.version)
    return Evidence(key=key, value=str(value), release=release)


def _pipeline_parallel(run: Run) -> Iterator[Finding]:
    # DeepseekV2Model hands on hidden_states and residual only, and captures the layers of its own
    # rank; in no release has it `supports_aux_hidden_states_over_pp`, which pull 50514 gave to
    # other models. Up to 0.29 SpeculativeConfig refuses before that, with a NotImplementedError
    # that does not say whom it means: create_draft_parallel_config has the target's pipeline size,
    # and no EAGLE-3 drafter is SupportsPP. From 0.30 V1 runs the drafter on the last rank with what
    # was captured there, so layers that all lie there are enough; V2 refuses any, after the load.
    size = run.pipeline_parallel_size
    if size < 2:
        return
    if run.before(_DRAFTER_ON_ONE_RANK):
        why = (
            "this vLLM wants the drafter split over the ranks as well, and no EAGLE-3 drafter can "
            "be ('Pipeline parallelism is not supported for this model'), nor does Kimi hand its "
            "aux hidden states on"
        )
    elif run.runner == "V2":
        why = (
            "the V2 runner has no way to bring Kimi's aux hidden states to the last rank and stops "
            "once it has come to the drafter"
        )
    else:
        where = "the drafter's aux layers are not all on the last rank"
        if run.aux_layers is not None and run.last_rank_start is not None:
            if all(layer >= run.last_rank_start for layer in run.aux_layers):
                return
            where = (
                f"of the drafter's aux layers {list(run.aux_layers)} only those from "
                f"{run.last_rank_start} on are on the last rank"
            )
        why = (
            f"{where}, and Kimi's decoder hands no aux hidden states on, so the drafter's fc gets "
            "too few of them"
        )
    yield Finding(
        "run-pipeline-parallel",
        f"EAGLE-3 cannot run with --pipeline-parallel-size {size}: {why}",
        "use --pipeline-parallel-size 1 and a larger --tensor-parallel-size, or leave out "
        "--speculative-config",
        _evidence(run, "--pipeline-parallel-size", size),
    )


def _context_parallel(run: Run) -> Iterator[Finding]:
    size = run.decode_context_parallel_size
    if size < 2:
        return
    asked = f"--decode-context-parallel-size {size}"
    evidence = _evidence(run, "--decode-context-parallel-size", size)
    if run.tensor_parallel_size % size:
        # ParallelConfig, in every release: the DCP groups are parts of the tensor-parallel one.
        yield Finding(
            "run-dcp-size",
            f"{asked} does not divide --tensor-parallel-size {run.tensor_parallel_size}, whose "
            "ranks share the KV cache out",
            "give one that does",
            evidence,
        )
        return
    if run.drafter_attention == "llama":
        # vLLM checks the target's KV heads against DCP in ModelConfig.verify_with_parallel_config.
        # The drafter is not checked, since create_draft_parallel_config copies no DCP, in any
        # release. FlashAttentionImpl._forward_with_dcp gathers the query heads of all ranks and
        # merges the ranks' results as if each held the same KV heads.
        if _kv_heads_replicated(run):
            return
        heads = "KV heads of its own"
        if run.drafter_kv_heads is not None:
            heads = (
                f"other KV heads ({run.drafter_kv_heads} over --tensor-parallel-size "
                f"{run.tensor_parallel_size})"
            )
        crash, links = "", None
        if not run.before(_DCP_WORKSPACE):
            crash, links = ", if the first request does not fail before", (_WORKSPACE_CRASH,)
        yield Finding(
            "run-dcp-llama",
            f"a Llama drafter cannot run with {asked}: each rank holds {heads}, and vLLM merges "
            f"their attention as if they were the same, so the drafts are wrong{crash}",
            "use a drafter with MLA, or --decode-context-parallel-size 1",
            evidence,
            links=links,
        )
        return
    # MLA shards its KV cache over the ranks for drafter and target alike. What vLLM's two reports
    # name is elsewhere: 40791 is FlashAttention's path, and 42884 (0.21 to 0.23) the buffers of
    # --dcp-comm-backend a2a, with speculation or without.
    if run.runner == "V2" and run.before(_DCP_LENGTHS_V2):
        # The speculator's build_attn_metadata passes no dcp_local_seq_lens, which the MLA builder
        # takes as the lengths of its decodes. The first draft has the target's metadata.
        if run.num_speculative_tokens == 1:
            return
        yield Finding(
            "run-dcp-v2",
            f"the V2 runner of vLLM {run.version} cannot draft with {asked}: it gives an MLA "
            "drafter no lengths for its rank before 0.29",
            f"set {V2_RUNNER_SWITCH}=0, or use --decode-context-parallel-size 1",
            evidence,
        )
    elif run.runner == "V1" and run.num_speculative_tokens != 1:
        # The proposer hands the target's dcp_local_seq_lens on from one draft step to the next.
        yield Finding(
            "run-dcp-later-drafts",
            f"with {asked} the V1 runner computes all drafts with the target's lengths for its "
            "rank, so those after the first are accepted less often; the tokens are right",
            "",
            evidence,
        )


def _kv_heads_replicated(run: Run) -> bool:
    """True if the ranks of a DCP group are known to hold the same KV heads."""
    heads = run.drafter_kv_heads
    if heads is None or heads < 1 or run.tensor_parallel_size % heads:
        return False
    return run.tensor_parallel_size // heads % run.decode_context_parallel_size == 0


def _attention_backend(run: Run) -> Iterator[Finding]:
    # The layer asks the selector with the backend of the config it is built with, and
    # AttentionBackend.validate_configuration refuses MLA for other layers and others for MLA
    # ("MLA not supported", "non-MLA not supported") in every release.
    backend, own = drafter_backend(run)
    ignored = run.draft_attention_backend if not own else None
    other = run.drafter_attention != "mla"
    if backend is not None and is_mla(backend) is other:
        drafter = "an MLA drafter" if run.drafter_attention == "mla" else "a Llama drafter"
        kind = "is an MLA back-end" if is_mla(backend) else "is no MLA back-end"
        flag = '"attention_backend" in --speculative-config' if own else "--attention-backend"
        forces, fix = f"{flag} forces on it", _backend_fix(run, own)
        if backend == "FLASHINFER_MLA" and run.before(_FLASHINFER_MLA_FREE) and not own:
            # CudaPlatformBase.check_and_update_config writes it into the attention config on
            # compute capability 10.x, the only one that has it, whatever the user says.
            flag, fix = "attention_config.backend", "use a drafter with MLA, or vLLM 0.18 or later"
            forces = f"vLLM {run.version} itself forces on a Blackwell GPU"
        yield Finding(
            "run-draft-backend",
            f"{drafter} cannot run on {backend}, which {kind} and which {forces}",
            fix,
            _evidence(run, flag, backend),
        )
    elif ignored is not None and ignored != backend:
        yield Finding(
            "run-draft-backend-ignored",
            f'"attention_backend": "{ignored}" in --speculative-config has no effect on the V2 '
            "runner before 0.30: the drafter has the server's --attention-backend",
            "leave it out, or set --attention-backend",
            _evidence(run, '"attention_backend" in --speculative-config', ignored),
        )


def drafter_backend(run: Run) -> tuple[str | None, bool]:
    """The back-end that is forced on the drafter, and whether by its own setting."""
    since = _DRAFT_BACKEND_V1 if run.runner == "V1" else _DRAFT_BACKEND_V2
    if run.before(since):
        return run.attention_backend, False
    if run.runner == "V1" or run.draft_attention_backend is not None:
        return run.draft_attention_backend, True
    return run.attention_backend, False


def _backend_fix(run: Run, own: bool) -> str:
    if own:
        return "remove it there, and vLLM chooses one that fits"
    drop = "leave out --attention-backend, and vLLM chooses one that fits each model"
    if run.drafter_attention == "mla":
        # The target has the same attention, and the same answer.
        return drop
    if run.runner == "V2" and not run.before(_DRAFT_BACKEND_V2):
        return (
            'add "attention_backend": "FLASH_ATTN" (or another that is not MLA) to '
            "--speculative-config"
        )
    if run.runner == "V2" and not run.before(_DRAFT_BACKEND_V1):
        return f"{drop}, or set {V2_RUNNER_SWITCH}=0"
    return f"{drop}, or use a drafter with MLA, or vLLM 0.21 or later"


def is_mla(backend: str) -> bool | None:
    """None where the name does not tell: ``CUSTOM`` is whatever a plugin registered."""
    # So are they named in AttentionBackendEnum of every release.
    return None if backend.upper() == "CUSTOM" else "MLA" in backend.upper()


def _draft_tensor_parallel(run: Run) -> Iterator[Finding]:
    # draft_parallel_config is read by the methods draft_model and dspark only; an EAGLE drafter is
    # built in the target's tensor-parallel group. SpeculativeConfig._verify_and_get_draft_tp
    # refuses values other than 1 and the target's size. The plugin makes 1 true
    # (patches/replicated_drafter.py), but not with context parallelism.
    size, ranks = run.draft_tensor_parallel_size, run.tensor_parallel_size
    if size is None or size == ranks or (size == 1 and run.replicated):
        return
    asked = f'"draft_tensor_parallel_size": {size} in --speculative-config'
    refused = size != 1
    if refused:
        fact = (
            f"{asked} is refused: vLLM takes 1 or --tensor-parallel-size ({ranks}) there, and the "
            f"drafter runs over all {ranks} ranks without it"
        )
    else:
        over = f"the drafter runs over all {ranks} ranks of --tensor-parallel-size"
        flag = context_parallel_flag(
            run.decode_context_parallel_size, run.prefill_context_parallel_size
        )
        why = (
            "in vLLM, and the plugin's patch replicated-drafter, which makes it true, is not in "
            "effect"
            if flag is None
            else f"beside {flag}"
        )
        fact = f"{asked} has no effect {why}: {over}"
    yield Finding(
        "run-draft-tensor-parallel",
        fact,
        "leave it out",
        _evidence(run, '"draft_tensor_parallel_size" in --speculative-config', size),
        rated=Severity.FAILS if refused else None,
    )


def context_parallel_flag(decode: int, prefill: int) -> str | None:
    """The flag of context parallelism, beside which no drafter is replicated: its attention gathers
    query heads over ranks, each of which would have all of them. None if there is none.

    Args:
        decode: ``--decode-context-parallel-size``.
        prefill: ``--prefill-context-parallel-size``.
    """
    if decode > 1:
        return f"--decode-context-parallel-size {decode}"
    return f"--prefill-context-parallel-size {prefill}" if prefill > 1 else None


def run_of(
    vllm_config: Any,
    version: Version | None = None,
    aux_layers: tuple[int, ...] | None = None,
    *,
    replicated: bool = False,
) -> Run:
    """The :class:`Run` that a ``VllmConfig`` with an EAGLE-3 drafter asks for.

    Args:
        vllm_config: vLLM's, of any supported release; attributes that it lacks count as not set.
        version: of vLLM; read from the vLLM installed here if not given.
        aux_layers: those that the drafter is fed; the target's own default if not given.
        replicated: it was decided that the drafter is whole on each rank.
    """
    if version is None:
        host = find_host()
        version = host.version if host is not None else None
    parallel = vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    hf_config = getattr(draft, "hf_config", None)
    tensor_parallel = _int(parallel, "tensor_parallel_size") or 1
    pipeline_parallel = _int(parallel, "pipeline_parallel_size") or 1
    layers = _target_layers(getattr(vllm_config, "model_config", None))
    # On the CPU there is one back-end of each kind, and a forced one is ignored.
    cpu = getattr(getattr(vllm_config, "device_config", None), "device_type", None) == "cpu"
    draft_size = _int(speculative, "draft_tensor_parallel_size")
    return Run(
        version=version,
        runner=_runner(vllm_config, version),
        drafter_attention=_drafter_attention(draft, hf_config),
        tensor_parallel_size=tensor_parallel,
        pipeline_parallel_size=pipeline_parallel,
        decode_context_parallel_size=_int(parallel, "decode_context_parallel_size") or 1,
        prefill_context_parallel_size=_int(parallel, "prefill_context_parallel_size") or 1,
        attention_backend=None
        if cpu
        else _name(getattr(getattr(vllm_config, "attention_config", None), "backend", None)),
        draft_attention_backend=None
        if cpu
        else _name(getattr(speculative, "attention_backend", None)),
        # SpeculativeConfig writes the target's size where nothing was given.
        draft_tensor_parallel_size=None if draft_size == tensor_parallel else draft_size,
        replicated=replicated,
        num_speculative_tokens=_int(speculative, "num_speculative_tokens"),
        drafter_kv_heads=_int(hf_config, "num_key_value_heads")
        or _int(hf_config, "num_attention_heads"),
        aux_layers=aux_layers or (None if layers is None else default_layers(layers)),
        last_rank_start=last_rank_start(layers, pipeline_parallel, os.environ),
    )


def _runner(vllm_config: Any, version: Version | None) -> Runner:
    # A property from 0.22 on, which also knows what V2 leaves to V1.
    decided = getattr(vllm_config, "use_v2_model_runner", None)
    if isinstance(decided, bool):
        return "V2" if decided else "V1"
    asked = asked_for_v2(os.environ)
    if asked is not None:
        return "V2" if asked else "V1"
    newer = version is not None and Version(version.base_version) >= V2_RUNNER_SINCE
    return "V2" if newer else "V1"


def _drafter_attention(draft: Any, hf_config: Any) -> Attention:
    # By the class: Eagle3DeepseekV2ForCausalLM has MLA whatever VLLM_MLA_DISABLE says.
    names = getattr(draft, "architectures", None) or getattr(hf_config, "architectures", None)
    if isinstance(names, (list, tuple)) and names:
        return "mla" if any("Deepseek" in str(name) for name in names) else "llama"
    return "mla" if _int(hf_config, "kv_lora_rank") else "llama"


def _target_layers(model_config: Any) -> int | None:
    for name in ("hf_text_config", "hf_config"):
        layers = _int(getattr(model_config, name, None), "num_hidden_layers")
        if layers:
            return layers
    return None


def last_rank_start(layers: int | None, ranks: int, environ: Mapping[str, str]) -> int | None:
    """The first layer of the last rank, as ``get_pp_indices`` has it in every release."""
    if layers is None or ranks < 1:
        return None
    partition = environ.get("VLLM_PP_LAYER_PARTITION")
    if partition is None:
        return layers - layers // ranks
    *_, last = partition.split(",")
    last = last.strip()
    return layers - int(last) if last.isdecimal() and len(last) < 10 else None


def _int(owner: Any, name: str) -> int | None:
    value = getattr(owner, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _name(backend: Any) -> str | None:
    """An attention back-end's name: an enum's member, or a string."""
    if backend is None:
        return None
    return str(getattr(backend, "name", backend))
