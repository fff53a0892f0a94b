# SPDX-License-Identifier: Apache-2.0
"""What `check` knows of this vLLM without importing it is what vLLM itself does.

The flags are those of its own parser, and every command below is read by both.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_kimi_eagle3.check import spelling
from vllm_kimi_eagle3.check.command import Command, parse
from vllm_kimi_eagle3.check.facts import Facts, Flag, facts_for, facts_of
from vllm_kimi_eagle3.check.speculative_keys import ALIASES
from vllm_kimi_eagle3.check.subject import Subject
from vllm_kimi_eagle3.findings import Severity
from vllm_kimi_eagle3.host import find_host

from . import harness
from .matrix import scenario

pytestmark = scenario("facts")

PROBE = Path(__file__).with_name("command_probe.py")
TIMEOUT = 300
_SPECULATIVE = '{"method": "eagle3", "model": "D", "num_speculative_tokens": 3}'

# Read by both; what is said of each is compared, not written down here.
COMMANDS = [
    *map(
        shlex.split,
        f"""\
serve M
serve -tp 8 M
serve -tp 8 M --port 9000
serve --model M -tp 8
serve -tp 8 --model=M
serve --model
serve --served-model-name a M
serve --served-model-name a --model M
serve M --served-model-name a b --port 9000
serve M --served-model-name a --served-model-name b
serve M X
serve M -tp
serve M -tp 8 9
serve M -tp8
serve M -t 8
serve M -p 8
serve M -q fp8
serve M -qfp8
serve M -O3
serve M -O=2
serve M -O 1
serve M -O
serve M --enforce-eager
serve M --no-enforce-eager
serve M --enforce_eager
serve M --enforce-eager=1
serve M --no-enforce_eager --enforce-eager
serve M --enforce
serve M --enable
serve M --no-such-flag
serve M --such-flag 3
serve M --tensor_parallel_size=8
serve M --max_model_len auto
serve M --max-model-len 32k
serve M --max-model-len 32K
serve M --max-model-len 1.5k
serve M --max-model-len 1.5K
serve M --max-model-len -1
serve M --max-model-len long
serve M --max-num-seqs 8k
serve M --max-num-batched-tokens 8k
serve M --port nine
serve M --port 9000 --port 9001
serve M --gpu-memory-utilization 0.9x
serve M --kv-cache-dtype fp9
serve M --kv-cache-dtype fp8
serve M --speculative-config '{_SPECULATIVE}'
serve M --speculative_config '{_SPECULATIVE}' --port 9000
serve M --speculative-config {{method:eagle3}}
serve M --speculative-config "{{'method': 'eagle3'}}"
serve M --speculative-config
serve M --speculative-config.method eagle3 --speculative-config.num_speculative_tokens 3
serve M --speculative-config.method=eagle3 --speculative_config.model D
serve M --speculative-config '{_SPECULATIVE}' --speculative-config.num_speculative_tokens 4
serve M --compilation-config.mode 3 --speculative-config.a.b 1 --speculative-config.a.c+ x,y
serve M --speculative-config.a+ x --speculative-config.a+ y,z --speculative-config.n 32k
serve M --speculative-config.method
serve M --speculative-config None
serve M --additional-config '{{"kimi_eagle3": {{"aux_hidden_state_layers": [1, 2, 3]}}}}'
serve M --hf-overrides '{{"a": 1}}'
serve M --hf-token
serve M --hf-token --port 9000
serve M --middleware a --middleware b
serve M --api-key a b --port 9000
serve M -- X
serve -- M
serve M --config=FILE.yaml
serve M --trust-remote-code --async-scheduling --no-enable-prefix-caching
serve M --reasoning-parser kimi_k2 --tool-call-parser kimi_k2 --enable-auto-tool-choice
serve M --limit-mm-per-prompt '{{"image": 2}}' --limit-mm-per-prompt.video 0
--model M -tp 8
M -tp 8""".splitlines(),
    ),
]  # fmt: skip
VALUES = {
    "integer": "3", "number": "0.5", "count": "8k", "length": "32K", "json": "{}",
    "json or text": "a", "text": "a", "list": "a", "append": "a",
    "integers": "3",
}  # fmt: skip
# What SpeculativeConfig holds against the method or the model.
NEED_A_MODEL = {
    "method", "model", "tensor_parallel_size", "draft_tensor_parallel_size", "max_model_len",
    "draft_load_config", "dspark_draft_topk", "xpress_topc", "use_heterogeneous_vocab",
    "enable_adaptive_verification", "index_share_for_mtp_iteration", "prompt_lookup_max",
    "prompt_lookup_min",
    "num_speculative_tokens_per_batch_size", "draft_lm_head_quantization",
}  # fmt: skip
# --help ends the process, --config reads a file, and these have types of their own.
LEFT_OUT = {
    "help", "config", "lora-modules", "device-ids", "optimization-level", "load-format",
    "all2all-backend", "mm-processor-device", "log-level", "collect-detailed-traces",
    "allowed-origins", "allowed-methods", "allowed-headers",
}  # fmt: skip


@pytest.fixture(scope="module")
def facts() -> Facts:
    host = find_host()
    assert host is not None
    return facts_of(host)


def commands(facts: Facts) -> list[list[str]]:
    """Those above, and each flag in all its spellings with a value that it takes."""
    found = list(COMMANDS)
    for flag in facts.flags.values():
        if flag.name not in LEFT_OUT:
            found += [["serve", "M", *words] for words in spelled(flag)]
    return found


def keys(facts: Facts) -> list[dict[str, Any]]:
    """Each key of --speculative-config with values of all types, and keys that are none."""
    base = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    names = [*facts.speculative_fields, *ALIASES, "foo"]
    return [
        {**base, name: value}
        for name in names
        if name not in NEED_A_MODEL
        for value in (None, True, 0, 3, -1, 2.0, 2.5, "3", "x", "yes", "fp8", "2.5", [1], {"a": 1})
    ]


def spelled(flag: Flag) -> Iterator[list[str]]:
    value = flag.choices[0] if flag.choices else VALUES.get(flag.value, "")
    for name in (f"--{flag.name}", f"--{flag.name.replace('-', '_')}", *flag.aliases):
        if flag.value == "switch":
            yield [name]
            if name.startswith("--"):
                yield [f"--no-{name[2:]}"]
        elif flag.value in ("set", "optional"):
            yield [name]
        else:
            yield [name, value]
            yield [f"{name}={value}"]
    if flag.value not in ("text", "append", "list", "optional", "json or text"):
        yield (
            [f"--{flag.name}", "not"]
            if flag.value not in ("switch", "set")
            else [f"--{flag.name}=not"]
        )


@dataclasses.dataclass(frozen=True)
class Probe:
    """What vLLM itself does: its flags, and what it makes of each command and of each key."""

    flags: list[dict[str, Any]]
    commands: list[tuple[list[str], dict[str, Any]]]
    speculative: list[tuple[dict[str, Any], str | None]]


@pytest.fixture(scope="module")
def probe(facts: Facts, tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Probe:
    folder = tmp_path_factory.mktemp("commands")
    jobs = {"commands": commands(facts), "speculative": keys(facts)}
    outcome = harness.run_probe(PROBE, jobs, folder, cache, TIMEOUT, VLLM_PLUGINS="none")
    return Probe(
        outcome["flags"],
        list(zip(jobs["commands"], outcome["commands"], strict=True)),
        list(zip(jobs["speculative"], outcome["speculative"], strict=True)),
    )


def test_the_snapshot_is_what_this_tree_says(facts: Facts, host: str) -> None:
    known = facts_for(host)
    for field in dataclasses.fields(Facts):
        if field.name not in ("root", "label", "version"):
            assert getattr(facts, field.name) == getattr(known, field.name), field.name


def test_flags_are_those_of_vllms_parser(facts: Facts, probe: Probe) -> None:
    wrong = []
    for real in probe.flags:
        longs = [s[2:] for s in real["spellings"] if s.startswith("--")]
        flag = facts.flags.get(longs[0])
        if flag is None:
            wrong.append(("missing", real))
            continue
        ours = {f"--{flag.name}", *flag.aliases}
        if flag.value == "switch":
            ours |= {f"--no-{s[2:]}" for s in ours if s.startswith("--")}
        if not ours <= set(real["spellings"]):
            wrong.append(("spellings", real))
        switches = {"BooleanOptionalAction": "switch", "EnableDisableAction": "switch"}
        kind = switches.get(real["action"], "set" if real["nargs"] == 0 else None)
        if real["nargs"] == "+":
            kind = "integers" if flag.value == "integers" else "list"
        elif real["nargs"] == "?":
            kind = "optional"
        if (kind or flag.value) != flag.value:
            wrong.append(("value", real))
        if flag.choices is not None:
            missing = {c for c in real["choices"] or () if c != "None"} ^ set(flag.choices)
            if missing:
                wrong.append(("choices", real))
        if flag.name in facts.defaults and facts.defaults[flag.name] != real["default"]:
            wrong.append(("default", real))
    assert not wrong
    assert set(facts.flags) == {
        next(s[2:] for s in real["spellings"] if s.startswith("--")) for real in probe.flags
    }


def test_commands_are_read_as_vllm_reads_them(facts: Facts, probe: Probe) -> None:
    wrong = []
    for words, real in probe.commands:
        ours = parse(words if words[0] != "serve" else ["vllm", *words], facts)
        if words[0] != "serve":
            ours = parse(["-m", "vllm.entrypoints.openai.api_server", *words], facts)
        fails = [
            problem.text
            for problem in ours.problems
            # That comes later, when the rest of the keys is used.
            if problem.severity is Severity.FAILS and problem.id != "command-json-replaced"
        ]
        if ("error" in real) != bool(fails):
            wrong.append((words, real, fails))
        elif not fails and (difference := differs(ours, real, facts, words[0] != "serve")):
            wrong.append((words, real, difference))
    assert not wrong, "\n".join(map(str, wrong))


def test_keys_are_taken_as_vllm_takes_them(facts: Facts, probe: Probe) -> None:
    wrong = []
    for given, refused in probe.speculative:
        command = parse(["M", "--speculative-config", json.dumps(given)], facts)
        said = [
            finding.text
            for finding in spelling.findings(Subject(command, facts, {}))
            if finding.id in ("command-speculative-key", "command-speculative-value")
            and finding.severity is Severity.FAILS
        ]
        if bool(said) != bool(refused):
            wrong.append((given, refused, said))
    assert not wrong, "\n".join(map(str, wrong))


def differs(ours: Command, real: dict[str, Any], facts: Facts, module: bool) -> str:
    """Where the options differ; "" if they do not."""
    expected = {name.replace("_", "-"): value for name, value in real.items()}
    tag, model = expected.pop("model-tag", None), expected.pop("model", None)
    if module:
        tag = None  # Taken, and not used.
    model = tag or model
    if ours.model != model:
        return f"model: {ours.model} and {model}"
    given = {
        name: value
        for name, value in ours.options.items()
        if name != "model" and not (name in facts.defaults and value == facts.defaults[name])
    }
    for name in given.keys() | expected.keys():
        mine, theirs = given.get(name), expected.get(name)
        if theirs is None and name not in facts.defaults:
            continue  # vLLM computes its default.
        if mine == {} or (isinstance(theirs, dict) and set(theirs) == {"object"}):
            continue  # A config object, which JSON was made into; {} makes the default one.
        if str(mine) != str(theirs):
            return f"{name}: {mine!r} and {theirs!r}"
    return ""
