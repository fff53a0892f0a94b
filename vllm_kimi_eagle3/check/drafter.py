# SPDX-License-Identifier: Apache-2.0
"""The drafter: is it here, does its checkpoint fit its config, its target and this vLLM's class,
and what will it be fed."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_kimi_eagle3.checkpoint.aux_layers import FILE
from vllm_kimi_eagle3.checkpoint.drafter import (
    Drafter,
    TargetShape,
    attention_of,
    check_head,
    read_drafter,
)
from vllm_kimi_eagle3.checkpoint.drafter_class import drafter_class
from vllm_kimi_eagle3.checkpoint.drafter_tensors import QUANTISED_LEAVES, compare
from vllm_kimi_eagle3.checkpoint.errors import CheckpointError, plain, quoted
from vllm_kimi_eagle3.checkpoint.folder import (
    drafter_problem,
    local_folder,
    read_config,
)
from vllm_kimi_eagle3.checkpoint.rope import Rope, read_rope
from vllm_kimi_eagle3.checkpoint.sharing import TENSORS, owners, seems_same
from vllm_kimi_eagle3.checkpoint.tensors import TensorInfo, weight_files
from vllm_kimi_eagle3.checkpoint.vocabulary import check_sizes, read_vocabulary
from vllm_kimi_eagle3.findings import Evidence, Finding, Severity
from vllm_kimi_eagle3.host import SUPPORTED
from vllm_kimi_eagle3.pair import AUX_LAYERS_SETTING, settings_of, tensors_of

from .facts import Facts, facts_for
from .length import longest_request
from .not_here import checkpoint_not_here, download, from_modelscope
from .spelling import is_eagle3
from .subject import Checkpoint, Subject
from .target import broken_quantization_file, quantization_of, repeated_keys

# Of every published Kimi: where the target itself is not on this machine.
KIMI = TargetShape(num_layers=61, hidden_size=7168, vocab_size=163840)

# What Transformers' config classes have where a config.json names no max_position_embeddings:
# LlamaConfig and DeepseekV3Config, 4.56 to 5.24.
DEFAULT_LENGTH = {"llama": 2048, "mla": 4096}

# Patches whose steps look at the pair: with any of them in effect its config is checked.
_LOOKING = ("aux-layers", "drafter-tensors", "draft-vocabulary", "eagle31-drafter", "drafter-rope")
# What stock does not stop at: it goes on with one of two values, or with another rope.
_GOES_ON = ("drafter-aux-contradiction", "drafter-config-contradiction", "drafter-rope")

_DTYPES = {
    "bfloat16": "BF16",
    "float16": "F16",
    "half": "F16",
    "float32": "F32",
    "float": "F32",
}
_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}

_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SHOWN = 12  # Digits of a hash, as in Hugging Face's own pages.
_MAX_METADATA_BYTES = 4096


def findings(subject: Subject) -> Iterator[Finding]:
    """What there is to say of the drafter; fills in ``drafter``, ``pair`` and ``tensors``."""
    speculative = subject.command.speculative or {}
    model, revision = speculative.get("model"), speculative.get("revision")
    if not is_eagle3(speculative) or not isinstance(model, str) or not model:
        return
    subject.drafter = Checkpoint(model)
    if (problem := drafter_problem(model)) is not None:
        yield problem.finding
        return
    revision = revision if isinstance(revision, str) else None
    folder = local_folder(model, revision, subject.environ)
    modelscope = from_modelscope(subject.environ, subject.facts) and not os.path.isdir(model)
    if folder is None or modelscope:
        yield checkpoint_not_here(
            "drafter", model, revision, subject.environ, modelscope=modelscope
        )
        return
    subject.drafter.folder = folder
    if (problem := drafter_problem(str(folder))) is not None:
        yield problem.finding
        return
    config = read_config(folder)
    subject.drafter.config = config
    yield from repeated_keys(config, folder / FILE)
    yield from broken_quantization_file(config, folder)
    for finding in _of_folder(subject, folder, config):
        yield _placed(finding, folder, subject.facts)


def _of_folder(subject: Subject, folder: Path, config: Mapping[str, Any]) -> Iterator[Finding]:
    command = subject.command
    subject.progress(f"reading {folder}")
    yield from _architecture(config, subject.facts)
    load_format = command.text("load-format") or "auto"
    model = "" if subject.drafter is None else subject.drafter.model
    try:
        subject.tensors = tensors_of(folder, model, load_format)
    except CheckpointError as error:
        yield error.finding
    else:
        if subject.tensors is None:
            yield _weights_not_here(subject, folder, load_format)
    try:
        chosen = settings_of(command.object("additional-config")).get(AUX_LAYERS_SETTING)
    except CheckpointError as error:
        yield error.finding
        chosen = None
    shape = subject.shape
    if shape is None:
        if subject.target is not None and subject.target.config is not None:
            return  # No Kimi: that is said where the target is looked at.
        shape = KIMI
    quantization = _quantization(folder, config)
    asked = (command.speculative or {}).get("quantization")
    online = {"quant_method": asked} if isinstance(asked, str) else None
    try:
        pair = read_drafter(
            {**config, "quantization_config": online if quantization is None else quantization},
            shape,
            subject.tensors,
            chosen,
            parallel_drafting=(command.speculative or {}).get("parallel_drafting") is True,
        )
    except CheckpointError as error:
        yield _rated(error.finding, subject)
        return
    if pair is None:
        return
    subject.pair = pair
    yield from _aux(pair, shape, assumed=subject.shape is None)
    yield from _tensors(subject, pair)
    if quantization is not None:
        yield from _plain_weights(subject, pair)
    yield from _vocabulary(subject, pair)
    yield from _heads(subject)
    yield from _rope(subject, pair)
    yield from _length(subject, pair)
    yield from _layers(subject, pair)
    yield from _dtype(subject)
    yield from _files(folder)


# ------------------------------------------------------------------------------------- where it is


def _weights_not_here(subject: Subject, folder: Path, load_format: str) -> Finding:
    speculative = subject.command.speculative or {}
    model, revision = str(speculative.get("model")), speculative.get("revision")
    try:
        names = {name.rpartition(".")[2] for name in os.listdir(folder)}
    except OSError:
        names = set()
    if load_format not in ("auto", "hf", "safetensors", "fastsafetensors"):
        why = f"--load-format {quoted(load_format)} takes the weights from elsewhere"
        fix = "nothing to do; the server checks them when it loads them"
    elif names & {"bin", "pt"} and "safetensors" not in names:
        why = "the weights are PyTorch's .bin files, which this check does not read"
        fix = "export the drafter as safetensors, or let the server check it when it loads it"
    elif Path(model) == folder:
        why, fix = "the folder holds no safetensors files", "put the drafter's weights into it"
    else:
        why = "not all of its weights are on this machine"
        fix = download(model, revision if isinstance(revision, str) else None)
    return Finding(
        "drafter-weights-not-here",
        f"the drafter's tensors could not be looked at: {why}",
        fix,
        Evidence(file=plain(str(folder))),
    )


def _placed(finding: Finding, folder: Path, facts: Facts | None) -> Finding:
    """The finding with the place of its file, and the vLLM that it was held against."""
    evidence = finding.evidence
    if evidence.file == FILE:
        evidence = replace(evidence, file=plain(str(folder / FILE)))
    elif evidence.file is None and finding.id.startswith(_OF_WEIGHTS):
        evidence = replace(evidence, file=plain(str(folder)))
    if facts is not None and finding.id in _BY_RELEASE:
        evidence = replace(evidence, release=facts.release)
    return replace(finding, evidence=evidence)


_OF_WEIGHTS = (
    "drafter-tensor-",
    "drafter-d2t",
    "drafter-t2d",
    "drafter-fc-width",
    "drafter-heads",
    "drafter-quantized-head",
    "drafter-dtype",
)
_BY_RELEASE = frozenset({"drafter-architecture", "drafter-quantized-head", "drafter-layers"})


def _rated(finding: Finding, subject: Subject, attention: str | None = None) -> Finding:
    """The finding, as bad as it is where the patch that would refuse it is not in effect."""
    off = {name for name, in_effect in subject.patches.items() if not in_effect}
    kind, goes_on = finding.id, False
    if kind.startswith("drafter-tensor-") and "drafter-tensors" in off:
        stops = kind == "drafter-tensor-shape" or (
            kind == "drafter-tensor-unexpected" and not drops_tensors(attention, subject.facts)
        )
        goes_on = not stops
    elif kind == "drafter-d2t":
        goes_on = "draft-vocabulary" in off
    elif kind in _GOES_ON:
        goes_on = off.issuperset(_LOOKING)
    return replace(finding, rated=Severity.WRONG) if goes_on else finding


def drops_tensors(attention: str | None, facts: Facts | None) -> bool:
    """True if stock skips a tensor without a place (``deepseek_eagle3.load_weights``)."""
    if attention != "mla" or facts is None:
        return False
    return not facts.before("0.18") and facts.before("0.25")


# ---------------------------------------------------------------------------- what the config says


def _class_names(config: Mapping[str, Any], facts: Facts | None) -> list[str]:
    """The drafter's classes as vLLM looks for them."""
    if config.get("speculators_model_type") == "eagle3":
        # As update_eagle3 names them (speculators/algos.py), whatever the config says.
        layer = config.get("transformer_layer_config")
        kind = layer.get("model_type", "llama") if isinstance(layer, Mapping) else "llama"
        one_only = facts is not None and facts.before("0.24")
        return [_LLAMA_SPECULATORS if one_only or kind == "llama" else _QWEN_SPECULATORS]
    # As EAGLEConfig renames them (transformers_utils/configs/eagle.py, 0.15 to 0.33).
    stated = config.get("architectures")
    names = [n for n in stated if isinstance(n, str)] if isinstance(stated, list) else []
    return [n if n.startswith("Eagle3") or n.endswith("Eagle3") else f"Eagle3{n}" for n in names]


def has_class(config: Mapping[str, Any], facts: Facts | None) -> bool:
    """True if the vLLM has a class for a drafter with this config, of its own or the plugin's."""
    attention, names = attention_of(config), _class_names(config, facts)
    if not names:
        return False
    if facts is None or any(name in facts.architectures for name in names):
        return True
    # Up to 0.17 the plugin's own class; where its patch is not in effect, path.py says so.
    return attention == "mla" and facts.before("0.18")


def _architecture(config: Mapping[str, Any], facts: Facts | None) -> Iterator[Finding]:
    attention, names = attention_of(config), _class_names(config, facts)
    evidence = Evidence(file=FILE, key="architectures", value=quoted(config.get("architectures")))
    if not has_class(config, facts):
        if not names or facts is None:
            yield Finding(
                "drafter-architecture",
                "the drafter's config.json names no architecture, so vLLM cannot tell its class",
                f'set "architectures": ["{_LLAMA}"] there, or ["{_MLA}"] for a drafter with MLA',
                evidence,
            )
            return
        since = next((r for r in SUPPORTED if names[0] in facts_for(r).architectures), None)
        later = since is not None and facts.before(since)
        yield Finding(
            "drafter-architecture",
            f"vLLM {facts.release} has no class {quoted(names[0])}, which the drafter's "
            "config.json asks for",
            (f"use vLLM {since} or later, or " if later else "")
            + f"give a drafter of the class {_LLAMA} or {_MLA}",
            evidence,
        )
    elif attention is None:
        yield Finding(
            "drafter-other-family",
            f"the drafter's class is {quoted(names[0])}, which no published drafter of Kimi has: "
            "it runs as vLLM has it, and nothing of it was checked",
            "compare its aux layers, rope and tensors with its model card",
            evidence,
        )


_LLAMA_SPECULATORS, _QWEN_SPECULATORS = "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM"
_LLAMA, _MLA = "LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"


def _quantization(folder: Path, config: Mapping[str, Any]) -> Any:
    """What the drafter's files say of its quantisation, wherever vLLM finds it."""
    for key in ("quantization_config", "compression_config"):
        if config.get(key) is not None:
            return config[key]
    return quantization_of({}, folder)[0]


def _aux(pair: Drafter, shape: TargetShape, *, assumed: bool) -> Iterator[Finding]:
    aux = pair.aux
    if aux is None:
        return
    if aux.unsure is not None:
        yield aux.unsure
        return
    said = "names none" if aux.stated is None else f"says {list(aux.stated)}"
    of = f"the target's {shape.num_layers} layers"
    of += " (as every published Kimi has, since the target is not here)" if assumed else ""
    yield Finding(
        "drafter-aux-captured",
        f"the drafter is fed the hidden states at {list(aux.captured)} of {of}, as vLLM counts: "
        f"{aux.source} {said} ({aux.rule})",
        evidence=Evidence(
            file=aux.file,
            key=aux.key,
            value=None if aux.stated is None else str(list(aux.stated)),
        ),
    )


# ------------------------------------------------------------------------------------- the tensors


def _tensors(subject: Subject, pair: Drafter) -> Iterator[Finding]:
    tensors, facts = subject.tensors, subject.facts
    if tensors is None:
        return
    problems, _ = compare(tensors, pair.expected)
    for problem in problems:
        yield _rated(problem.finding, subject, pair.attention)
    if facts is not None and facts.version is not None:
        try:
            check_head(tensors, drafter_class(pair.attention, facts.version).quantized_head)
        except CheckpointError as error:
            yield error.finding


def _plain_weights(subject: Subject, pair: Drafter) -> Iterator[Finding]:
    tensors, facts = subject.tensors, subject.facts
    if tensors is None or _any_quantised(tensors):
        return
    goes_on = facts is None or drops_tensors(pair.attention, facts)
    yield Finding(
        "drafter-quantization",
        f"the drafter's config says that its weights are quantised ({pair.quantization}), and no "
        "tensor of its checkpoint is: vLLM builds quantised layers and finds no weights for them, "
        "unless the ignore list leaves out every layer",
        "remove quantization_config from the drafter's config.json (or hf_quant_config.json beside "
        "it)",
        Evidence(file=FILE, key="quantization_config", value=pair.quantization),
        rated=None if goes_on else Severity.FAILS,
    )


def _any_quantised(tensors: Mapping[str, TensorInfo]) -> bool:
    return any(
        name.rpartition(".")[2] in QUANTISED_LEAVES
        or (name.endswith(".weight") and info.dtype not in _NAMES)
        for name, info in tensors.items()
    )


def _vocabulary(subject: Subject, pair: Drafter) -> Iterator[Finding]:
    expected, tensors = pair.expected, subject.tensors
    try:
        check_sizes(expected.vocab_size, expected.draft_vocab_size)
        if tensors is None or (
            expected.draft_vocab_size < expected.vocab_size and "d2t" not in tensors
        ):
            return  # That it is missing was said with the other tensors.
        yield from read_vocabulary(expected, tensors).notes
    except CheckpointError as error:
        yield _rated(error.finding, subject, pair.attention)


def _heads(subject: Subject) -> Iterator[Finding]:
    tensors = subject.tensors
    if tensors is None:
        return
    target = None if subject.target is None else subject.target.folder
    decided = owners(tensors, target, seems_same)
    said = {}
    for part, name in TENSORS.items():
        mine = sum(t.nbytes for n, t in tensors.items() if n.startswith(name.partition(".")[0]))
        if decided[part] == "own":
            said[part] = f"its own ({_size(mine)})"
        else:
            said[part] = "the target's" + (", of which it has a copy" if mine else "")
    yield Finding(
        "drafter-heads",
        f"the drafter's embedding is {said['embedding']}, its LM head {said['head']}",
        evidence=Evidence(
            key=", ".join(TENSORS.values()),
            value=", ".join(f"{part} {owner}" for part, owner in decided.items()),
        ),
    )


# ------------------------------------------------------------------------------ rope, length, dtype


def _rope(subject: Subject, pair: Drafter) -> Iterator[Finding]:
    try:
        target = read_rope(text) if (text := subject.target_text) else None
    except CheckpointError:
        return
    if target is None:
        return
    differing = [
        f"{what} {own} against {other}".strip()
        for what, own, other in _compared(pair.rope, target)
        if own != other
    ]
    if differing:
        yield Finding(
            "drafter-rope-of-target",
            f"the drafter's rope is not the target's: {', '.join(differing)}",
            evidence=Evidence(file=FILE, key="rope_theta, rope_scaling", value=str(pair.rope)),
        )


def _compared(own: Rope, target: Rope) -> Iterator[tuple[str, str, str]]:
    """What the two have of each part of a rope."""
    yield "theta", f"{own.theta:g}", f"{target.theta:g}"
    yield "", str(own).partition(", ")[2], str(target).partition(", ")[2]
    if own.yarn and target.yarn:
        for key in ("original_max_position_embeddings", "beta_fast", "beta_slow"):
            values = [rope.scaling.get(key) for rope in (own, target)]
            mine, other = ("absent" if v is None else f"{v:g}" for v in values)
            yield key, mine, other


def _length(subject: Subject, pair: Drafter) -> Iterator[Finding]:
    if subject.patches.get("drafter-positions") is False:
        return  # What stock does is said with the patch.
    if (subject.command.speculative or {}).get("max_model_len") is not None:
        return  # The user's own limit.
    longest = longest_request(subject)
    if longest is not None:
        default = DEFAULT_LENGTH[pair.attention]
        reach = pair.rope.reach(pair.max_position_embeddings, default, longest)
        if reach.finding is not None:
            yield reach.finding


def _layers(subject: Subject, pair: Drafter) -> Iterator[Finding]:
    count, facts = pair.expected.num_layers, subject.facts
    if count == 1:
        return
    one = ""
    if pair.attention == "mla" and facts is not None and facts.before("0.18"):
        one = f", and the class that serves it on vLLM {facts.release} has one"
    yield Finding(
        "drafter-layers",
        f"the drafter has {count} decoder layers{one}",
        "use vLLM 0.18 or later, or a drafter with one" if one else "",
        Evidence(file=FILE, key="num_hidden_layers", value=str(count)),
        rated=Severity.FAILS if one else None,
    )


def _dtype(subject: Subject) -> Iterator[Finding]:
    if subject.tensors is None:
        return
    config = {} if subject.target is None else subject.target.config or {}
    text = subject.target_text
    stated: list[Any] = [subject.command.text("dtype")]  # "auto" is none of those below.
    stated += [block.get(key) for block in (config, text) for key in ("dtype", "torch_dtype")]
    runs = next((_DTYPES[s] for s in stated if isinstance(s, str) and s in _DTYPES), None)
    stored = Counter[str]()
    for info in subject.tensors.values():
        if info.dtype in _NAMES:
            stored[info.dtype] += info.nbytes
    most = stored.most_common(1)
    if runs is None or not most or most[0][0] == runs:
        return
    yield Finding(
        "drafter-dtype",
        f"the drafter is stored in {_NAMES[most[0][0]]} and runs in {_NAMES[runs]}, as the target "
        "does: it is converted when it is loaded",
        "",
        Evidence(
            key=next(plain(n) for n, info in subject.tensors.items() if info.dtype == most[0][0]),
            value=most[0][0],
        ),
    )


# ------------------------------------------------------------------------------------ which files


def _files(folder: Path) -> Iterator[Finding]:
    try:
        files = weight_files(folder).files
        sizes = [os.stat(file).st_size for file in files]
    except (CheckpointError, OSError):
        return
    if not files:
        return
    commit, checksum = _identity(files[0])
    first = plain(files[0].name)
    what = first if len(files) == 1 else f"{len(files)} files"
    said = [f"{what} of {sum(sizes):,} bytes"]
    if checksum is not None:
        of = "" if len(files) == 1 else f" of {first}"
        said.append(f"{'sha256' if len(checksum) == 64 else 'git hash'}{of} {checksum[:_SHOWN]}")
    said.append("of an unknown commit" if commit is None else f"commit {commit[:_SHOWN]}")
    yield Finding(
        "drafter-files",
        f"the drafter's weights are {', '.join(said)}",
        evidence=Evidence(plain(str(folder)), None if commit is None else "revision", commit),
    )


def _identity(file: Path) -> tuple[str | None, str | None]:
    """The commit and the checksum that Hugging Face's library keeps of a file, where it does."""
    commit = checksum = None
    if file.parent.parent.name == "snapshots":
        commit = file.parent.name
        with contextlib.suppress(OSError):
            checksum = Path(os.readlink(file)).name
    else:
        # ``hf download --local-dir``: commit, checksum and time, a line each.
        kept = file.parent / ".cache" / "huggingface" / "download" / f"{file.name}.metadata"
        with contextlib.suppress(OSError, ValueError, IndexError):
            if kept.is_file():
                with open(kept, "rb") as stream:
                    lines = stream.read(_MAX_METADATA_BYTES).decode("ascii").split("\n")
                commit, checksum = lines[0].strip(), lines[1].strip()
    return (
        commit if commit is not None and _HASH.fullmatch(commit) else None,
        checksum if checksum is not None and _HASH.fullmatch(checksum) else None,
    )


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"
