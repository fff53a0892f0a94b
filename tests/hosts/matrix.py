# SPDX-License-Identifier: Apache-2.0
"""Which scenario runs on which host, and why one is absent.

The one table: a test names its scenario with `@scenario("...")` and is skipped, with the reason
given here, on hosts that lack it. A host that the table does not know is an error, not a skip.
`python tests/hosts/matrix.py` prints the table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

BACKPORT = ("0.15.1", "0.16.0", "0.17.1")
NATIVE = ("0.20.2", "0.22.1", "0.26.0", "0.32.0")
HOSTS = BACKPORT + NATIVE

NO_FAULT = "upstream has EAGLE-3 for Kimi here: there is no fault to show"
NO_MLA = (*BACKPORT, "0.20.2", "0.22.1", "0.26.0")
NO_CPU_MLA = "this release's CPU build has no MLA, and an MLA drafter has no other attention"


@dataclass(frozen=True)
class Scenario:
    """A row of the table.

    Attributes:
        shows: what a pass shows.
        absent: hosts, and why it does not run there; it runs on every other host.
        rarely: hosts on which it runs with `--everything` only, as `make hosts` has it, since it
            takes minutes.
    """

    shows: str
    absent: dict[tuple[str, ...], str] = field(default_factory=dict)
    rarely: tuple[str, ...] = ()

    def absent_on(self, host: str) -> str | None:
        """Why it does not run on a host, or None if it runs there."""
        if host not in HOSTS:
            raise LookupError(f"vLLM {host} is no host of tests/hosts/matrix.py: {HOSTS}")
        return next((why for hosts, why in self.absent.items() if host in hosts), None)


SCENARIOS = {
    "configuration": Scenario(
        "targets and drafters are accepted or refused before any load; others as without the plugin"
    ),
    "configuration: the backport": Scenario(
        "stock refuses, the plugin accepts, a revert refuses again", {NATIVE: NO_FAULT}
    ),
    "configuration: extract_hidden_states": Scenario(
        "the method for taking training data accepts a Kimi target",
        {("0.15.1", "0.16.0"): "these releases do not have the method", NATIVE: NO_FAULT},
    ),
    "configuration: upstream": Scenario(
        "no model class of the plugin is imported",
        {BACKPORT: "the plugin's classes serve Kimi there"},
    ),
    "drafters": Scenario(
        "every drafter variant, Llama and MLA, is built, loaded and run as the reference computes "
        "it, with attention replaced (CPU builds before 0.28 have none for MLA); without the "
        "patches the faults of this release show",
    ),
    "variants": Scenario(
        "drafter variants in a real engine: tokens, drafts and accepted tokens per position equal "
        "the reference's (Llama)",
        {("0.32.0",): "shown there on the V2 runner, which is Kimi's from 0.29 on"},
    ),
    "variants: MLA": Scenario(
        "the same with MLA drafters, and MLA on",
        {NO_MLA: NO_CPU_MLA},
    ),
    "variants: V2 runner": Scenario(
        "the same on the V2 runner",
        {(*BACKPORT, "0.20.2", "0.22.1", "0.26.0"): "Kimi runs on V1 there unless one asks"},
    ),
    "variants: check": Scenario(
        "the check command calls those that start fine, and what stock gets wrong wrong"
    ),
    "heads": Scenario(
        "whose embedding and head a drafter uses is the same on every rank (stand-ins for ranks)",
        {("0.15.1",): "the proposer decides it in the middle of its load_model there"},
    ),
    "heads: V2 runner": Scenario(
        "the same on the V2 runner",
        {
            (*BACKPORT, "0.20.2"): "Kimi runs on V1 there unless one asks, and V2's code is older",
        },
    ),
    "refused": Scenario(
        "what cannot work is refused before anything is loaded, in one line",
    ),
    "tool calls": Scenario(
        "streamed tool calls: stock loses some when a delta has several tokens, the plugin's "
        "parser none, also through the server's own generator",
        {NATIVE: "upstream's parser reads the text there, as the plugin's does"},
    ),
    "faults": Scenario(
        "stock refuses Kimi-K2.5 + EAGLE-3 three times in a row, by its own code",
        {NATIVE: NO_FAULT},
    ),
    "faults: the interface": Scenario(
        "the third refusal is GPUModelRunner's own check",
        {NATIVE: NO_FAULT, ("0.15.1",): "the bare language model's fault comes before it there"},
    ),
    "faults: the bare language model": Scenario(
        "0.15's language model has neither .model nor .lm_head",
        {
            NATIVE: NO_FAULT,
            ("0.16.0", "0.17.1"): "from 0.16 on the language model is a DeepseekV2ForCausalLM",
        },
    ),
    "parity": Scenario(
        "greedy tokens with and without speculation equal the plain-torch reference's; drafts and "
        "accepted tokens per position equal its counts (Llama drafter, k=3, float32, eager)"
    ),
    "mla drafter": Scenario(
        "the same with the MLA drafter, and MLA on",
        {NO_MLA: NO_CPU_MLA},
    ),
    "v2 runner": Scenario(
        "the same on the V2 runner",
        {
            (
                *BACKPORT,
                "0.20.2",
                "0.22.1",
                "0.26.0",
            ): "Kimi runs on V1 there unless one asks otherwise",
        },
    ),
    "lengths": Scenario(
        "a request longer than the drafter's rope reaches stops drafting, alone, with synchronous "
        "and asynchronous scheduling; where the rope goes on, none stops"
    ),
    "lengths: v2 runner": Scenario(
        "the same on the V2 runner",
        {
            (
                *BACKPORT,
                "0.20.2",
                "0.22.1",
                "0.26.0",
            ): "Kimi runs on V1 there unless one asks otherwise",
        },
    ),
    "lengths: stock": Scenario(
        "stock stops drafting for the whole batch: the plugin's patch is left out",
    ),
    "shifted aux layers": Scenario(
        "one layer off is noticed: the test of the parity test",
        {("0.16.0", "0.22.1", "0.26.0"): "the same code path as on 0.17.1 and 0.20.2"},
    ),
    "shared head": Scenario(
        "a drafter without a head of its own has the target's",
        {
            ("0.16.0", "0.17.1", *NATIVE): "from 0.16 on upstream's own code finds it; on 0.15 the "
            "plugin shows it where to look"
        },
    ),
    "attention": Scenario(
        "the attention back-end: who gets it, what it declares, and that it computes what the "
        "reference does (layer and batches by hand, the kernel in Triton's interpreter)"
    ),
    "torch.compile": Scenario(
        "the same with torch.compile on",
        {
            ("0.15.1", "0.16.0"): "a cold compilation takes minutes; shown on 0.17.1",
            NATIVE: "upstream's own classes there",
        },
    ),
    "text-only K2": Scenario(
        "the same for the text-only Kimi-K2 (DeepseekV3ForCausalLM)",
    ),
    "tensor parallel": Scenario(
        "the same with --tensor-parallel-size 2",
    ),
    "replicated drafter": Scenario(
        "with draft_tensor_parallel_size 1 and two ranks each has the whole drafter and asks the "
        "other for nothing; stock ignores the key",
        rarely=("0.15.1", "0.32.0"),
    ),
    "replicated drafter: V2 runner": Scenario(
        "the same on the V2 runner",
        {(*BACKPORT, "0.20.2", "0.22.1", "0.26.0"): "Kimi runs on V1 there unless one asks"},
    ),
    "replicated drafter: MLA": Scenario(
        "the same with the MLA drafter, and MLA on",
        {NO_MLA: NO_CPU_MLA},
    ),
    "drafting loop": Scenario(
        "the plugin's loop, forced, drafts what stock's does (V1 runner, without graphs, attention "
        "by the kernels in Triton's interpreter)",
        {("0.32.0",): "Kimi runs on V2 there, whose loop is upstream's"},
        rarely=("0.15.1",),
    ),
    "drafting loop: two ranks": Scenario(
        "the same with two real ranks: the drafter split, and whole on each",
        {
            ("0.32.0",): "Kimi runs on V2 there, whose loop is upstream's",
            ("0.15.1", "0.16.0", "0.20.2", "0.22.1"): "minutes; shown on 0.17.1 and 0.26.0",
        },
    ),
    "drafter forward": Scenario(
        "the drafter's forward pass on the plugin's kernels is the release's own, Llama and MLA",
        rarely=("0.15.1", "0.32.0"),
    ),
    "drafter forward: V2 runner": Scenario(
        "the same inside an engine, forced: tokens, drafts and counts equal the reference's",
        {(*BACKPORT, "0.20.2", "0.22.1", "0.26.0"): "Kimi runs on V1 there unless one asks"},
    ),
    "image": Scenario("an image request gives the same tokens with speculation as without"),
    "serve": Scenario(
        "`vllm serve` over HTTP: completion, chat, streaming, image, concurrent requests, /metrics"
    ),
    "log line": Scenario(
        "the API process and the engine core each say once what the plugin did",
        {NATIVE: "only the API process, which checks the drafter's folder, has something to say"},
    ),
    "other model": Scenario(
        "a tiny Llama pair is untouched: tokens, counters, classes, compile-cache keys, log"
    ),
    "bad input": Scenario("a drafter folder that cannot be one gives one clear line"),
    "stand aside": Scenario(
        "no model class of ours is imported or registered",
        {BACKPORT: "the backport's classes serve there"},
    ),
    "backport classes": Scenario(
        "the backport's classes serve, under upstream's names",
        {NATIVE: "upstream's classes serve there"},
    ),
    "status": Scenario("`vllm-kimi-eagle3 status` says what is applied"),
    "diagnose": Scenario(
        "`diagnose --url` calls a healthy server healthy and names what is wrong with a broken "
        "one; each host has some of the cases",
        {
            (
                "0.15.1",
                "0.16.0",
                "0.20.2",
                "0.22.1",
            ): "the same counters; a server takes a minute to start for each case",
        },
        rarely=("0.32.0",),
    ),
    "plan": Scenario(
        "`plan --url --without` plans from a sweep of two real servers",
        {("0.15.1", "0.16.0", "0.20.2", "0.22.1"): "the same counters and latencies"},
        rarely=("0.32.0",),
    ),
    "diagnose --offline": Scenario(
        "one load of the target: its hidden states are the reference's, each way to break a "
        "drafter is named, and the printed setting restores the counts in this host's engine",
        {("0.15.1", "0.16.0", "0.20.2", "0.22.1"): "shown on 0.17.1, 0.26.0 and 0.32.0"},
        rarely=("0.32.0",),
    ),
    "diagnose --offline: tensor parallel": Scenario(
        "the same hidden states from two ranks, and the same table",
        {
            ("0.15.1", "0.16.0", "0.17.1", "0.20.2", "0.22.1", "0.32.0"): "an engine of two ranks "
            "takes minutes; shown on 0.26.0"
        },
    ),
    "diagnose --offline: quantised target": Scenario(
        "hidden states of a target with int8 weights (compressed-tensors) are those that its "
        "kernels make, and a mistake is named on them",
        {("0.15.1", "0.16.0", "0.20.2", "0.22.1", "0.26.0"): "shown on 0.17.1 and 0.32.0"},
        rarely=("0.32.0",),
    ),
    "diagnose --offline: V2 runner": Scenario(
        "the same hidden states from the V2 runner, the final one among them",
        {(*BACKPORT, "0.20.2", "0.22.1", "0.26.0"): "Kimi runs on V1 there unless one asks"},
    ),
    "facts": Scenario(
        "what check knows of this vLLM from its source is what its own parser has, and both read "
        "command lines alike"
    ),
}


def scenario(name: str) -> pytest.MarkDecorator:
    """Marks a test, or with `pytestmark` a module's tests, as part of a scenario."""
    if name not in SCENARIOS:
        raise LookupError(f"no scenario {name!r} in tests/hosts/matrix.py")
    import pytest

    return pytest.mark.scenario(name)


def table() -> str:
    """The table as Markdown."""
    rows = [f"| scenario | {' | '.join(HOSTS)} |", "|---" * (len(HOSTS) + 1) + "|"]
    notes: list[str] = []
    for name, row in SCENARIOS.items():
        cells = []
        for host in HOSTS:
            reason = row.absent_on(host)
            if reason is not None and reason not in notes:
                notes.append(reason)
            cells.append("runs" if reason is None else f"({notes.index(reason) + 1})")
        rows.append(f"| {name}: {row.shows} | {' | '.join(cells)} |")
    return "\n".join([*rows, "", *(f"({i}) {note}" for i, note in enumerate(notes, 1))])


if __name__ == "__main__":
    print(table())
