# SPDX-License-Identifier: Apache-2.0
"""Commands as people write them. That vLLM reads them so is tested in tests/hosts/test_facts.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_kimi_eagle3.check import shell
from vllm_kimi_eagle3.check.command import Command, parse
from vllm_kimi_eagle3.check.facts import Facts, facts_for
from vllm_kimi_eagle3.check.json_text import Broken, read_json, repaired
from vllm_kimi_eagle3.findings import Severity
from vllm_kimi_eagle3.findings.catalogue import KINDS
from vllm_kimi_eagle3.host import SUPPORTED

FACTS = facts_for("0.26.0")
SPECULATIVE = {"method": "eagle3", "model": "D", "num_speculative_tokens": 3}
AS_JSON = json.dumps(SPECULATIVE)


def ids(command: Command) -> list[str]:
    return [problem.id for problem in command.problems]


def fine(command: Any, facts: Facts | None = FACTS) -> Command:
    parsed = parse(command, facts)
    assert parsed.problems == ()
    return parsed


def only(command: Any, kind: str, facts: Facts | None = FACTS) -> str:
    """The text of the one problem that a command has."""
    parsed = parse(command, facts)
    assert ids(parsed) == [kind], [p.text for p in parsed.problems]
    return parsed.problems[0].text


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve M -tp 8",
        "M -tp 8",
        "-tp 8 M",
        "X=1 vllm serve M -tp 8",
        "vllm serve --model M -tp 8",
        "vllm serve -tp 8 --model=M",
        "vllm serve M --tensor-parallel-size 8",
        "vllm serve M --tensor_parallel_size=8",
        "vllm serve M -tp=8",
        "vllm serve M --tensor-par 8",
        "/opt/venv/bin/vllm serve M -tp 8",
        "nohup vllm serve M -tp 8 > log 2>&1 &",
        "vllm serve M \\\n  -tp 8",
        "vllm serve M \\ \n  -tp 8",
        "vllm serve M\n  -tp 8\n",
        "$ vllm serve M -tp 8 | tee log",
        "# the server\nvllm serve M -tp 8  # eight of them",
        "export A=1\nsource venv/bin/activate && vllm serve M -tp 8",
        "python -m vllm.entrypoints.openai.api_server --model M -tp 8",
        "python3 -m vllm.entrypoints.cli.main serve M -tp 8",
        "docker run --rm -p 8000:8000 vllm/vllm-openai:v0.26.0 --model M -tp 8",
        "'vllm' \"serve\" M -t'p' 8",
        "docker run --gpus all --entrypoint vllm --name serve vllm/vllm-openai:v1 serve M -tp 8",
        "docker run --entrypoint=/usr/bin/vllm rocm/vllm:nightly serve M -tp 8",
        "docker run --entrypoint /bin/bash vllm/vllm-openai:v1 -c 'vllm serve M -tp 8'",
        "podman run --entrypoint=bash x/vllm-openai -lc 'cd /x && exec vllm serve M -tp 8'",
        "sh -c 'sleep 1; vllm serve M -tp 8'",
        "bash -e -c \"bash -c 'vllm serve M -tp 8'\"",
        "vllm serve M `\n  -tp 8",
        "vllm serve M ^\r\n  -tp 8",
        "vllm serve M -tp^\n  8",
        'args: ["--model", "M", "--tensor-parallel-size", "8"]',
        "args: ['--model', 'M',\n  '-tp', 8]",
        "  command: >\n    --model M\n    -tp 8\n  ports: [1]",
        "  command: --model M\n    -tp 8",
        'command: ["vllm", "serve", "M"]\nargs:\n- -tp\n- "8"\n',
        '- name: x\n  command: ["sh","-c"]\n  args:\n  - |\n    sleep 1\n    vllm serve M -tp 8',
        "- args: [x]\n- args: [\n  '--model=M', # the target\n  '-tp=8']",
        "M=M\nvllm serve $M -tp 8",
        "export A='M -tp 8'; vllm serve $A",
        'N="8"\nexport B=${N}\nvllm serve M -tp "$B"',
    ],
)
def test_the_same_command_in_many_ways(text: str) -> None:
    parsed = fine(text)
    assert parsed.model == "M"
    assert parsed.integer("tensor-parallel-size") == 8


@pytest.mark.parametrize(
    ("command", "environ"),
    [
        ("VLLM_X=1 A='b c' vllm serve M", {"VLLM_X": "1", "A": "b c"}),
        (["VLLM_X=1", "vllm", "serve", "M"], {"VLLM_X": "1"}),
        ("env VLLM_X=1 vllm serve M", {"VLLM_X": "1"}),
        ("export VLLM_X=1 A=b; vllm serve M", {"VLLM_X": "1", "A": "b"}),
        ("A=b\nvllm serve M", {}),  # Not exported: the server does not get it.
        ("docker run -e VLLM_X=1 --env=A=b vllm/vllm-openai M", {"VLLM_X": "1", "A": "b"}),
    ],
)
def test_the_servers_environment(command: Any, environ: dict[str, str]) -> None:
    parsed = fine(command)
    assert parsed.model == "M"
    assert parsed.environ == environ


def test_values_by_their_type() -> None:
    parsed = fine(
        "vllm serve M --max-model-len 32k --max-num-batched-tokens 8K --port 9000 "
        "--gpu-memory-utilization .5 --enforce-eager --no-enable-prefix-caching --headless "
        "--served-model-name a b --middleware x --middleware y --hf-token -O3 -q fp8 "
        "--cudagraph-capture-sizes 1 2 --moe-backend Deep-GEMM --additional-config {} "
        "--compilation-config.mode 3"
    )
    assert parsed.options == {
        "max-model-len": 32000, "max-num-batched-tokens": 8192, "port": 9000,
        "gpu-memory-utilization": 0.5, "enforce-eager": True, "enable-prefix-caching": False,
        "headless": True, "served-model-name": ["a", "b"], "middleware": ["x", "y"],
        "hf-token": True, "optimization-level": "3", "quantization": "fp8",
        "cudagraph-capture-sizes": [1, 2], "moe-backend": "deep_gemm", "additional-config": {},
        "compilation-config": {"mode": 3},
    }  # fmt: skip


def test_accessors() -> None:
    parsed = fine(["M", "-tp", "8", "--enforce-eager", "-sc", AS_JSON, "--seed", "1"])
    assert parsed.integer("tensor-parallel-size") == 8
    assert parsed.number("tensor-parallel-size") == 8.0
    assert parsed.text("tensor-parallel-size") == "8"
    assert parsed.switch("enforce-eager") is True
    assert parsed.integer("enforce-eager") is None
    assert parsed.text("enforce-eager") is None
    assert parsed.object("speculative-config") == SPECULATIVE
    assert parsed.text("speculative-config") is None
    assert parsed.switch("seed") is None
    assert parsed.object("seed") is None
    assert parsed.integer("port") is None
    assert parsed.flag("tensor-parallel-size") == "-tp"
    assert parsed.flag("port") == "--port"


@pytest.mark.parametrize(
    ("text", "length"),
    [("auto", -1), ("-1", -1), ("32k", 32000), ("32K", 32768), ("25.6k", 25600), ("1M", 1048576),
     ("262144", 262144), ("1m", 1000000)],
)  # fmt: skip
def test_lengths(text: str, length: int) -> None:
    assert fine(["M", "--max-model-len", text]).integer("max-model-len") == length


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-model-len", "1.5K"], "write 1.5k"),
        (["--max-model-len", "long"], "a whole number"),
        (["--max-num-seqs", "8k"], "a whole number"),
        (["--gpu-memory-utilization", "much"], "a number"),
        (["-tp", "eight"], "-tp takes a whole number, not 'eight'"),
        (["-tp"], "no value follows -tp"),
        (["-tp", "--port", "9000"], "no value follows -tp"),
        (["--port="], "--port takes a whole number"),
        (["--enforce-eager=1"], "write --enforce-eager alone, or --no-enforce-eager"),
        (["--kv-cache-dtype", "fp9"], "write fp8 if that is meant"),
        (["--tensor-parallel-size.a", "1"], "--tensor-parallel-size takes no keys"),
        (["--speculative-config.model"], "no value follows"),
        (["--cudagraph-capture-sizes", "1", "two"], "not 'two'"),
    ],
)
def test_values_that_are_none(words: list[str], said: str) -> None:
    assert said in only(["M", *words], "command-value")


def test_speculation_in_all_its_spellings() -> None:
    for words in (
        ["--speculative-config", AS_JSON],
        [f"--speculative_config={AS_JSON}"],
        ["-sc", AS_JSON],
        ["-sc.method", "eagle3", "-sc.model=D", "-sc.num_speculative_tokens", "3"],
        ["--speculative-config.method=eagle3", "--speculative_config.model", "D",
         "--speculative-config.num_speculative_tokens", "3"],
        ["--spec-method", "eagle3", "--spec-model", "D", "--spec-tokens", "3"],
        ["-sc", '{"method": "eagle3", "model": "D"}', "--spec-tokens=3"],
        ["-sc", '{"method": "eagle3", "model": "D", "num-speculative-tokens": 3}'],
    ):  # fmt: skip
        assert fine(["M", *words]).speculative == SPECULATIVE
    assert fine(["M"]).speculative is None
    assert fine(["M", "-sc", "None"]).speculative is None
    assert parse(["M", "-sc", "{"], FACTS).speculative is None


def test_keys_keep_their_dashes_where_vllm_does_not_take_them() -> None:
    parsed = parse(["M", "--speculative-config", '{"a-b": 1}'], facts_for("0.25.1"))
    assert parsed.speculative == {"a-b": 1}


def test_options_with_dots_are_put_together() -> None:
    name = "--hf-overrides"
    parsed = fine(["M", f"{name}.a.b", "1", f"{name}.a.c+", "x,y", f"{name}.a.c+=z", f"{name}.n",
                   "32k", f"{name}.t", "true", f"{name}.s", "text"])  # fmt: skip
    assert parsed.object("hf-overrides") == {
        "a": {"b": 1, "c": ["x", "y", "z"]}, "n": 32000, "t": True, "s": "text",
    }  # fmt: skip
    old = fine(["M", f"{name}.n", "32k"], facts_for("0.19.1"))
    assert old.object("hf-overrides") == {"n": "32k"}


@pytest.mark.parametrize(
    ("words", "lost"),
    [
        (["-sc", AS_JSON, "-sc.num_speculative_tokens", "4"], "'method', 'model' are lost"),
        (["-cc", '{"mode": 3, "method": "eagle3"}', "-cc.mode", "2"], "'method' is lost"),
        (["-sc.model", "D", "--speculative-config.method", "eagle3"], "'model' is lost"),
        (["-sc", AS_JSON, "-sc", '{"model": "E"}'], "'num_speculative_tokens' are lost"),
    ],
)
def test_json_is_not_merged(words: list[str], lost: str) -> None:
    text = only(["M", *words], "command-json-replaced")
    assert lost in text
    assert '"method": "eagle3"' in text  # The whole, to paste.


def test_a_flag_that_is_given_twice() -> None:
    text = only(["M", "--port", "1", "--port", "2"], "command-repeated")
    assert "`--port 2`, not `--port 1`" in text
    text = only(["M", "--max-model-len=32k", "--max-model-len", "64k"], "command-repeated")
    assert "takes the last: `--max-model-len 64k`, not `--max-model-len 32k`" in text
    text = only(["M", "--enforce-eager", "--no-enforce-eager"], "command-repeated")
    assert "`--no-enforce-eager`, not `--enforce-eager`" in text
    assert fine(["M", "--port", "2", "--port", "2"]).integer("port") == 2


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("{'method': 'eagle3', 'model': 'D', 'num_speculative_tokens': 3}", SPECULATIVE),
        ('{"method": "eagle3", "model": "D", "num_speculative_tokens": 3,}', SPECULATIVE),
        ('{"method": "eagle3", "model": "D", "num_speculative_tokens": 3', SPECULATIVE),
        ("{method:eagle3,model:D,num_speculative_tokens:3}", SPECULATIVE),
        ("{method: eagle3, model: D, num_speculative_tokens: 3}", SPECULATIVE),
        ("method:eagle3,model:D,num_speculative_tokens:3", SPECULATIVE),
        ("\u201cmethod\u201d", None),
        ("{\u201cmethod\u201d: \u201ceagle3\u201d}", {"method": "eagle3"}),
        ('{"a": True, "b": None}', {"a": True, "b": None}),
        ("{'a': [True, False], 'b': None}", {"a": [True, False], "b": None}),
        ('{"path": "/models/x", "k": 3, ]', None),
        ("", None),
        ("eagle3", None),
    ],
)
def test_json_that_is_none_is_repaired(text: str, meant: dict[str, Any] | None) -> None:
    words = shell.lines_of(f"x {repaired(text)}")[0].texts
    repairs = [json.loads(word) for word in words if word.startswith("{")]
    assert repairs == ([] if meant is None else [meant])


def test_json_says_where_it_breaks() -> None:
    text = only(["M", "-sc", '{"method": eagle3}'], "command-json")
    assert "-sc cannot be read as JSON: expecting value at character 12" in text
    assert "leave out the comma in front of the bracket: '{" in only(
        ["M", "-sc", '{"method": "eagle3",}'], "command-json"
    )
    assert only(["M", "-sc", "[1]"], "command-json").startswith("-sc cannot be read as JSON: it is")
    assert "--compilation-config" in only(["M", "--compilation-config", "{"], "command-json")


def test_json_that_the_shell_took_apart() -> None:
    broken = "vllm serve M --speculative-config {}".format
    for text in (
        '{"method":"eagle3","model":"/d","num_speculative_tokens":3}',
        '{"method": "eagle3", "model": "/d", "num_speculative_tokens": 3}',
    ):
        said = only(broken(text), "command-json")
        assert '{"method": "eagle3", "model": "/d", "num_speculative_tokens": 3}' in said
    # As bash does with braces and commas.
    words = ["M", "-sc", "method:eagle3", "model:/d", "num_speculative_tokens:3", "-tp", "8"]
    said = only(words, "command-json")
    assert '{"method": "eagle3", "model": "/d", "num_speculative_tokens": 3}' in said
    assert parse(words, FACTS).integer("tensor-parallel-size") == 8


def test_numbers_with_suffixes_inside_json() -> None:
    value = read_json('{"a": 80k, "b": "80k", "c": 2K}', human_numbers=True)
    assert value == {"a": 80000, "b": "80k", "c": 2048}
    assert isinstance(read_json('{"a": 80k}'), Broken)
    assert "command-json" in ids(parse(["M", "-sc", '{"a": 80k}'], FACTS))


@pytest.mark.parametrize(
    ("flag", "release", "said"),
    [
        ("--foo-bar-baz", "0.26.0", "leave it out"),
        ("--spec-method", "0.21.0", "came with 0.22.1; put it into --speculative-config, as"),
        ("--kda-decode-backend", "0.26.0", "leave it out, or use vLLM 0.30.0 or newer"),
        ("--task", "0.26.0", "leave it out"),
        ("--disable-log-requests", "0.26.0", "had up to 0.16.0; write --no-enable-log-requests"),
        ("--enable-async-scheduling", "0.26.0", "write --async-scheduling"),
        ("--chunked-prefill", "0.26.0", "write --enable-chunked-prefill"),
        ("--disable-prefix-caching", "0.26.0", "write --no-enable-prefix-caching"),
        ("--tensor-paralel-size", "0.26.0", "write --tensor-parallel-size"),
        ("--tp", "0.26.0", "write -tp"),
        ("-tp8", "0.26.0", "write -tp 8"),
        ("--no-port", "0.26.0", "--port is no switch"),
        ("--speculative-model", "0.26.0", 'into --speculative-config, as "model"'),
        ("--num-speculative-tokens", "0.26.0", 'as "num_speculative_tokens"'),
        ("--draft-kv-cache-dtype", "0.26.0", 'as "kv_cache_dtype"'),
    ],
)
def test_flags_that_a_release_does_not_have(flag: str, release: str, said: str) -> None:
    text = only(["M", flag, "3"] if flag != "-tp8" else ["M", flag], "command-unknown-flag",
                facts_for(release))  # fmt: skip
    assert f"vLLM {release} has no flag '{flag}'" in text
    assert said in text


def test_short_forms() -> None:
    assert fine(["M", "--enforce"]).switch("enforce-eager") is True
    text = only(["M", "--prefix-caching"], "command-value")
    assert "--prefix-caching (--prefix-caching-hash-algo)" in text
    text = only(["M", "--enable-p"], "command-ambiguous-flag")
    assert "--enable-prefix-caching" in text


def test_disable_undoes_enable_where_vllm_pairs_them() -> None:
    command = ["M", "--disable-prefix-caching"]
    assert fine(command, facts_for("0.33.0")).switch("enable-prefix-caching") is False
    assert ids(parse(command, facts_for("0.32.0"))) == ["command-unknown-flag"]


def test_without_a_known_vllm_no_flag_is_unknown() -> None:
    parsed = fine(["M", "--no-such-flag", "--kv-cache-dtype", "fp9", "-tp", "8"], None)
    assert parsed.integer("tensor-parallel-size") == 8
    assert parsed.text("kv-cache-dtype") == "fp9"


def test_words_that_belong_to_nothing() -> None:
    assert "'X Y'" in only(["M", "X", "Y", "-tp", "8"], "command-extra-words")
    assert ids(parse(["M", "--model", "N"], FACTS)) == ["command-extra-words"]
    assert fine(["--", "M"]).model == "M"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-tp", "8"], "serves Qwen/Qwen3-0.6B"),
        (["--api-key", "k", "M"], "put the model first: vllm serve M --api-key k"),
        (["--hf-token", "M"], "put the model first: vllm serve M --hf-token"),
        (["--served-model-name", "a", "M"], "put the model first: vllm serve M"),
    ],
)
def test_no_model(words: list[str], said: str) -> None:
    assert said in only(words, "command-no-model")


def test_where_the_model_has_to_be() -> None:
    words = ["--served-model-name=a", "-tp", "8", "M"]
    assert "put the model first: vllm serve M" in only(words, "command-model-place")
    assert fine(words, facts_for("0.16.0")).model == "M"
    parsed = parse("python -m vllm.entrypoints.openai.api_server M -tp 8", FACTS)
    assert ids(parsed) == ["command-model-place"]
    assert parsed.model is None
    assert parsed.problems[0].severity is Severity.WRONG
    assert "write --model M" in parsed.problems[0].text


@pytest.mark.parametrize("text", ["vllm bench serve --model M", "vllm chat", "vllm"])
def test_other_commands(text: str) -> None:
    parsed = parse(text, FACTS)
    assert ids(parsed) == ["command-not-serve"]
    assert parsed.words == ()


def test_nothing_is_nothing() -> None:
    for command in ("", " \n", (), []):
        parsed = parse(command, FACTS)
        assert (parsed.words, parsed.model, parsed.problems) == ((), None, ())


def test_what_the_shell_would_fill_in() -> None:
    text = only('vllm serve "$MODEL" -tp 8', "command-shell-variable")
    assert "'$MODEL'" in text
    parsed = parse('vllm serve M --port "$PORT" --kv-cache-dtype "$TYPE" -tp=$TP', FACTS)
    assert set(ids(parsed)) == {"command-shell-variable"}
    assert parsed.options == {"kv-cache-dtype": "$TYPE"}
    assert fine("vllm serve '$MODEL'").model == "$MODEL"
    assert fine(["vllm", "serve", "$MODEL"]).model == "$MODEL"
    home = fine("vllm serve ~/kimi").model
    assert home is not None
    assert home == str(Path.home() / "kimi")
    assert fine("vllm serve '~/kimi'").model == "~/kimi"


@pytest.mark.parametrize(
    "text",
    [
        "M=$(cat m)\nvllm serve $M",
        "M=x vllm serve $M",
        "M=x\nM=$1\nM=`cat m`\nvllm serve $M",
        "if true; then\nM=x\nelse\nM=y\nfi\nvllm serve $M",
        "test -z $M && M=x\nvllm serve $M",
        "M=(x y)\nvllm serve $M",
        "M=x\nvllm serve ${M:-y}",
        'command: ["vllm", "serve", "$(M)"]',
        "M=" + "x" * 1000 + "\nvllm serve " + "$M" * 1000,
    ],
)
def test_variables_that_are_not_known(text: str) -> None:
    only(text, "command-shell-variable")


def test_variables_in_json() -> None:
    text = f'D=D\nvllm serve M -sc \'{AS_JSON}\' -cc "{{\\"backend\\":\\"$D\\"}}"'
    assert fine(text).object("compilation-config") == {"backend": "D"}
    assert fine("D=D\nvllm serve M --api-key '$D'").options["api-key"] == ["$D"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("vllm serve M\u00a0-tp 8", "U+00A0 (no-break space) stands at line 1, column 13 in"),
        ("\u200bvllm serve M -tp 8", "U+200B (zero width space) stands at line 1, column 1,"),
        ("vllm serve M -tp 8\ufeff", "U+FEFF"),
        ("vllm serve M \\\n \u2013tp 8", "U+2013 (en dash) stands at line 2, column 2 in pl"),
        ("vllm serve M \u2014tensor-parallel-size 8", "U+2014 (em dash) stands at line 1"),
        ("vllm serve M \u2013\u2013tensor-parallel-size=8", "and also U+2013 (en dash) at line"),
        ("vllm serve M --tensor\u2011parallel-size 8", "U+2011"),
        ("vllm serve \u201cM\u201d -tp=8", 'U+201C (left double quotation mark) stands'),
        ("vllm serve M -tp 8 -sc " + f"\u2018{AS_JSON}\u2019".replace('"', "\u201d"), "U+2018"),
    ],
)  # fmt: skip
def test_characters_that_only_look_right(text: str, said: str) -> None:
    for command in (text, [word for word in text.split(" ") if word not in ("\\\n", "")]):
        parsed = parse(command, FACTS)
        assert ids(parsed) == ["command-lookalike"]
        assert parsed.model == "M"
        assert parsed.integer("tensor-parallel-size") == 8
        assert parsed.speculative in (None, SPECULATIVE)
    assert said in only(text, "command-lookalike")


def test_characters_that_are_meant() -> None:
    for word in ("a\u2014b", "it\u2019s", "\u00fcn\u00ef \u6f22"):
        assert fine(["M", "--chat-template", word]).text("chat-template") == word
        assert fine(f"vllm serve M --chat-template '{word}'").text("chat-template") == word
    word = "say \u201chello\u00a0you\u201d"
    assert fine(["M", "--chat-template", word]).text("chat-template") == word
    fine("echo \u201chello\u201d\nvllm serve M")


def test_yaml_without_a_command() -> None:
    only("args:\n", "command-not-serve")
    only("args: 'it", "command-not-serve")
    text = 'env:\n- name: VLLM_X\n  value: "1"\nargs: [--model, M]'
    assert fine(text).environ == {"VLLM_X": "1"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu-memory-utilization", "1.5"], "more than 0 and at most 1"),
        (["--gpu-memory-utilization", "95"], "write --gpu-memory-utilization 0.95"),
        (["--gpu-memory-utilization", "nan"], "'nan'"),
        (["-tp", "0"], "-tp is '0'"),
        (["-tp", "-1"], "at least 1"),
        (["-tp", "eight"], "a whole number"),
        (["-O4"], "levels 0 to 3"),
        (["--max-num-seqs", "0"], "at least 1"),
        (["--max-model-len", "-2"], "at least -1"),
    ],
)
def test_values_out_of_bounds(words: list[str], said: str) -> None:
    for release in ("0.15.1", "0.26.0", "0.33.0"):
        parsed = parse(["M", *words], facts_for(release))
        assert ids(parsed) == ["command-value"]
        assert said in parsed.problems[0].text
        assert len(parsed.unreadable) == 1
        assert not parsed.options
    fine(["M", "-tp", "1", "--gpu-memory-utilization", "1", "--max-model-len", "-1", "-O3"])


@pytest.mark.parametrize(
    ("release", "words", "said"),
    [
        ("0.15.1", ["-cc", '{"full_cuda_graph": true}'], '"cudagraph_mode": "FULL"'),
        ("0.33.0", ["-cc.full_cuda_graph", "true"], "'full_cuda_graph' in -cc"),
        ("0.18.1", ["-cc", '{"level": 3}'], 'write "mode": 3'),
        ("0.26.0", ["-cc", '{"use_cudagraph": true}'], "leave it out"),
        ("0.26.0", ["-cc", '{"cudagraph-mode": "FULL"}'], 'write "cudagraph_mode" if'),
        ("0.16.0", ["--attention-config", '{"back": 1}'], "'back' in --attention-config"),
        ("0.26.0", ["--kv-transfer-config", '{"kv_connectr": "x"}'], '"kv_connector"'),
    ],
)
def test_keys_that_an_option_does_not_take(release: str, words: list[str], said: str) -> None:
    assert said in only(["M", *words], "command-json-key", facts_for(release))


def test_keys_that_an_option_takes() -> None:
    fine(["M", "-cc", '{"level": 3}'], facts_for("0.17.1"))
    fine(["M", "-cc", '{"mode": 3, "cudagraph_mode": "FULL", "pass_config": {}}'])
    fine(["M", "--attention-config", '{"back": 1}'], facts_for("0.15.1"))  # Dropped there.
    assert '{"mode": 3}' in only(["M", "-cc", "3"], "command-json")


def test_numbers_in_quotes_are_numbers() -> None:
    text = {"method": "eagle3", "model": "3", "num_speculative_tokens": "3"}
    parsed = fine(["M", "-sc", json.dumps(text), "-sc.num_speculative_tokens", "3"][:3])
    assert parsed.speculative == {"method": "eagle3", "model": "3", "num_speculative_tokens": 3}
    parsed = fine(["M", "-sc", '{"draft_tensor_parallel_size": 1.0, "parallel_drafting": "yes"}'])
    assert parsed.speculative == {"draft_tensor_parallel_size": 1, "parallel_drafting": True}
    parsed = fine(["M", "-sc", '{"num_speculative_tokens": true, "max_model_len": "x"}'])
    assert parsed.speculative == {"num_speculative_tokens": True, "max_model_len": "x"}


def test_nothing_is_said_of_what_a_config_file_may_hold(config: Any) -> None:
    pytest.importorskip("yaml")
    for text, kind in (
        ("a: &a 1\nb: *a\n", "command-config-unread"),
        ("model: [", "command-config-file"),
    ):
        parsed = parse(["--config", config(text), "--port", "1"], FACTS)
        assert ids(parsed) == [kind]
        assert parsed.file_unread
        assert parsed.integer("port") == 1
    assert ids(parse("vllm serve --config nowhere.yaml", FACTS)) == ["command-config-file"]


def test_a_quote_that_is_never_closed() -> None:
    text = only('vllm serve M \\\n  -sc \'{"a": 1}', "command-unreadable")
    assert "the single quote at line 2, column 7 is never closed" in text


def test_too_much_is_not_read() -> None:
    for command in ("x" * 2_000_000, "x " * 20_000, ["x"] * 20_000, ["x" * 2_000_000]):
        assert ids(parse(command, FACTS)) == ["command-unreadable"]
    many = parse(["M", *(f"--x{i}" for i in range(5000))], FACTS)
    assert len(many.problems) == 50


# Config files.


@pytest.fixture
def config(tmp_path: Path) -> Any:
    pytest.importorskip("yaml")

    def write(text: str) -> str:
        (tmp_path / "c.yaml").write_text(text)
        return str(tmp_path / "c.yaml")

    return write


def test_a_config_file(config: Any) -> None:
    name = config(
        "tensor_parallel_size: 8\nport: 1\nenforce-eager: true\nserved-model-name: [a, b]\n"
        "speculative-config:\n  method: eagle3\n  model: D\n  num_speculative_tokens: 3\n"
    )
    parsed = fine(["M", "--port", "2", "--config", name])
    assert parsed.integer("tensor-parallel-size") == 8
    assert parsed.integer("port") == 2  # The command line wins.
    assert parsed.switch("enforce-eager") is True
    assert parsed.options["served-model-name"] == ["a", "b"]
    assert parsed.speculative == SPECULATIVE


def test_objects_in_a_config_file_are_text_on_0_15(config: Any) -> None:
    name = config("speculative-config:\n  method: eagle3\n")
    text = only(["M", "--config", name], "command-json", facts_for("0.15.1"))
    assert "in a config file, write speculative-config: and the JSON in single quotes" in text


def test_the_model_and_the_config_file(config: Any) -> None:
    with_model = config("model: M\n")
    assert fine(["--config", with_model]).model == "M"
    without = config("port: 1\n")
    text = only(["-tp", "8", "M", "--config", without], "command-model-place")
    assert "put the model first" in text


def test_false_in_a_config_file_does_nothing(config: Any) -> None:
    name = config("enable-prefix-caching: false\nenforce-eager: false\nport: 1\n")
    for release in ("0.26.0", "0.32.0"):
        text = only(["M", "--config", name], "command-config-false", facts_for(release))
        assert "no-enable-prefix-caching: true" in text
    module = ["-m", "vllm.entrypoints.openai.api_server", "--model", "M", "--config", name]
    parsed = fine(module, facts_for("0.32.0"))
    assert parsed.switch("enable-prefix-caching") is False
    assert ids(parse(module, facts_for("0.26.0"))) == ["command-config-false"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a\n", "holds no flags"),
        ("a: [", "cannot be read"),
        ("a: " + "[" * 100_000, ""),
        ("\x00", "cannot be read"),
    ],
)
def test_config_files_that_are_none(config: Any, text: str, said: str) -> None:
    assert said in only(["M", "--config", config(text)], "command-config-file")


@pytest.mark.parametrize("text", ["a: &x [1]\nb: *x\n", "a: x" + "x" * 2_000_000])
def test_config_files_that_are_not_followed(config: Any, text: str) -> None:
    assert "was not read" in only(["M", "--config", config(text)], "command-config-unread")


@pytest.mark.parametrize("name", ["/no/such/file.yaml", "file.json", "\0.yaml", "/.yaml", ""])
def test_config_files_that_are_not_there(name: str) -> None:
    assert "command-config-file" in ids(parse(["M", "--config", name], FACTS))


def test_a_config_file_that_vllm_does_not_see(config: Any) -> None:
    parsed = parse(["M", f"--config={config('port: 1')}"], FACTS)
    assert ids(parsed) == ["command-config-file"]
    assert parsed.problems[0].severity is Severity.WRONG
    assert parsed.integer("port") is None


def test_no_yaml_here(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    parsed = parse(["M", "--config", config("port: 1")], FACTS)
    assert ids(parsed) == ["command-config-unread"]
    assert parsed.problems[0].kind.undecided


def test_a_flag_and_a_key() -> None:
    text = only(["M", "-sc", AS_JSON, "--spec-tokens", "3"], "command-spec-flag")
    assert "leave out --spec-tokens" in text


# Whatever is given.

WORDS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ["vllm", "serve", "--model", "-tp", "8", "--config", "x.yaml", "-sc", "{", "}", AS_JSON,
         "--", "-", "-O", "-O3", "-O=", "-O.a", "--a.b", "--speculative-config.a.b", "-sc.a+", "=",
         "--=", "-=", "-.", "--.", "--.=", "-sc.", "-sc.=1", "--no-", "--served-model-name", "A=b",
         "-m", "vllm.entrypoints.openai.api_server", "docker", "vllm-openai", "export", "--help",
         "--hf-token", "--max-model-len", "1e999", "nan", "\0", "\ud800", "--speculative-config="]
    ),
)  # fmt: skip
RELEASES = st.one_of(st.none(), st.sampled_from(SUPPORTED).map(facts_for))


def check_whole(parsed: Command) -> None:
    for problem in parsed.problems:
        assert problem.id in KINDS
        assert problem.fact
        assert not problem.fact.endswith(".")
        assert "\n" not in problem.text
        if problem.severity in (Severity.FAILS, Severity.WRONG):
            assert problem.fix
            assert str(problem.evidence)
    assert parsed.speculative is None or isinstance(parsed.speculative, dict)
    assert parsed.model is None or isinstance(parsed.model, str)


@given(st.lists(WORDS, max_size=12), RELEASES)
def test_any_words(words: list[str], facts: Facts | None) -> None:
    check_whole(parse(words, facts))


@given(st.one_of(st.text(), st.lists(WORDS, max_size=8).map(" ".join)), RELEASES)
@example("vllm serve M -sc.a" + ".b" * 100 + " 1", None)
@example("vllm serve M -sc " + "[" * 20_000, None)
@example("vllm serve ~\0/M --config ~\0", None)
def test_any_text(text: str, facts: Facts | None) -> None:
    check_whole(parse(text, facts))


@given(st.text(max_size=80))
def test_any_config_file(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    pytest.importorskip("yaml")
    path = tmp_path_factory.mktemp("c") / "c.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    check_whole(parse(["M", "--config", str(path)], FACTS))


PLAIN = st.text(
    st.characters(blacklist_categories=("Cs", "Cc")), min_size=1, max_size=12
)  # fmt: skip


@given(st.lists(PLAIN, min_size=1, max_size=6))
def test_words_survive_quoting(words: list[str]) -> None:
    quoted = " ".join("'" + word.replace("'", "'\\''") + "'" for word in words)
    lines = shell.lines_of(f"x {quoted}")
    assert lines[-1].texts == ("x", *words)
