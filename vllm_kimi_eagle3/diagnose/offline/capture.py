# SPDX-License-Identifier: Apache-2.0
"""Loads the target once, lets it answer, and writes its hidden states down: a process of its own.

``python -m vllm_kimi_eagle3.diagnose.offline.capture JOB.json``. The answers are greedy, so they
are the right drafts. Then each prompt is read once more together with its answer, and hooks on the
decoder layers take the residual stream that enters them: what vLLM hands an EAGLE-3 drafter,
whatever the release has for that. Hooks see it on both runners, beside any quantisation, and
behind the all-reduce of tensor parallelism, where every rank has the same.

The first tensor-parallel rank of each pipeline stage writes. Nothing is compiled, since a compiled
decoder runs no hooks. Standard library only at the top: workers import this file.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RESULT, ERROR = "captured.json", "error.json"

_MODULE = "vllm_kimi_eagle3.diagnose.offline.capture"

# What a server is given and this run is not: speculation, what a drafter or a deployment needs,
# and what compiles.
_NOT_HERE = frozenset(
    (
        "api_server_count",
        "async_scheduling",
        "compilation_config",
        "cudagraph_capture_sizes",
        "disable_log_stats",
        "ec_transfer_config",
        "enable_dbo",
        "enable_lora",
        "enable_prefix_caching",
        "enforce_eager",
        "kv_events_config",
        "kv_offloading_backend",
        "kv_offloading_size",
        "kv_transfer_config",
        "max_cudagraph_capture_size",
        "max_model_len",
        "optimization_level",
        "prefill_context_parallel_size",
        "worker_extension_cls",
    )
)
_NOT_HERE_PREFIXES = ("data_parallel", "dcp_", "decode_context", "lora_", "max_lora", "spec")

# Tokens of a chat template, at most.
_TEMPLATE = 1024


@dataclass(frozen=True)
class Job:
    """What to do.

    Attributes:
        model: the target, as the user named it.
        options: of ``vllm serve``, by their canonical names.
        prompts: each with ``text`` or ``token_ids``, and ``kind`` and ``ignore_eos``.
        long: lengths, in tokens, of prompts to make of the shipped text.
        tokens: of each answer, at most.
        behind: further tokens, so that the drafts of the answer's last step can be judged.
        budget: of tokens, all texts together.
        max_model_len: the longest request of the server; None if not known.
        num_layers: the target's decoder layers.
        layers: ids of the hidden states to keep.
        final: whether to keep the one after the final norm.
        folder: for the files.
    """

    model: str
    folder: str
    num_layers: int
    layers: Sequence[int]
    final: bool
    tokens: int
    behind: int
    budget: int
    prompts: Sequence[Mapping[str, Any]] = ()
    long: Sequence[int] = ()
    max_model_len: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        """Tokens of the longest text, at most."""
        each = [len(p.get("token_ids") or p.get("text") or "") for p in self.prompts]
        asked = [
            *(n + (0 if ids else _TEMPLATE) for n, ids in zip(each, self._are_ids, strict=True))
        ]
        longest = max([*asked, *(n + _TEMPLATE for n in self.long)], default=0)
        longest += self.tokens + self.behind + 2
        # A text that is longer than all may be together is left out, and a token comes behind it.
        longest = min(longest, self.budget + 1)
        return longest if self.max_model_len is None else min(longest, self.max_model_len)

    @property
    def places(self) -> int:
        """Tokens of all answers, at most."""
        answers = (len(self.prompts) + len(self.long)) * (self.tokens + self.behind)
        return min(answers, self.budget)

    @property
    def _are_ids(self) -> list[bool]:
        return [bool(prompt.get("token_ids")) for prompt in self.prompts]

    def write(self, path: Path) -> None:
        """Writes the job for the process that does it."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Job:
        """The job of a file."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def engine_arguments(job: Job, known: Sequence[str]) -> dict[str, Any]:
    """Keyword arguments of ``vllm.LLM``.

    Args:
        known: the fields of this release's ``EngineArgs``.
    """
    given = {name.replace("-", "_"): value for name, value in job.options.items()}
    arguments = {
        name: value
        for name, value in given.items()
        if name in known and name not in _NOT_HERE and not name.startswith(_NOT_HERE_PREFIXES)
    }
    arguments.update(
        model=job.model,
        max_model_len=job.longest,
        enforce_eager=True,
        enable_prefix_caching=False,
        worker_extension_cls=f"{_MODULE}.Worker",
    )
    if "skip_mm_profiling" in known:
        # No image is sent, and the vision tower's largest input takes most of a minute.
        arguments["skip_mm_profiling"] = True
    return arguments


class CaptureError(ValueError):
    """The job cannot be done, for a reason that is known here."""

    def __init__(self, fact: str, fix: str) -> None:
        super().__init__(fact)
        self.fix = fix


# -------------------------------------------------------------------------------------- the worker


class Worker:
    """What every worker gets in addition (``worker_extension_cls``)."""

    def kimi_eagle3_attach(self, num_layers: int, layers: list[int], final: bool) -> str:
        """Puts the hooks on.

        Returns:
            Which model runner this is: ``V1`` or ``V2``.

        Raises:
            RuntimeError: the target has no decoder of that many layers.
        """
        from vllm.distributed import get_tensor_model_parallel_rank

        recorder = Recorder(set(layers), final)
        if get_tensor_model_parallel_rank() == 0:
            model = self.get_model()  # type: ignore[attr-defined]
            recorder.attach(decoder_of(model, num_layers), num_layers)
        self._kimi_eagle3_recorder = recorder
        bases = type(self.model_runner).__mro__  # type: ignore[attr-defined]
        return "V2" if any(b.__module__.startswith("vllm.v1.worker.gpu.") for b in bases) else "V1"

    def kimi_eagle3_begin(self, length: int) -> None:
        """The next ``length`` tokens are a text."""
        self._kimi_eagle3_recorder.begin(length)

    def kimi_eagle3_end(self, path: str) -> list[Any]:
        """Writes the text's hidden states, if any are here.

        Returns:
            The file, and which hidden states are in it.

        Raises:
            RuntimeError: a token was not seen.
        """
        from vllm.distributed import get_pp_group

        found = self._kimi_eagle3_recorder.end()
        if not found:
            return []
        import torch

        path = f"{path}.{get_pp_group().rank_in_group}"
        torch.save(found, path)
        return [path, sorted(found, key=str)]


def decoder_of(model: Any, num_layers: int) -> Any:
    """The module that runs the decoder layers one after another.

    Raises:
        RuntimeError: there is none of that many layers.
    """
    for module in model.modules():
        layers = getattr(module, "layers", ())
        if hasattr(layers, "__len__") and len(layers) == num_layers and hasattr(module, "norm"):
            return module
    raise RuntimeError(f"this vLLM's target has no decoder with {num_layers} layers and a norm")


class Recorder:
    """Keeps the residual streams of one text.

    Args:
        wanted: ids, as vLLM counts: i is the input of layer i, the number of layers the last one's
            output.
        final: keep what the final norm puts out as well.
    """

    def __init__(self, wanted: set[int], final: bool) -> None:
        self._wanted, self._final = wanted, final
        self._length = 0
        self._states: dict[int | str, Any] = {}
        self._seen: dict[int | str, Any] = {}
        self._expected: set[int | str] = set()
        self._rows: tuple[Any, int] | None = None

    def attach(self, decoder: Any, num_layers: int) -> None:
        """Puts hooks on the layers that are here, and on the norm."""
        for index, layer in enumerate(decoder.layers):
            if _is_missing(layer):
                continue
            names = _parameters(layer)
            layer.register_forward_pre_hook(self._entering(index, names), with_kwargs=True)
            self._expected |= {index} & self._wanted
        if _is_missing(decoder.norm):
            return
        if num_layers in self._wanted:
            names = _parameters(decoder.norm)
            hook = self._entering(num_layers, names)
            decoder.norm.register_forward_pre_hook(hook, with_kwargs=True)
            self._expected.add(num_layers)
        if self._final:
            decoder.norm.register_forward_hook(self._left)
            self._expected.add("final")

    def begin(self, length: int) -> None:
        """A text of so many tokens comes next."""
        self._length, self._rows = length, None
        self._states, self._seen = {}, {}

    def end(self) -> dict[int | str, Any]:
        """The text's hidden states, ``[length, H]`` each, in the target's dtype, on the CPU.

        Raises:
            RuntimeError: some were not seen.
        """
        length, self._length = self._length, 0
        for key in self._expected:
            seen = self._seen.get(key)
            if seen is None or not bool(seen.all()):
                count = 0 if seen is None else int(seen.sum())
                raise RuntimeError(
                    f"the hidden states of layer {key} were seen for {count} of {length} tokens"
                )
        found, self._states = self._states, {}
        return found

    # ----------------------------------------------------------------------------------- the hooks

    def _entering(self, index: int, names: Sequence[str]) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            if not self._length:
                return
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            if "positions" in given:
                self._note_rows(given["positions"])
            if index in self._wanted:
                hidden = given["hidden_states"] if "hidden_states" in given else given["x"]
                residual = given.get("residual")
                self._keep(index, hidden if residual is None else hidden + residual)

        return hook

    def _left(self, module: Any, args: Any, output: Any) -> None:
        if self._length:
            self._keep("final", output[0] if isinstance(output, tuple) else output)

    def _note_rows(self, positions: Any) -> None:
        """Which rows of this pass are tokens of the text: positions go up by one from the first
        row on. Rows of padding come behind, with whatever position was left there."""
        import torch

        flat = positions[0] if positions.dim() > 1 else positions
        flat = flat.detach().to("cpu", torch.int64)
        rising = flat == flat[0] + torch.arange(len(flat))
        count = int(rising.long().cumprod(dim=0).sum())
        count = max(0, min(count, self._length - int(flat[0])))
        self._rows = flat[:count], len(flat)

    def _keep(self, key: int | str, stream: Any) -> None:
        import torch

        if self._rows is None:
            raise RuntimeError("a layer ran without positions")
        positions, count = self._rows
        if stream.shape[0] != count:
            raise RuntimeError(
                f"layer {key} has {stream.shape[0]} of {count} tokens: take expert and data "
                "parallelism out of the command, which split the tokens over ranks"
            )
        if key not in self._states:
            shape = self._length, stream.shape[-1]
            self._states[key] = torch.zeros(shape, dtype=stream.dtype)
            self._seen[key] = torch.zeros(self._length, dtype=torch.bool)
        self._states[key][positions] = stream[: len(positions)].detach().to("cpu")
        self._seen[key][positions] = True


def _parameters(module: Any) -> list[str]:
    """Names of what a module's forward pass takes, in order; those of a norm are ``x`` and
    ``residual``."""
    names = list(inspect.signature(module.forward).parameters)
    # A custom op's forward pass takes whatever its own one does.
    return names if "args" not in names else ["x", "residual"]


def _is_missing(module: Any) -> bool:
    """True for a layer that another pipeline stage has."""
    return type(module).__name__ == "PPMissingLayer"


# ------------------------------------------------------------------------------------- the process


def prompt_tokens(tokenizer: Any, prompt: Mapping[str, Any]) -> list[int]:
    """A prompt's tokens: as a chat where the tokenizer has a template."""
    if prompt.get("token_ids"):
        return list(prompt["token_ids"])
    text = str(prompt["text"])
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(text, add_special_tokens=False))


def within(job: Job, prompts: Sequence[tuple[str, list[int], bool]]) -> list[int]:
    """Which of the prompts are taken: in their order, as long as the texts are within the budget,
    and each with its answer within the longest request."""
    taken, left = [], job.budget
    for index, (_, tokens, _) in enumerate(prompts):
        size = len(tokens) + job.tokens + job.behind
        if tokens and size <= left and size + 1 <= job.longest:
            taken.append(index)
            left -= size
    return taken


def run(job: Job) -> dict[str, Any]:
    """Does a job, and returns what is in its files."""
    from dataclasses import fields

    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs

    from vllm_kimi_eagle3.diagnose.drive import long_prompt

    known = [one.name for one in fields(EngineArgs)]
    llm = LLM(**engine_arguments(job, known))
    tokenizer = llm.get_tokenizer()
    given = [dict(prompt) for prompt in job.prompts]
    if job.long:
        sample = long_prompt(2048, 0.25).text
        density = len(tokenizer.encode(sample, add_special_tokens=False)) / len(sample)
        given += [asdict(long_prompt(length, density)) for length in job.long]
    prompts = [
        (str(p.get("kind") or ""), prompt_tokens(tokenizer, p), bool(p.get("ignore_eos")))
        for p in given
    ]
    taken = within(job, prompts)
    prompts_taken = [prompts[index] for index in taken]
    if not prompts_taken:
        raise CaptureError(
            f"none of {len(prompts)} prompts fits {job.longest:,} tokens with its answer",
            "give shorter prompts with --prompts or shorter answers with --tokens, or raise "
            "--max-model-len or --budget",
        )
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=job.tokens + job.behind, ignore_eos=ignore)
        for _, _, ignore in prompts_taken
    ]
    terminal = sys.stderr is not None and sys.stderr.isatty()
    outputs = llm.generate(
        [{"prompt_token_ids": tokens} for _, tokens, _ in prompts_taken],
        sampling,
        use_tqdm=terminal,
    )
    runners = llm.collective_rpc(
        "kimi_eagle3_attach", args=(job.num_layers, list(job.layers), job.final)
    )
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    texts = []
    for number, ((kind, tokens, _), output) in enumerate(zip(prompts_taken, outputs, strict=True)):
        whole = tokens + list(output.outputs[0].token_ids)
        llm.collective_rpc("kimi_eagle3_begin", args=(len(whole),))
        llm.generate([{"prompt_token_ids": whole}], one, use_tqdm=False)
        path = Path(job.folder) / f"text-{number:04}.pt"
        written = llm.collective_rpc("kimi_eagle3_end", args=(str(path),))
        _joined(path, written, job)
        texts.append(
            {
                "file": path.name,
                "kind": kind,
                "prompt_tokens": len(tokens),
                "token_ids": whole,
                "answer": output.outputs[0].text,
            }
        )
    import vllm

    return {
        "vllm": vllm.__version__,
        "runner": runners[0],
        "target": job.model,
        "texts": texts,
        "left_out": len(prompts) - len(taken),
        "tokens": sum(len(text["token_ids"]) for text in texts),
    }


def _joined(path: Path, written: Sequence[Any], job: Job) -> None:
    """Makes one file of those of the pipeline stages.

    Raises:
        RuntimeError: a layer is in none, or a file is on another machine.
    """
    parts = [part for part in written if part]
    have = {key for _, keys in parts for key in keys}
    wanted = {*job.layers, *(["final"] if job.final else [])}
    if missing := wanted - have:
        raise RuntimeError(f"no worker has the hidden states of {sorted(missing, key=str)}")
    for file, _ in parts:
        if not os.path.exists(file):
            raise RuntimeError(f"{file} was written on another machine: run it on one machine")
    if len(parts) == 1:
        os.replace(parts[0][0], path)
        return
    import torch

    whole: dict[int | str, Any] = {}
    for file, _ in parts:
        whole.update(torch.load(file, weights_only=True))
        os.unlink(file)
    torch.save(whole, path)


def main(path: str) -> int:
    """Does the job of a file. What went wrong is in a file beside the hidden states."""
    job = Job.read(Path(path))
    folder = Path(job.folder)
    try:
        result = run(job)
    except BaseException as error:
        said = {"type": type(error).__name__, "message": str(error)[:2000]}
        if isinstance(error, CaptureError):
            said["fix"] = error.fix
        elif isinstance(error, ValueError):  # What vLLM says of its input, pydantic's among it.
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
        (folder / ERROR).write_text(json.dumps(said), encoding="utf-8")
        return 1
    (folder / RESULT).write_text(json.dumps(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
