# SPDX-License-Identifier: Apache-2.0
"""The target: is it here and whole, is it a Kimi, and does it say what a drafter needs of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from vllm_kimi_eagle3.checkpoint.drafter import TargetShape
from vllm_kimi_eagle3.checkpoint.errors import CheckpointError, plain, quoted
from vllm_kimi_eagle3.checkpoint.folder import (
    folder_problem,
    local_folder,
    no_config,
    read_config,
    read_json,
    snapshot,
)
from vllm_kimi_eagle3.checkpoint.json_reader import JsonObject
from vllm_kimi_eagle3.checkpoint.target import (
    DEFAULT_IMAGE_TOKEN,
    IMAGE_TOKEN_KEYS,
    MULTIMODAL_MODEL_TYPE,
    ConfigFile,
    image_token_id,
    is_kimi_target,
)
from vllm_kimi_eagle3.checkpoint.tensors import (
    WeightFiles,
    headers,
    missing_shard,
    seems_complete,
    weight_files,
)
from vllm_kimi_eagle3.findings import Evidence, Finding, Severity

from .host import fix_of
from .not_here import checkpoint_not_here, download, from_modelscope
from .subject import Checkpoint, Subject, Weights
from .weights import MODALITY, Parallel, Tally, estimate, takes_images

_SILENT_SECONDS = 0.5

# Loaders that take the weights from the folder's safetensors files.
_FROM_THE_FOLDER = ("auto", "hf", "safetensors", "fastsafetensors", "runai_streamer", "dummy")

# ``filter_duplicate_safetensors_files`` looks whether every file of the index is there.
_MISSING_FILES_STOP = "0.26"
# kimi_k25 is served with Transformers' own Kimi_K25Config, whose default is tied.
_TRANSFORMERS_CONFIG = "0.32"
# ``maybe_untie_word_embeddings`` and ``maybe_retie_word_embeddings``.
_TYING_IS_CHECKED = "0.29"
# ``QUANTIZATION_METHODS`` of vllm/model_executor/layers/quantization/__init__.py: those of every
# supported release, and those that came or went, with the first release that has or has not.
_METHODS = frozenset(
    {
        "awq", "awq_marlin", "compressed-tensors", "experts_int8", "fbgemm_fp8", "fp8", "fp_quant",
        "gptq", "gptq_marlin", "inc", "modelopt", "modelopt_fp4", "moe_wna16", "mxfp4", "quark",
        "torchao",
    }
)  # fmt: skip
_CAME = {
    "modelopt_mxfp8": "0.16",
    "modelopt_mixed": "0.17",
    "mxfp8": "0.19",
    "deepseek_v4_fp8": "0.20",
    "fp8_per_block": "0.20",
    "fp8_per_tensor": "0.20",
    "gpt_oss_mxfp4": "0.20",
    "humming": "0.20",
    "int8_per_channel_weight_only": "0.20",
    "online": "0.20",
    "auto_gptq": "0.22",
    "auto_awq": "0.24",
    "fp8_per_channel": "0.24",
    "nvfp4_per_token": "0.26",
}
_WENT = {
    "bitblas": "0.16",
    "gptq_bitblas": "0.16",
    "gptq_marlin_24": "0.16",
    "ipex": "0.16",
    "ptpc_fp8": "0.19",
    "petit_nvfp4": "0.20",
    "cpu_awq": "0.23",
    "gguf": "0.24",
    "bitsandbytes": "0.28",
}
# ``override_quantization_method`` that answers for another method's config where the user asks for
# its own, with the first release that has it and the first that has not.
_OVERRIDES = (
    ("humming", "0.20", None),
    ("gguf", "0.20", "0.24"),
    ("deepseek_v4_fp8", "0.20", None),
)
# The file of ModelOpt 0.29 and before.
_MODELOPT_FILE = "hf_quant_config.json"

# ``_LOAD_FORMAT_TO_MODEL_LOADER`` of vllm/model_executor/model_loader/__init__.py, likewise.
_FORMATS = frozenset(
    {
        "auto", "dummy", "fastsafetensors", "hf", "mistral", "npcache", "pt", "runai_streamer",
        "runai_streamer_sharded", "safetensors", "sharded_state", "tensorizer",
    }
)  # fmt: skip
_FORMATS_CAME = {"instanttensor": "0.18", "modelexpress": "0.22", "ipc_cache": "0.30"}
_FORMATS_WENT = {"gguf": "0.24", "bitsandbytes": "0.28"}

# Of a rope's block; more than any of them.
_MAGNITUDES = ("mscale", "mscale_all_dim")
_ROPE_NUMBERS = (
    "rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
    *_MAGNITUDES,
)  # fmt: skip
_LARGEST = 1e12


def findings(subject: Subject) -> Iterator[Finding]:
    """What there is to say of the target; fills in ``target``, ``shape`` and ``weights``."""
    model = subject.command.model
    if not model:
        return
    subject.target = Checkpoint(model)
    revision = subject.command.text("revision")
    yield from _load_format(subject)
    folder = local_folder(model, revision, subject.environ)
    modelscope = from_modelscope(subject.environ, subject.facts) and not os.path.isdir(model)
    if folder is None or modelscope:
        yield _not_here(subject, model, revision, modelscope)
        return
    subject.target.folder = folder
    try:
        config = read_config(folder)
    except FileNotFoundError:
        yield no_config(folder, "target").finding
        return
    except CheckpointError as error:
        yield error.finding
        return
    yield from repeated_keys(config, folder / "config.json")
    config = _overridden(config, subject.command.object("hf-overrides"))
    subject.target.config = config
    if not is_kimi_target(ConfigFile(config)):
        yield _not_kimi(config, folder)
        return
    shape, wrong = shape_of(config, folder)
    subject.shape = shape or subject.shape
    yield from wrong
    quantization, file = quantization_of(config, folder)
    yield from _weights(subject, config, folder, quantization)
    yield from _quantization(subject, quantization, file)
    yield from _quantization_flag(subject, quantization, file)
    yield from broken_quantization_file(config, folder)
    yield from _rope(config, folder)
    yield from _remote_code(subject, folder)
    if config.get("model_type") == MULTIMODAL_MODEL_TYPE:
        yield from _image_token(subject, config, folder)
        yield from _tied(subject, config, folder)
        yield from _vision(subject, config, folder)


def repeated_keys(config: JsonObject, file: Path) -> Iterator[Finding]:
    """A finding for a key that stands twice in a config, at the top or one level below."""
    places = [("", config), *((f"{k}.", v) for k, v in config.items() if isinstance(v, JsonObject))]
    for place, block in places:
        if block.repeated is not None:
            key = f"{place}{block.repeated}"
            yield Finding(
                "files-duplicate-key",
                f"{str(file)!r} has the key {quoted(key)} more than once, and the last one counts",
                "keep the one that is meant",
                Evidence(plain(str(file)), plain(key), quoted(block.get(block.repeated))),
            )


def quantization_of(
    config: Mapping[str, Any], folder: Path | None
) -> tuple[Mapping[str, Any] | None, str]:
    """What a checkpoint says of its quantisation, and where: in config.json, or in ModelOpt's file
    beside it, which vLLM reads into the config where that says nothing."""
    text = config.get("text_config")
    for place, block in (("", config), ("text_config.", text if isinstance(text, dict) else {})):
        for key in ("quantization_config", "compression_config"):
            if isinstance(found := block.get(key), Mapping):
                return found, f"config.json, {place}{key}"
    try:
        found = None if folder is None else read_json(folder / _MODELOPT_FILE).get("quantization")
    except (FileNotFoundError, CheckpointError):
        found = None
    if not isinstance(found, Mapping):
        return None, ""
    return {"quant_method": "modelopt", **found}, _MODELOPT_FILE


def broken_quantization_file(config: Mapping[str, Any], folder: Path) -> Iterator[Finding]:
    """A finding for ModelOpt's file beside config.json where vLLM reads it and it is no JSON."""
    file = folder / _MODELOPT_FILE
    # ``get_config`` asks the top of config.json alone, and what is no file it takes for absent.
    if config.get("quantization_config") is not None or not os.path.isfile(file):
        return
    try:
        read_json(file)
    except FileNotFoundError:
        return
    except CheckpointError as error:
        yield error.finding


# -------------------------------------------------------------------------------- where it is


def _not_here(subject: Subject, model: str, revision: str | None, modelscope: bool) -> Finding:
    problem = None if model.endswith(".gguf") else folder_problem(model)
    if problem is not None:
        return problem.finding
    some = download(model, revision, "config.json", "model.safetensors.index.json")
    fix = f"for this check `{some}` is enough; `{download(model, revision)}` gets the whole of it"
    return checkpoint_not_here(
        "target", model, revision, subject.environ, fix, modelscope=modelscope
    )


# ---------------------------------------------------------------------------- what it is


def _overridden(config: JsonObject, overrides: Mapping[str, Any] | None) -> JsonObject:
    """The config with what ``--hf-overrides`` sets, in the two configs inside it key by key."""
    if not overrides:
        return config
    merged = JsonObject(config)
    for key, value in overrides.items():
        inner = merged.get(key)
        if key in ("text_config", "vision_config") and isinstance(inner, dict):
            merged[key] = JsonObject({**inner, **value}) if isinstance(value, Mapping) else value
        else:
            merged[key] = value
    return merged


def _not_kimi(config: Mapping[str, Any], folder: Path) -> Finding:
    architectures, model_type = config.get("architectures"), config.get("model_type")
    what = f"architectures {quoted(architectures)}, model_type {quoted(model_type)}"
    text = config.get("text_config")
    if model_type == MULTIMODAL_MODEL_TYPE:
        inner = text.get("model_type") if isinstance(text, Mapping) else None
        what = f"model_type {quoted(model_type)} with a text_config of {quoted(inner)}"
    return Finding(
        "target-not-kimi",
        f"the target is no Kimi K2, K2.5, K2.6 or K2.7 ({what}): the plugin changes nothing for "
        "it, and this check knows nothing of it",
        "nothing to do if it is another model; if it is a Kimi, take config.json from the model's "
        "page",
        Evidence(plain(str(folder / "config.json")), "model_type", quoted(model_type)),
    )


def shape_of(config: Mapping[str, Any], folder: Path) -> tuple[TargetShape | None, list[Finding]]:
    """A target's sizes from its config.json; None, and what is wrong, if they are not all there."""
    multimodal = config.get("model_type") == MULTIMODAL_MODEL_TYPE
    text = config.get("text_config") if multimodal else config
    if not isinstance(text, Mapping):
        text = {}
    found: dict[str, int] = {}
    wrong: list[Finding] = []
    for key in ("num_hidden_layers", "hidden_size", "vocab_size"):
        value = text.get(key)
        if type(value) is int and 0 < value < 2**31:
            found[key] = value
            continue
        name = f"text_config.{key}" if multimodal else key
        said = "is missing" if value is None else f"is {quoted(value)}"
        wrong.append(
            Finding(
                "target-size",
                f"{str(folder / 'config.json')!r}: {name} {said}, and must be a positive number",
                "take config.json from the model's page again",
                Evidence(
                    plain(str(folder / "config.json")),
                    name,
                    "missing" if value is None else quoted(value),
                ),
            )
        )
    if wrong:
        return None, wrong
    sizes = found["num_hidden_layers"], found["hidden_size"], found["vocab_size"]
    return TargetShape(*sizes), []


# ----------------------------------------------------------------------------- its weights


def _weights(
    subject: Subject,
    config: Mapping[str, Any],
    folder: Path,
    quantization: Mapping[str, Any] | None,
) -> Iterator[Finding]:
    parallel = Parallel.of(subject.command, subject.facts)
    tally = estimate(config, quantization)
    folder = _weights_folder(subject, folder)
    load_format = (subject.command.text("load-format") or "auto").lower()
    if load_format in _FROM_THE_FOLDER and subject.shape is not None:
        try:
            files = weight_files(folder) if os.path.isdir(folder) else WeightFiles(folder, ())
            if not files.files and not files.missing:
                if load_format != "dummy":
                    yield _no_weights(subject, folder)
            elif files.missing and not _is_own(subject):
                yield _incomplete(subject, files)
            elif files.missing:
                yield _rated_missing(subject, files, quantization)
            elif not seems_complete(files) and not _is_own(subject):
                yield _incomplete(subject, files)
            else:
                tally = _tally(subject, files, config)
                yield from _head(subject, tally, folder, quantization)
        except CheckpointError as error:
            yield error.finding
    if tally is not None:
        subject.weights = Weights(
            tally.per_rank(parallel), tally.total, tally.estimated or parallel.pipeline > 1
        )


def _is_own(subject: Subject) -> bool:
    """True for a folder of the user's; a snapshot in a cache is completed when vLLM starts."""
    target = subject.target
    return target is not None and target.folder == Path(target.model)


def _weights_folder(subject: Subject, folder: Path) -> Path:
    """Where vLLM takes the weights from: config and weights of a download may be in two caches."""
    target, directory = subject.target, subject.command.text("download-dir")
    if target is None or directory is None or _is_own(subject):
        return folder
    try:
        found = snapshot(Path(directory), target.model, subject.command.text("revision"))
    except (OSError, ValueError):
        found = None
    return found or Path(directory)


def _tally(subject: Subject, files: WeightFiles, config: Mapping[str, Any]) -> Tally:
    text = config.get("text_config", config)
    experts = text.get("n_routed_experts") if isinstance(text, Mapping) else None
    tally = Tally(num_experts=experts if type(experts) is int and 0 < experts < 2**20 else 1)
    layers = 0 if subject.shape is None else subject.shape.num_layers
    said, count = time.monotonic(), len(files.files)
    for index, (_, tensors) in enumerate(headers(files), start=1):
        for name, info in tensors.items():
            tally.add(name, info, layers)
        if (now := time.monotonic()) - said > _SILENT_SECONDS and index < count:
            said = now
            subject.progress(f"read the headers of {index} of {count} files of the target")
    return tally


def _no_weights(subject: Subject, folder: Path) -> Finding:
    if not _is_own(subject):
        return _incomplete(subject, WeightFiles(folder, ()))
    return Finding(
        "files-no-weights",
        f"the folder {str(folder)!r} holds no safetensors files, so the target's weights "
        "were not looked at and their size follows from config.json",
        "put the weights into it before vLLM starts",
        Evidence(file=plain(str(folder))),
    )


def _incomplete(subject: Subject, files: WeightFiles) -> Finding:
    model = "" if subject.target is None else subject.target.model
    held, missing = len(files.files), len(files.missing)
    some = "none"
    if held or missing:
        some = f"{held} of {held + missing} files" if missing else f"{held} files, not all,"
    return Finding(
        "files-incomplete",
        f"{str(files.folder)!r} holds {some} of the target's weights, so they were not "
        "looked at and their size follows from config.json",
        download(model, subject.command.text("revision")),
        Evidence(
            plain(str(files.index_file or files.folder)),
            value=f"{missing} missing" if missing else None,
        ),
    )


def _rated_missing(
    subject: Subject, files: WeightFiles, quantization: Mapping[str, Any] | None
) -> Finding:
    finding, facts = missing_shard(files).finding, subject.facts
    if facts is None:
        return finding
    finding = replace(finding, evidence=replace(finding.evidence, release=facts.release))
    if quantization is None or not facts.before(_MISSING_FILES_STOP):
        return finding
    return replace(
        finding,
        fact=f"{finding.fact}; vLLM {facts.release} loads the rest without a word",
        rated=Severity.WRONG,
    )


def _head(
    subject: Subject, tally: Tally, folder: Path, quantization: Mapping[str, Any] | None
) -> Iterator[Finding]:
    if tally.head:
        return
    silent = quantization is not None
    then = "serves with whatever is in the memory" if silent else "stops after the load"
    yield Finding(
        "target-no-head",
        f"the target's files hold no lm_head.weight, and vLLM's class for it does not use the "
        f"embedding in its place: it {then}, and so does a drafter that shares the target's head",
        "export the checkpoint with its lm_head (save it untied)",
        Evidence(
            plain(str(folder)),
            "lm_head.weight",
            "missing",
            None if subject.facts is None else subject.facts.release,
        ),
        rated=Severity.WRONG if silent else Severity.FAILS,
    )


def _quantization_flag(
    subject: Subject, quantization: Mapping[str, Any] | None, where: str
) -> Iterator[Finding]:
    """``-q`` against what the config says, as ``ModelConfig._verify_quantization`` does it."""
    facts, command = subject.facts, subject.command
    asked = (command.text("quantization") or "").lower()
    if quantization is None or facts is None or not facts.supported or not asked:
        return
    stated = str(quantization.get("quant_method")).lower().replace("_", "-")
    # Of these two it is certain: no class answers for them but those below.
    if stated not in ("compressed-tensors", "fp8") or where == _MODELOPT_FILE or asked == stated:
        return
    for name, since, before in _OVERRIDES:
        if asked == name and not facts.before(since) and (not before or facts.before(before)):
            return
    flag = command.flag("quantization")
    yield Finding(
        "target-quantization-flag",
        f"{flag} {quoted(asked)} is refused: by its config the target is {stated}, and vLLM does "
        "not quantise it anew",
        f"leave out {flag}: vLLM reads the method from the config",
        Evidence(key=flag, value=quoted(asked), release=facts.release),
    )


def _load_format(subject: Subject) -> Iterator[Finding]:
    facts, command = subject.facts, subject.command
    stated = command.text("load-format")
    if stated is None or facts is None or not facts.supported:
        return
    known = set(_FORMATS)
    known |= {name for name, since in _FORMATS_CAME.items() if not facts.before(since)}
    known |= {name for name, before in _FORMATS_WENT.items() if facts.before(before)}
    name, flag = stated.lower(), command.flag("load-format")
    if name in known:
        return
    since = f" (vLLM has it from {_FORMATS_CAME[name]})" if name in _FORMATS_CAME else ""
    since = f" (vLLM had it before {_FORMATS_WENT[name]})" if name in _FORMATS_WENT else since
    near = [] if since else get_close_matches(name[:64], sorted(known), 1)
    yield Finding(
        "target-load-format",
        f"{flag} {quoted(stated)} is no load format of vLLM {facts.release}{since}",
        f"use {flag} {near[0]}, or leave it out" if near else f"leave out {flag}",
        Evidence(key=flag, value=quoted(stated), release=facts.release),
    )


def _rope(config: Mapping[str, Any], folder: Path) -> Iterator[Finding]:
    """Numbers of the target's rope with which no rope can be computed."""
    text, prefix = config.get("text_config"), "text_config."
    if config.get("model_type") != MULTIMODAL_MODEL_TYPE or not isinstance(text, Mapping):
        text, prefix = config, ""
    for place in ("", "rope_scaling", "rope_parameters"):
        block = text.get(place) if place else text
        if not isinstance(block, Mapping):
            continue
        for key in _ROPE_NUMBERS if place else ("rope_theta",):
            value, any_sign = block.get(key), key in _MAGNITUDES
            number = isinstance(value, (int, float))
            if value is None or (number and abs(value) < _LARGEST and (value > 0 or any_sign)):
                continue
            # deepseek_scaling_rope.py computes with a magnitude like that, and with a base that has
            # a logarithm; the others end in math.log, math.floor, torch.arange or at the length.
            silent = number and (any_sign or (key == "rope_theta" and value > 0))
            then = "the positions are then wrong" if silent else "vLLM stops at the start"
            name = f"{prefix}{place}.{key}" if place else f"{prefix}{key}"
            yield Finding(
                "target-rope",
                f"the target's {name} is {quoted(value)}, and must be a "
                f"{'number' if any_sign else 'positive number'}: {then}",
                "take config.json from the model's page",
                Evidence(plain(str(folder / "config.json")), name, quoted(value)),
                rated=Severity.WRONG if silent else None,
            )


def _quantization(
    subject: Subject, quantization: Mapping[str, Any] | None, where: str
) -> Iterator[Finding]:
    facts = subject.facts
    folder = None if subject.target is None else subject.target.folder
    if quantization is None or facts is None or not facts.supported or folder is None:
        return
    stated = quantization.get("quant_method")
    if stated is None:
        return
    method = str(stated).lower()
    if method == "compressed_tensors":  # As ``_normalize_quantization_config`` takes it.
        method = "compressed-tensors"
    if method in _METHODS or "auto-round" in method:  # Which vLLM's "inc" takes.
        return
    if method in _CAME and not facts.before(_CAME[method]):
        return
    if method in _WENT and facts.before(_WENT[method]):
        return
    since = f" (vLLM has it from {_CAME[method]})" if method in _CAME else ""
    since = f" (vLLM had it before {_WENT[method]})" if method in _WENT else since
    file, _, key = where.partition(", ")
    yield Finding(
        "target-quantization",
        f"the target's quantisation method {quoted(stated)} is none of this vLLM's{since}",
        "use a release that has it, or another export of the model",
        Evidence(
            plain(str(folder / file)),
            f"{key}.quant_method" if key else "quantization",
            quoted(stated),
            facts.release,
        ),
    )


# ------------------------------------------------------------------ what runs with it


def _remote_code(subject: Subject, folder: Path) -> Iterator[Finding]:
    command, facts = subject.command, subject.facts
    if (
        command.switch("trust-remote-code")
        or command.switch("skip-tokenizer-init")
        or facts is None
        or command.text("tokenizer") not in (None, command.model)
        or command.text("tokenizer-mode") not in (None, "auto", "hf", "slow")
    ):
        return
    file = folder / "tokenizer_config.json"
    try:
        stated = read_json(file).get("auto_map")
    except FileNotFoundError:
        return
    except CheckpointError as error:
        yield error.finding
        return
    own = stated.get("AutoTokenizer") if isinstance(stated, Mapping) else stated
    if own is None:
        return
    # With its own class for the config, Transformers goes on without the checkpoint's tokenizer and
    # makes one of tiktoken.model by a general rule. Before, it asks for the code and stops.
    stops = facts.before(_TRANSFORMERS_CONFIG)
    then = (
        "vLLM stops at the tokenizer"
        if stops
        else "Transformers makes one of its own from tiktoken.model, which cuts text into other "
        "tokens than the model was trained on"
    )
    yield Finding(
        "target-remote-code",
        f"the target's tokenizer is code in its repository, and without --trust-remote-code {then}",
        "add --trust-remote-code, or give a converted tokenizer with --tokenizer",
        Evidence(plain(str(file)), "auto_map.AutoTokenizer", quoted(own), facts.release),
        rated=Severity.FAILS if stops else Severity.WRONG,
    )


def _image_token(subject: Subject, config: Mapping[str, Any], folder: Path) -> Iterator[Finding]:
    facts = subject.facts
    if facts is None or subject.command.speculative is None:
        return
    view, best, last = ConfigFile(config), IMAGE_TOKEN_KEYS[0], IMAGE_TOKEN_KEYS[2]
    value, patch = config.get(best), ""
    proposer = "the proposer reads it once the target is loaded, for text as well"
    if best in config and type(value) is not int:
        fact = f"the target's {best} is {quoted(value)}, and must be a token id"
    elif facts.before("0.18"):
        patch = "image-token"
        if subject.patches.get(patch) or isinstance(config.get(last), int):
            return
        fact = f"the target's config.json has no {last}: {proposer}"
    elif facts.before(_TRANSFORMERS_CONFIG) or best in config:
        return  # vLLM's own config class has a default.
    else:
        patch = "image-token-saved-again"
        if subject.patches.get(patch) or facts.runner(subject.environ) != "V1":
            return
        fact = (
            f"the target's config.json has no {best}, and Transformers' class for it gives none: "
            f"{proposer}"
        )
    fix = ""
    if why := subject.patches_off.get(patch):
        fact += f"; the patch {patch}, which gives it, is not in effect ({why})"
        fix = fix_of(patch, subject.environ, subject.patches_off)
    token = image_token_id(view)
    token = DEFAULT_IMAGE_TOKEN if token is None else token
    key = last if facts.before("0.18") and type(value) is int else best
    yield Finding(
        "target-image-token",
        fact,
        f'{f"{fix}, or " if fix else ""}write "{key}": {token} into the target\'s config.json',
        Evidence(
            plain(str(folder / "config.json")),
            key,
            quoted(config[key]) if key in config else "missing",
            facts.release,
        ),
    )


def _tied(subject: Subject, config: Mapping[str, Any], folder: Path) -> Iterator[Finding]:
    facts, key = subject.facts, "tie_word_embeddings"
    if facts is None or facts.before(_TYING_IS_CHECKED):
        return
    stated = config.get(key)
    by_default = key not in config and not facts.before(_TRANSFORMERS_CONFIG)
    if stated is not True and not by_default:
        return
    said = "has no tie_word_embeddings, which stands for true" if by_default else f"says {key} true"
    yield Finding(
        "target-tied",
        f"the target's config.json {said}: each rank copies lm_head and embedding to the CPU after "
        "the load to compare them, and warns that they differ",
        f'set "{key}": false at the top of it, or --hf-overrides \'{{"{key}": false}}\'',
        Evidence(
            plain(str(folder / "config.json")),
            key,
            "missing" if by_default else "true",
            facts.release,
        ),
    )


def _vision(subject: Subject, config: Mapping[str, Any], folder: Path) -> Iterator[Finding]:
    command, facts = subject.command, subject.facts
    if command.speculative is None or not takes_images(command):
        return
    limits = command.object("limit-mm-per-prompt") or {}
    other = sorted(str(name) for name in limits if name in ("image", "video"))
    size = ""
    if other:
        names = " and ".join(f"{name!r}" for name in other)
        size = f" (the limit on {names} does not hold: Kimi's images are {MODALITY!r})"
    flag = "--language-model-only"
    if facts is None or "language-model-only" not in facts.flags:
        flag = f"--limit-mm-per-prompt '{{\"{MODALITY}\": 0}}'"
    yield Finding(
        "target-vision",
        f"the target takes images{size}, and an EAGLE-3 drafter does not see them: it has the "
        "placeholder's embedding in their place, and drafts after an image from the target's "
        "hidden states alone",
        f"for text alone add {flag}, which also frees the vision tower's memory",
        Evidence(plain(str(folder / "config.json")), "model_type", quoted(config["model_type"])),
    )
