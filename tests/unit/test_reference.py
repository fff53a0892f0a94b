# SPDX-License-Identifier: Apache-2.0
"""The plain-torch reference against what is committed, and against what any such loop must keep."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.assets import variants
from tests.reference.checkpoint import read_tensors
from tests.reference.drafter import (
    AUX_LAYERS_KEY,
    Drafter,
    captured_layer_ids,
    load_drafter,
    plain_config,
)
from tests.reference.layers import (
    KvCache,
    causal_visibility,
    read_rope,
    rotary_from_config,
    yarn_inverse_frequencies,
    yarn_mscale,
)
from tests.reference.speculate import (
    ReferenceDrafter,
    ReferenceTarget,
    Speculation,
    SpeculationCounts,
    generate,
    speculate,
)
from tests.reference.target import Target, TargetOutput, load_target

DRAFTER_FOLDERS = [variants.LLAMA_DRAFTER, variants.MLA_DRAFTER]
AUX_LAYER_IDS = (2, 4, 5)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Products this small gain nothing from a second one, and lose much beside other processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(variants.KIMI_K25_TARGET)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [prompt["token_ids"] for prompt in variants.load_prompts()]


# -------------------------------------------------------------------------- the committed results


def assert_reproduces(
    folder: Path, run: dict[str, Any], target: Target, prompts: list[list[int]]
) -> None:
    expected = variants.load_expected()
    drafter = load_drafter(folder, target)
    aux_layer_ids = captured_layer_ids(drafter.config, target.num_layers)
    counts = SpeculationCounts.zero(3)
    outputs = []
    for prompt in prompts:
        result = speculate(
            ReferenceTarget(target, aux_layer_ids),
            ReferenceDrafter(drafter),
            prompt,
            num_speculative_tokens=3,
            max_tokens=expected["max_tokens"],
        )
        counts.add(result.counts)
        outputs.append(result.output_token_ids)
    assert outputs == expected["output_token_ids"]
    assert counts == SpeculationCounts(**{name: run[name] for name in vars(counts)})


@pytest.mark.parametrize("folder", DRAFTER_FOLDERS, ids=lambda folder: folder.name)
def test_reproduces_expected_counts(folder: Path, target: Target, prompts: list[list[int]]) -> None:
    assert_reproduces(folder, variants.expected_run(folder.name), target, prompts)


def test_expected_counts_are_consistent() -> None:
    expected = variants.load_expected()
    runs = [run for rows in expected["runs"].values() for run in rows]
    runs += [run for entry in expected["variants"].values() for run in entry["wrong"].values()]
    for run in runs:
        assert run["num_draft_tokens"] == run["num_drafts"] * run["num_speculative_tokens"]
        assert run["num_accepted_tokens"] == sum(run["num_accepted_tokens_per_pos"])
        assert run["num_accepted_tokens_per_pos"] == sorted(
            run["num_accepted_tokens_per_pos"], reverse=True
        )
        # each verify step emits its accepted drafts and one token, the prefill one more; what the
        # last step accepted beyond the end is counted too
        num_outputs = len(expected["output_token_ids"])
        emitted = run["num_accepted_tokens"] + run["num_drafts"] + num_outputs
        surplus = emitted - num_outputs * expected["max_tokens"]
        assert 0 <= surplus <= num_outputs * run["num_speculative_tokens"]


VARIANTS_TO_RUN = [
    "llama-eagle31-nested",
    "llama-norm-before-residual",
    "llama-four-aux-top",
    "llama-yarn-5x",
    "mla-fc-norm",
    "mla-norm-before-fc-nested",
    "mla-no-aux",
    "mla-reduced-vocab",
    "mla-plain-rope-5x",
    "speculators",
]


@pytest.mark.parametrize("name", VARIANTS_TO_RUN)
def test_reproduces_counts_of_variants(
    name: str, target: Target, prompts: list[list[int]], tmp_path: Path
) -> None:
    """A sample of them; `tests/assets/build.py --from variants` runs all."""
    folder = variants.write_variant(name, tmp_path / name)
    assert_reproduces(folder, variants.expected_variant(name), target, prompts)


def test_wrong_aux_layers_cost_drafts() -> None:
    """What host tests rely on: a shift by one layer shows in the number of drafts."""
    for folder in DRAFTER_FOLDERS:
        right = variants.expected_run(folder.name)["num_drafts"]
        for shifted in ([3, 5, 6], [1, 3, 4]):
            wrong = variants.expected_run(folder.name, aux_layer_ids=shifted)["num_drafts"]
            assert wrong > right * 1.02


# --------------------------------------------------------------------------------- target, drafter


def test_aux_hidden_states_span_embedding_to_last_layer(
    target: Target, prompts: list[list[int]]
) -> None:
    token_ids = torch.tensor(prompts[0])
    every_id = range(target.num_layers + 1)
    with torch.no_grad():
        output = target(token_ids, aux_layer_ids=every_id)
        streams = output.aux_hidden_states.chunk(len(every_id), dim=-1)
        torch.testing.assert_close(streams[0], target.model.embed_tokens(token_ids))
        torch.testing.assert_close(target.lm_head(target.model.norm(streams[-1])), output.logits)


@pytest.mark.parametrize("ids", [(4, 2), (2, 2), (-1,), (9,)])
def test_bad_aux_layer_ids_are_refused(target: Target, ids: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="aux layer ids"):
        target(torch.tensor([1]), aux_layer_ids=ids)


def test_cached_forward_equals_whole_forward(target: Target, prompts: list[list[int]]) -> None:
    token_ids = torch.tensor(prompts[1])
    with torch.no_grad():
        whole = target(token_ids, aux_layer_ids=AUX_LAYER_IDS)
        session = ReferenceTarget(target, AUX_LAYER_IDS)
        session.extend(prompts[1][:20])
        session.extend([7, 8, 9])
        session.truncate(20)
        rest = session.extend(prompts[1][20:])
    torch.testing.assert_close(rest.logits, whole.logits[20:], atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(
        rest.aux_hidden_states, whole.aux_hidden_states[20:], atol=2e-4, rtol=1e-4
    )


def test_kimi_k2_variant_is_the_same_text_tower(
    target: Target, prompts: list[list[int]], tmp_path: Path
) -> None:
    folder = variants.write_kimi_k2_target(tmp_path / "kimi-k2")
    assert json.loads((folder / "config.json").read_text())["model_type"] == "kimi_k2"
    other = load_target(folder)
    token_ids = torch.tensor(prompts[0])
    with torch.no_grad():
        assert torch.equal(other(token_ids).logits, target(token_ids).logits)


def test_llama_drafter_checkpoint_maps_its_vocabulary(target: Target) -> None:
    tensors = read_tensors(variants.LLAMA_DRAFTER)
    drafter = load_drafter(variants.LLAMA_DRAFTER, target)
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert torch.equal(drafter.draft_to_target, tensors["t2d"].nonzero().flatten())
    assert "embed_tokens.weight" not in tensors
    assert torch.equal(drafter.embed_tokens.weight, target.model.embed_tokens.weight)


def test_mla_drafter_checkpoint_has_its_own_embedding_and_head(target: Target) -> None:
    drafter = load_drafter(variants.MLA_DRAFTER, target)
    vocab_size = target.config["vocab_size"]
    assert torch.equal(drafter.draft_to_target, torch.arange(vocab_size))
    assert not torch.equal(drafter.embed_tokens.weight, target.model.embed_tokens.weight)
    assert not torch.equal(drafter.lm_head.weight, target.lm_head.weight)


def small_drafter(**options: object) -> Drafter:
    """A Llama drafter of width 8 with random weights, norms included."""
    config = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "vocab_size": 16,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        **options,
    }
    torch.manual_seed(0)
    drafter = Drafter(config, target_hidden_size=8)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter)
    return drafter.requires_grad_(False)


@pytest.mark.parametrize("options", [{"fc_norm": True}, {"eagle_config": {"fc_norm": True}}])
def test_fc_norm_norms_each_aux_hidden_state(options: dict[str, object]) -> None:
    drafter = small_drafter(**options)
    assert drafter.fc_norm is not None
    aux = [torch.randn(5, 8) for _ in range(3)]
    normed = [
        hidden / (hidden.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
        for hidden, norm in zip(aux, drafter.fc_norm, strict=True)
    ]
    expected = torch.cat(normed, -1) @ drafter.fc.weight.t()
    torch.testing.assert_close(drafter.combine(torch.cat(aux, -1)), expected)


@pytest.mark.parametrize(
    "options", [{"norm_before_fc": True}, {"eagle_config": {"norm_before_fc": 1}}]
)
def test_norm_before_fc_norms_them_together(options: dict[str, object]) -> None:
    drafter = small_drafter(**options)
    assert drafter.input_norm is not None
    aux = torch.randn(5, 24)
    normed = aux / (aux.square().mean(-1, keepdim=True) + 1e-5).sqrt() * drafter.input_norm.weight
    torch.testing.assert_close(drafter.combine(aux), normed @ drafter.fc.weight.t())


def test_without_aux_the_hidden_state_is_read_as_it_is() -> None:
    drafter = small_drafter(eagle_config={"use_aux_hidden_state": False})
    assert not any(name.startswith("fc") for name, _ in drafter.named_parameters())
    hidden_states = torch.randn(5, 8)
    assert drafter.combine(hidden_states) is hidden_states


def test_without_aux_layers_the_target_gives_its_final_hidden_state(
    target: Target, prompts: list[list[int]]
) -> None:
    with torch.no_grad():
        output = target(torch.tensor(prompts[0]), aux_layer_ids=None)
        assert torch.equal(target.lm_head(output.aux_hidden_states), output.logits)


def draft_pass(drafter: Drafter) -> tuple[torch.Tensor, torch.Tensor]:
    hidden_states = torch.linspace(-1, 1, 24).view(3, 8)
    return drafter(
        torch.tensor([1, 2, 3]),
        hidden_states,
        torch.arange(3),
        KvCache(),
        causal_visibility(3, 0),
    )


@pytest.mark.parametrize(
    "options", [{"norm_output": True}, {"eagle_config": {"norm_output": True}}]
)
def test_norm_output_feeds_back_the_normed_state(options: dict[str, object]) -> None:
    logits, stream = draft_pass(small_drafter())
    drafter = small_drafter(**options)
    logits_too, normed = draft_pass(drafter)
    assert torch.equal(logits, logits_too)
    torch.testing.assert_close(normed, drafter.norm(stream))


def test_norm_before_residual_changes_the_residual_only() -> None:
    plain, normed = small_drafter(), small_drafter(norm_before_residual=True)
    hidden_states = torch.linspace(-1, 1, 24).view(3, 8)
    difference = draft_pass(normed)[1] - draft_pass(plain)[1]
    # with the MLP silenced, the two differ by exactly the residual's norm
    for drafter in (plain, normed):
        drafter.layers[0].mlp.down_proj.weight.zero_()
    silenced = draft_pass(normed)[1] - draft_pass(plain)[1]
    expected = plain.layers[0].hidden_norm(hidden_states) - hidden_states
    torch.testing.assert_close(silenced, expected, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(difference, silenced)


# ---------------------------------------------------------------------------------------- configs


@pytest.mark.parametrize(
    ("config", "captured"),
    [
        ({}, (2, 30, 58)),
        ({AUX_LAYERS_KEY: [1, 29, 57]}, (2, 30, 58)),
        ({AUX_LAYERS_KEY: [2, 30, 58]}, (2, 30, 58)),
        ({"eagle_config": {AUX_LAYERS_KEY: [1, 29, 57]}}, (2, 30, 58)),
        ({"eagle_config": {AUX_LAYERS_KEY: [2, 30, 58]}}, (2, 30, 58)),
        ({"eagle_config": {AUX_LAYERS_KEY: [0, 30, 61]}}, (0, 30, 61)),
        ({"eagle_config": {AUX_LAYERS_KEY: [2, 16, 30, 58]}}, (2, 16, 30, 58)),
        ({"eagle_config": {"use_aux_hidden_state": False}}, None),
    ],
)
def test_captured_layer_ids(config: dict[str, object], captured: tuple[int, ...] | None) -> None:
    assert captured_layer_ids(config, 61) == captured


def test_speculators_layout_is_turned_into_the_plain_one() -> None:
    config = {
        "transformer_layer_config": {"hidden_size": 8, "vocab_size": 16},
        "draft_vocab_size": 4,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "fc_norm": True,
        "target_hidden_size": None,
    }
    assert plain_config(config) == {
        "hidden_size": 8,
        "vocab_size": 16,
        "draft_vocab_size": 4,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "fc_norm": True,
        "norm_before_residual": True,
    }
    assert plain_config({**config, "norm_before_residual": False})["norm_before_residual"] is False
    assert plain_config({"hidden_size": 8}) == {"hidden_size": 8}


PLAIN_ROPES = [
    {"rope_theta": 1e6},
    {"rope_theta": 1e6, "rope_scaling": None},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    {"rope_theta": 10000.0, "rope_parameters": {"rope_theta": 1e6}},
]


@pytest.mark.parametrize("config", PLAIN_ROPES)
def test_plain_rope_in_every_layout(config: dict[str, object]) -> None:
    assert read_rope(config) == (1e6, None)
    rotary = rotary_from_config(config, 128)
    assert rotary.magnitude == 1.0
    torch.testing.assert_close(rotary.inverse_frequencies[32], torch.tensor(1e-3))


def test_yarn_in_every_layout() -> None:
    yarn = {"factor": 64.0, "original_max_position_embeddings": 4096, "mscale": 1.0}
    layouts = [
        {"rope_theta": 5e4, "rope_scaling": {**yarn, "type": "yarn"}},
        {"rope_theta": 5e4, "rope_scaling": {**yarn, "rope_type": "yarn"}},
        {"rope_parameters": {**yarn, "rope_type": "yarn", "rope_theta": 5e4}},
    ]
    frequencies = [rotary_from_config(layout, 64).inverse_frequencies for layout in layouts]
    assert torch.equal(frequencies[0], frequencies[1])
    assert torch.equal(frequencies[0], frequencies[2])
    assert rotary_from_config(layouts[0], 64).magnitude == pytest.approx(1.4158883)
    with_both = {"rope_theta": 5e4, "rope_scaling": {**yarn, "type": "yarn", "mscale_all_dim": 1.0}}
    assert rotary_from_config(with_both, 64).magnitude == 1.0


def test_other_scalings_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="llama3"):
        read_rope({"model_type": "llama", "rope_theta": 1.0, "rope_scaling": {"type": "llama3"}})


# ----------------------------------------------------------------------------------------- YaRN


GOLDEN_KIMI_K25_FREQUENCIES = {
    0: 1.0,
    1: 0.7131111025810242,
    8: 0.06687403470277786,
    10: 0.028427958488464355,
    12: 0.011619159951806068,
    14: 0.004465848673135042,
    16: 0.0015372966881841421,
    18: 0.00040864606853574514,
    20: 1.8070233636535704e-05,
    24: 4.672965133067919e-06,
    31: 4.3822063844345394e-07,
}


def test_yarn_inverse_frequencies_of_kimi_k25() -> None:
    """Golden values: vLLM's own `DeepseekScalingRotaryEmbedding` for the published config."""
    frequencies = yarn_inverse_frequencies(
        64,
        50000.0,
        {
            "type": "yarn",
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    )
    assert frequencies.shape == (32,)
    for channel, golden in GOLDEN_KIMI_K25_FREQUENCIES.items():
        assert frequencies[channel].item() == pytest.approx(golden, rel=1e-6)


def test_yarn_mscale() -> None:
    assert yarn_mscale(1.0, 1.0) == 1.0
    assert yarn_mscale(64.0, 1.0) == pytest.approx(1.4158883)
    assert yarn_mscale(64.0, 0.0) == 1.0


# ----------------------------------------------------------------------------------------- the loop

VOCAB_SIZE = 5


class HashTarget:
    """A target whose next token is a fixed function of all tokens before it."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._token_ids: list[int] = []

    def _next(self) -> int:
        return random.Random(repr((self._seed, self._token_ids))).randrange(VOCAB_SIZE)

    def extend(self, token_ids: Sequence[int]) -> TargetOutput:
        logits = torch.zeros(len(token_ids), VOCAB_SIZE)
        for row, token_id in enumerate(token_ids):
            self._token_ids.append(token_id)
            logits[row, self._next()] = 1.0
        # "aux hidden states" that tell which positions the loop passes on
        start = len(self._token_ids) - len(token_ids)
        positions = torch.arange(start, len(self._token_ids)).view(-1, 1)
        return TargetOutput(logits, positions)

    def truncate(self, num_tokens: int) -> None:
        del self._token_ids[num_tokens:]


class CheckingDrafter:
    """Drafts what `oracle` says with some probability; checks what the loop hands it."""

    def __init__(
        self, prompt: Sequence[int], oracle: Sequence[int], skill: float, seed: int
    ) -> None:
        self._known = list(prompt[1:])
        self._prompt_length = len(prompt)
        self._truth = [*prompt, *oracle]
        self._skill = skill
        self._random = random.Random(seed)
        self._num_positions = 0

    def propose(
        self, next_token_ids: Sequence[int], aux_hidden_states: torch.Tensor, count: int
    ) -> list[int]:
        # every position once, in order, with the token that really follows it
        assert len(next_token_ids) == len(aux_hidden_states)
        expected = range(self._num_positions, self._num_positions + len(next_token_ids))
        assert aux_hidden_states.flatten().tolist() == list(expected)
        self._num_positions += len(next_token_ids)
        first = self._num_positions + 1  # index of the first token to draft
        assert list(next_token_ids) == self._truth[first - len(next_token_ids) : first]
        return [
            token_id if self._random.random() < self._skill else self._random.randrange(VOCAB_SIZE)
            for token_id in self._truth[first : first + count]
        ]


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6),
    num_speculative_tokens=st.integers(1, 6),
    max_tokens=st.integers(1, 24),
    skill=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    stop_token_ids=st.sampled_from([(), (3,)]),
)
def test_loop_is_lossless_and_counts_add_up(
    seed: int,
    prompt: list[int],
    num_speculative_tokens: int,
    max_tokens: int,
    skill: float,
    stop_token_ids: tuple[int, ...],
) -> None:
    greedy = generate(HashTarget(seed), prompt, max_tokens, stop_token_ids)
    oracle = generate(HashTarget(seed), prompt, max_tokens + num_speculative_tokens + 1)
    result = speculate(
        HashTarget(seed),
        CheckingDrafter(prompt, oracle, skill, seed),
        prompt,
        num_speculative_tokens,
        max_tokens,
        stop_token_ids,
    )
    assert result.output_token_ids == greedy
    check_counts(result, num_speculative_tokens)
    if skill == 1.0 and not stop_token_ids:
        steps = -(-(max_tokens - 1) // (num_speculative_tokens + 1))
        assert result.counts.num_drafts == steps
        assert result.counts.num_accepted_tokens == steps * num_speculative_tokens


def check_counts(result: Speculation, num_speculative_tokens: int) -> None:
    counts = result.counts
    assert counts.num_draft_tokens == counts.num_drafts * num_speculative_tokens
    assert counts.num_accepted_tokens == sum(counts.num_accepted_tokens_per_pos)
    assert counts.num_accepted_tokens_per_pos == sorted(
        counts.num_accepted_tokens_per_pos, reverse=True
    )
    emitted = 1 + counts.num_drafts + counts.num_accepted_tokens
    assert 0 <= emitted - len(result.output_token_ids) <= num_speculative_tokens


@pytest.mark.parametrize("folder", DRAFTER_FOLDERS, ids=lambda folder: folder.name)
@settings(max_examples=8)
@given(
    start=st.integers(0, 32),
    num_speculative_tokens=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_any_drafter_leaves_the_output_alone(
    folder: Path,
    target: Target,
    prompts: list[list[int]],
    start: int,
    num_speculative_tokens: int,
    seed: int,
) -> None:
    """A drafter with disturbed weights drafts badly; the output is still the target's."""
    prompt = prompts[seed % len(prompts)][start:]
    drafter = load_drafter(folder, target)
    torch.manual_seed(seed)
    for parameter in drafter.layers.parameters():
        parameter += 0.3 * torch.randn_like(parameter) * parameter.std()
    result = speculate(
        ReferenceTarget(target, AUX_LAYER_IDS),
        ReferenceDrafter(drafter),
        prompt,
        num_speculative_tokens,
        max_tokens=12,
    )
    assert result.output_token_ids == generate(ReferenceTarget(target), prompt, 12)
    check_counts(result, num_speculative_tokens)
