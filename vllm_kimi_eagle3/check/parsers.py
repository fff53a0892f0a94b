# SPDX-License-Identifier: Apache-2.0
"""The parsers of tool calls and of reasoning, by their names: which of them a release has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from vllm_kimi_eagle3.checkpoint.errors import quoted
from vllm_kimi_eagle3.findings import Evidence, Finding

from .command import Command
from .facts import Facts

KIMI_PARSER = "kimi_k2"
"""Kimi's, of either kind."""


@dataclass(frozen=True)
class _Parsers:
    """The names that a release registers.

    Attributes:
        always: of every release from 0.15 to 0.33.
        came: those of later releases, with the first one that has it.
        went: those of earlier releases, with the first one that has it no more.
    """

    always: frozenset[str]
    came: Mapping[str, str]
    went: Mapping[str, str]

    def of(self, facts: Facts) -> set[str]:
        """The names that there are in a release."""
        came = {name for name, since in self.came.items() if not facts.before(since)}
        went = {name for name, before in self.went.items() if facts.before(before)}
        return {*self.always, *came, *went}


# Those of both registries that came later.
_CAME = {
    "gemma4": "0.19", "deepseek_v4": "0.20", "hy_v3": "0.20", "mimo": "0.20",
    "cohere_command3": "0.21", "cohere_command4": "0.21", "poolside_v1": "0.21",
    "minimax_m3": "0.24", "inkling": "0.26", "kimi_k3": "0.27", "ling3": "0.28",
    "muse_glimmer": "0.28", "hy_v4": "0.29", "deepseek_v41": "0.30", "k2_horizon": "0.30",
    "hf": "0.32", "plamo3": "0.32", "beam": "0.33", "muse": "0.33", "musespark1x": "0.33",
    "step5": "0.33",
}  # fmt: skip
# ``_TOOL_PARSERS_TO_REGISTER`` of vllm/tool_parsers/__init__.py.
_TOOLS = _Parsers(
    frozenset(
        {
            "deepseek_v3", "deepseek_v31", "deepseek_v32", "ernie45", "functiongemma", "gigachat3",
            "glm45", "glm47", "granite", "granite-20b-fc", "hermes", "hunyuan_a13b", "internlm",
            "jamba", "kimi_k2", "llama3_json", "llama4_json", "llama4_pythonic", "longcat",
            "minimax_m2", "mistral", "olmo3", "openai", "phi4_mini_json", "pythonic",
            "qwen3_coder", "qwen3_xml", "seed_oss", "step3", "step3p5", "xlam",
        }
    ),
    {
        **_CAME, "granite4": "0.18", "lfm2": "0.21", "apertus": "0.22", "minicpm5": "0.23",
        "dots": "0.28", "qwen3_json": "0.32",
    },
    {"minimax": "0.24"},
)  # fmt: skip
# ``_REASONING_PARSERS_TO_REGISTER`` of vllm/reasoning/__init__.py.
_REASONING = _Parsers(
    frozenset(
        {
            "deepseek_r1", "deepseek_v3", "ernie45", "glm45", "granite", "holo2", "hunyuan_a13b",
            "kimi_k2", "minimax_m2", "minimax_m2_append_think", "mistral", "olmo3",
            "openai_gptoss", "qwen3", "seed_oss", "step3", "step3p5",
        }
    ),
    {
        **_CAME, "nemotron_v3": "0.17", "glm47": "0.24", "granite_thinking_parser": "0.31",
        "minicpmv": "0.32",
    },
    {},
)  # fmt: skip


def unknown_parsers(command: Command, facts: Facts) -> Iterator[Finding]:
    """A finding for each parser that the release does not have: ``validate_api_server_args``."""
    if not facts.supported:
        return
    # Without automatic choice nobody looks the tool parser up.
    if command.switch("enable-auto-tool-choice"):
        yield from _unknown(command, facts, "tool-call-parser", "tool-parser-plugin", _TOOLS)
    yield from _unknown(command, facts, "reasoning-parser", "reasoning-parser-plugin", _REASONING)


def _unknown(
    command: Command, facts: Facts, option: str, plugin: str, parsers: _Parsers
) -> Iterator[Finding]:
    name = command.text(option)
    if not name or command.text(plugin) or name in (known := parsers.of(facts)):
        return
    near = get_close_matches(name.lower()[:64], sorted(known), 3)
    # Kimi's first: that is the target.
    best = KIMI_PARSER if "kimi" in name.lower() or KIMI_PARSER in near or not near else near[0]
    others = " and ".join(other for other in near if other != best)
    since = f", which came in {parsers.came[name]}" if name in parsers.came else ""
    flag = command.flag(option)
    yield Finding(
        "run-unknown-parser",
        f"{flag} {quoted(name)} is refused: vLLM {facts.release} has no such parser{since}",
        f"use {flag} {best}" + (f" ({others} are other models')" if others else ""),
        Evidence(key=flag, value=quoted(name), release=facts.release),
    )
