# SPDX-License-Identifier: Apache-2.0
"""A drafter run on captured hidden states, in plain torch and float32: what a server would count.

The target's greedy answer is known, so every draft of every step can be judged without a server.
The drafter is run in teacher-forced form: it is fed the tokens of the answer, and where a draft was
right these are the tokens that it would have fed itself, so nothing is approximated. For each place
at which a step may begin that gives the number of drafts that are accepted there, and a walk from
the first to the last (each step goes on behind the token that the target adds) gives the steps of a
server with the counters ``vllm:spec_decode_*``.

At place t the first draft reads the target's hidden states of tokens 0 to t and the embeddings of
tokens 1 to t + 1. Draft j after it reads what the drafter handed on, at position t + j; its keys
and values are seen by the later drafts of its own step alone, since the next step overwrites them.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vllm_kimi_eagle3.acceptance.model import Counts
from vllm_kimi_eagle3.checkpoint.drafter_tensors import Expected
from vllm_kimi_eagle3.checkpoint.rope import Rope
from vllm_kimi_eagle3.checkpoint.sharing import Owner
from vllm_kimi_eagle3.checkpoint.tensors import TensorInfo

from .hypotheses import SCORED_ROPES, Reading, softmax_correction
from .weights import drafter_layers, read_rows, read_tensor

FINAL = "final"
"""The key of the final hidden state among a text's hidden states."""

# Tokens of a text whose steps are compared between readings as one observation.
WINDOW = 32

# Rows of the head that are in float32 at a time, and places whose attention is.
_HEAD_ROWS, _PLACES = 16_384, 128


@dataclass(frozen=True)
class Text:
    """A prompt and the target's greedy answer.

    Attributes:
        token_ids: of both.
        prompt_tokens: how many of them are the prompt.
        states: the file with its hidden states: by layer id, or :data:`FINAL`, ``[T, H]``.
        kind: of the prompt.
    """

    token_ids: tuple[int, ...]
    prompt_tokens: int
    states: Path
    kind: str = ""

    def places(self, k: int) -> range:
        """The places at which a step may begin whose ``k`` drafts can all be judged.

        The first step begins at the prompt's last token, when the answer's first is known.
        """
        return range(self.prompt_tokens - 1, len(self.token_ids) - k - 1)

    def load(self) -> dict[int | str, Tensor]:
        """Its hidden states, mapped from their file."""
        loaded: dict[int | str, Tensor] = torch.load(
            self.states, mmap=True, weights_only=True, map_location="cpu"
        )
        return loaded


@dataclass(frozen=True)
class Score:
    """What a reading's drafts would be counted as.

    Attributes:
        reading: how the drafter was run.
        texts: the counters of each text.
        steps: how many steps begin in each window of :data:`WINDOW` tokens, over all texts: the
            fewer, the better.
    """

    reading: Reading
    texts: tuple[Counts, ...]
    steps: tuple[int, ...]

    @property
    def length(self) -> float:
        """Mean acceptance length."""
        drafts = sum(text.drafts for text in self.texts)
        return 1 + sum(sum(text.accepted) for text in self.texts) / drafts if drafts else 1.0


def walk(accepted: Sequence[int], k: int) -> tuple[Counts, list[int]]:
    """The counters of the steps from the first place on, and the places at which they begin.

    Args:
        accepted: for each place, how many drafts of a step that begins there are accepted.
        k: drafts a step.
    """
    at, places, per_position = 0, [], [0] * k
    while at < len(accepted):
        places.append(at)
        for position in range(accepted[at]):
            per_position[position] += 1
        at += accepted[at] + 1
    return Counts(len(places), tuple(per_position)), places


# --------------------------------------------------------------------------------- building blocks


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis."""
    return functional.rms_norm(hidden, (hidden.shape[-1],), weight, eps)


def inverse_frequencies(rope: Rope, dim: int) -> Tensor:
    """Radians per position of each channel pair, ``[dim / 2]``, as vLLM's ``rotary_embedding``
    computes them: plain, divided by the factor (linear), by parts of the wave length (llama3), or
    YaRN's ramp over the channels (arXiv:2309.00071, section 3.2, with the bounds rounded outward).

    Raises:
        ValueError: the kind is none of :data:`SCORED_ROPES`.
    """
    if rope.kind not in SCORED_ROPES:
        raise ValueError(f"{rope.kind} rope scaling is not computed here")
    plain = rope.theta ** -(torch.arange(0, dim, 2).float() / dim)
    of = rope.scaling.get
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        original = float(of("original_max_position_embeddings", 8192))
        low, high = float(of("low_freq_factor", 1.0)), float(of("high_freq_factor", 4.0))
        turns = original * plain / (2 * torch.pi)
        smooth = (
            ((turns - low) / (high - low)).clamp(0, 1) if high != low else (turns > low).float()
        )
        return plain * smooth + plain / rope.factor * (1 - smooth)
    if not rope.yarn:
        return plain
    original = float(of("original_max_position_embeddings", 0))
    span = torch.log(torch.tensor(original / (2 * torch.pi), dtype=torch.float64))
    base = 2 * torch.log(torch.tensor(rope.theta, dtype=torch.float64))

    def channel(rotations: float) -> float:
        turns = torch.log(torch.tensor(rotations, dtype=torch.float64))
        return float(dim * (span - turns) / base)

    low_end = max(int(channel(float(of("beta_fast", 32.0))) // 1), 0)
    high_end = min(-int(-channel(float(of("beta_slow", 1.0))) // 1), dim - 1)
    ramp = (torch.arange(dim // 2).float() - low_end) / ((high_end - low_end) or 0.001)
    share = ramp.clamp(0, 1)
    return plain / rope.factor * share + plain * (1 - share)


def rotate(vectors: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotates channel pairs of ``[T, N, D]`` by the angles of ``[T, 1, D / 2]``: pairs of
    neighbours (DeepSeek), or of the two halves (Llama)."""
    if interleaved:
        even, odd = vectors[..., 0::2], vectors[..., 1::2]
        turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
        return turned.flatten(-2)
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attention of each token to itself and those before it, by head, ``[T, N, D]`` each; the
    values may be of another width.

    Torch computes it without a matrix of all pairs of tokens only where all are of one width, so
    the narrower ones get zeros, which change nothing.
    """
    width, wide = value.shape[-1], max(query.shape[-1], value.shape[-1])
    padded = [
        functional.pad(part, (0, wide - part.shape[-1])).transpose(0, 1)[None]
        for part in (query, key, value)
    ]
    attended = functional.scaled_dot_product_attention(*padded, is_causal=True, scale=scale)
    return attended[0].transpose(0, 1)[..., :width]


def best_rows(head: Tensor, normed: Tensor) -> Tensor:
    """The row of a head with the highest score at each place, the first of equal ones."""
    best = torch.full((len(normed),), float("-inf"), device=normed.device)
    rows = torch.zeros(len(normed), dtype=torch.int64, device=normed.device)
    for begin in range(0, len(head), _HEAD_ROWS):
        part = normed @ head[begin : begin + _HEAD_ROWS].float().t()
        value, index = part.max(dim=-1)
        higher = value > best
        best = torch.where(higher, value, best)
        rows = torch.where(higher, index + begin, rows)
    return rows


class _Cache:
    """Keys and values of one layer: those of all places, and of each draft after the first."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values  # [T, N, D]
        self.own: list[tuple[Tensor, Tensor]] = []  # [places, N, D] each

    def keep(self, which: Tensor) -> None:
        """Only these of the places go on."""
        self.own = [(keys[which], values[which]) for keys, values in self.own]


# --------------------------------------------------------------------------------------- a drafter


class Drafter:
    """A drafter's weights, to be run by any reading of them.

    Args:
        expected: its sizes.
        tensors: its checkpoint's.
        target: the target's ``embed_tokens.weight`` and ``lm_head.weight``, where they are here
            and not quantised.
        eps: of its norms.
        device: where to compute.
    """

    def __init__(
        self,
        expected: Expected,
        tensors: Mapping[str, TensorInfo],
        target: Mapping[str, TensorInfo],
        *,
        eps: float,
        device: Any = "cpu",
    ) -> None:
        self._expected, self._eps, self._device = expected, eps, device
        self._tables: dict[Owner, Mapping[str, TensorInfo]] = {"own": tensors, "target": target}
        self._weights = {
            name: tensor.to(device) for name, tensor in drafter_layers(tensors, expected).items()
        }
        self._heads: dict[Owner, Tensor] = {}
        self._embeddings: dict[Owner, tuple[dict[int, int], Tensor]] = {}

    @property
    def draft_rows(self) -> int:
        """Rows of its own head."""
        return self._expected.draft_vocab_size

    # ------------------------------------------------------------------------------- what is scored

    def score(self, reading: Reading, texts: Sequence[Text], k: int) -> Score:
        """Runs the drafter over all texts.

        Raises:
            CheckpointError: a file cannot be read.
            ValueError: its rope is not computed here.
        """
        if reading.rows == "unknown" and reading.head == "own":
            accepted = self._with_unknown_rows(reading, texts, k)
        else:
            tokens = self.targets(reading).to(self._device)
            accepted = [self._accepted(reading, text, k, tokens) for text in texts]
        counts, windows = [], []
        for one in accepted:
            counted, places = walk(one, k)
            counts.append(counted)
            steps = [0] * -(-len(one) // WINDOW)
            for place in places:
                steps[place // WINDOW] += 1
            windows += steps
        return Score(reading, tuple(counts), tuple(windows))

    def targets(self, reading: Reading) -> Tensor:
        """The target's token of each row of the head, int64 ``[rows]``.

        Raises:
            CheckpointError: the map cannot be read.
        """
        own = self._tables["own"]
        if reading.head == "target":
            return torch.arange(self._tables["target"]["lm_head.weight"].shape[0])
        identity = torch.arange(self.draft_rows)
        if reading.rows == "t2d":
            return read_tensor(own["t2d"]).flatten().nonzero().flatten()
        if reading.rows in ("d2t", "ids") and "d2t" in own:
            d2t = read_tensor(own["d2t"]).flatten().long()
            return identity + d2t if reading.rows == "d2t" else d2t
        return identity

    def for_head(self, reading: Reading, text: Text, k: int) -> tuple[Tensor, Tensor]:
        """What the head reads for the first draft at each place, ``[places, H]``, and the right
        tokens, ``[places]``."""
        rotations = self._rotations(reading.rope, len(text.token_ids))
        stream, _ = self._first(reading, text, k, rotations)
        places = torch.tensor(text.places(k), dtype=torch.int64, device=self._device)
        normed = rms_norm(stream, self._weights["norm.weight"], self._eps)
        return normed, self._answer(text)[places + 2]

    def head(self, owner: Owner) -> Tensor:
        """The rows of a head, in the dtype that they are stored in. One is kept at a time."""
        if owner not in self._heads:
            head = read_tensor(self._tables[owner]["lm_head.weight"])
            self._heads = {owner: head.to(self._device)}
        return self._heads[owner]

    def _accepted(self, reading: Reading, text: Text, k: int, tokens: Tensor) -> list[int]:
        """For each place of a text, how many of the drafts there are accepted."""
        count, answer = len(text.places(k)), self._answer(text)
        accepted = torch.zeros(count, dtype=torch.int64)
        if not count:
            return []
        alive = torch.arange(count, device=self._device)
        drafts = self._drafts(reading, text, k)
        rows = next(drafts)
        for step in range(k):
            right = tokens[rows] == answer[alive + text.prompt_tokens - 1 + step + 2]
            alive = alive[right]
            accepted[alive.cpu()] += 1
            if not len(alive) or step + 1 == k:
                break
            rows = drafts.send(right)
        return [int(value) for value in accepted]

    def _with_unknown_rows(
        self, reading: Reading, texts: Sequence[Text], k: int
    ) -> list[list[int]]:
        """The same with a map that is learned from the other half of the texts: each row stands for
        the token that is right most often where the drafter names that row.

        The map is known for the rows that were met, so this is a lower bound.
        """
        seen: list[list[tuple[Tensor, Tensor]]] = []  # By text and draft: rows and right tokens.
        for text in texts:
            places = torch.tensor(text.places(k), dtype=torch.int64)
            drafts, steps = self._drafts(reading, text, k), []
            rows = next(drafts)
            every = torch.ones(len(places), dtype=torch.bool, device=rows.device)
            for step in range(k):
                steps.append((rows.cpu(), self._answer(text).cpu()[places + step + 2]))
                if step + 1 < k:
                    rows = drafts.send(every)
            seen.append(steps)
        found = []
        for half in (0, 1):
            learned = self._learned([s for i, s in enumerate(seen) if i % 2 != half])
            found += [(i, learned) for i in range(half, len(texts), 2)]
        accepted: list[list[int]] = [[] for _ in texts]
        for index, tokens in found:
            right = torch.stack([tokens[rows] == wanted for rows, wanted in seen[index]])
            accepted[index] = [int(n) for n in right.long().cumprod(dim=0).sum(dim=0)]
        return accepted

    def _learned(self, seen: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> Tensor:
        """Each row's most frequent right token; -1 for rows that were not met."""
        tokens = torch.full((self.draft_rows,), -1)
        if not seen:
            return tokens
        rows = torch.cat([rows for steps in seen for rows, _ in steps])
        wanted = torch.cat([wanted for steps in seen for _, wanted in steps])
        pairs, times = torch.unique(torch.stack((rows, wanted)), dim=1, return_counts=True)
        for index in times.argsort(stable=True).tolist():  # The most frequent one is set last.
            tokens[pairs[0, index]] = pairs[1, index]
        return tokens

    # ------------------------------------------------------------------------------------- one text

    def _drafts(self, reading: Reading, text: Text, k: int) -> Generator[Tensor, Tensor, None]:
        """The rows that the drafter names at each place that is left, one draft after another. To
        be sent which of the places go on."""
        tokens = self._answer(text)
        rotations = self._rotations(reading.rope, len(tokens) + k)
        places = torch.tensor(text.places(k), dtype=torch.int64, device=self._device)
        stream, caches = self._first(reading, text, k, rotations)
        for step in range(k):
            normed = rms_norm(stream, self._weights["norm.weight"], self._eps)
            keep = yield best_rows(self.head(reading.head), normed)
            handed = (normed if reading.norm_output else stream)[keep]
            places = places[keep]
            for cache in caches:
                cache.keep(keep)
            embeddings = self._embedded(reading, tokens[places + step + 2])
            stream = self._next(
                reading, handed, embeddings, places, places + step + 1, rotations, caches
            )

    def _answer(self, text: Text) -> Tensor:
        return torch.tensor(text.token_ids, dtype=torch.int64, device=self._device)

    def _combined(self, reading: Reading, text: Text, known: int) -> Tensor:
        """What the layer is fed at each place, ``[known, H]``."""
        states = text.load()
        keys: Sequence[int | str] = (FINAL,) if reading.aux is None else reading.aux
        parts = [states[key][:known].to(self._device).float() for key in keys]
        weights = self._weights
        if "fc.weight" not in weights:
            return parts[0]
        if reading.norm_before_fc:
            joined = rms_norm(torch.cat(parts, dim=-1), weights["input_norm.weight"], self._eps)
            parts = list(joined.chunk(len(parts), dim=-1))
        if reading.fc_norm:
            parts = [
                rms_norm(part, weights[f"fc_norm.{index}.weight"], self._eps)
                for index, part in enumerate(parts)
            ]
        return self._linear("fc", torch.cat(parts, dim=-1))

    def _linear(self, name: str, hidden: Tensor) -> Tensor:
        weights = self._weights
        return functional.linear(hidden, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def _embedded(self, reading: Reading, tokens: Tensor) -> Tensor:
        """Embeddings of tokens. Only their rows of the table are read, once each."""
        where, rows = self._embeddings.get(reading.embedding, ({}, torch.empty(0)))
        ids = tokens.tolist()
        new = sorted(set(ids) - where.keys())
        if new:
            info = self._tables[reading.embedding]["embed_tokens.weight"]
            more = read_rows(info, new).float()
            where = {**where, **{token: len(where) + i for i, token in enumerate(new)}}
            rows = torch.cat((rows, more)) if len(rows) else more
            self._embeddings[reading.embedding] = where, rows
        return rows[torch.tensor([where[i] for i in ids], dtype=torch.int64)].to(self._device)

    # ----------------------------------------------------------------------------------- the layers

    def _first(
        self, reading: Reading, text: Text, k: int, rotations: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, list[_Cache]]:
        """The pass over a text, in which each token sees those before it: what the layers put out
        at each place, and what the later drafts see."""
        places = text.places(k)
        hidden = self._combined(reading, text, places.stop)
        embeddings = self._embedded(reading, self._answer(text)[1 : places.stop + 1])
        positions = torch.arange(places.stop, device=self._device)
        caches = []
        stream = hidden
        for index in range(self._expected.num_layers):
            fed, stream = self._entered(reading, index, stream, embeddings)
            query, key, value = self._projected(reading, index, fed, positions, rotations)
            caches.append(_Cache(key, value))
            attended = causal_attention(query, key, value, self._scale(reading.rope))
            stream = self._left(index, attended, stream)
        return stream[places.start :], caches

    def _next(
        self,
        reading: Reading,
        hidden: Tensor,
        embeddings: Tensor,
        places: Tensor,
        positions: Tensor,
        rotations: tuple[Tensor, Tensor],
        caches: Sequence[_Cache],
    ) -> Tensor:
        """The next draft of each place: it sees all up to the place, and the drafts of its step."""
        stream = hidden
        for index, cache in enumerate(caches):
            fed, stream = self._entered(reading, index, stream, embeddings)
            query, key, value = self._projected(reading, index, fed, positions, rotations)
            cache.own.append((key, value))
            attended = [
                self._attend(query, part, places, cache, self._scale(reading.rope))
                for part in torch.arange(len(places), device=self._device).split(_PLACES)
            ]
            stream = self._left(index, torch.cat(attended), stream)
        return stream

    @staticmethod
    def _attend(query: Tensor, part: Tensor, places: Tensor, cache: _Cache, scale: float) -> Tensor:
        """Attention of some places, ``[part, N, D]``."""
        query, places = query[part], places[part]
        longest = int(places.max()) + 1
        keys, values = cache.keys[:longest], cache.values[:longest]
        scores = torch.einsum("pnd,tnd->pnt", query, keys)
        seen = torch.arange(longest, device=places.device) <= places[:, None]
        scores = scores.masked_fill(~seen[:, None, :], float("-inf"))
        own = [(query * k[part]).sum(dim=-1, keepdim=True) for k, _ in cache.own]
        weights = (torch.cat((scores, *own), dim=-1) * scale).softmax(dim=-1)
        attended = torch.einsum("pnt,tnd->pnd", weights[..., :longest], values)
        for index, (_, value) in enumerate(cache.own):
            attended = attended + weights[..., longest + index, None] * value[part]
        return attended

    def _entered(
        self, reading: Reading, index: int, stream: Tensor, embeddings: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What a layer's attention is fed, and the residual beside it. The first layer reads the
        embedding and the hidden state, each normed; the others are plain pre-norm layers."""
        layer, weights = f"layers.{index}", self._weights
        entering = weights[f"{layer}.input_layernorm.weight"]
        if index > 0:
            return rms_norm(stream, entering, self._eps), stream
        normed = rms_norm(stream, weights[f"{layer}.hidden_norm.weight"], self._eps)
        fed = torch.cat((rms_norm(embeddings, entering, self._eps), normed), dim=-1)
        return fed, normed if reading.norm_before_residual else stream

    def _left(self, index: int, attended: Tensor, residual: Tensor) -> Tensor:
        """The layer's output, from its attention's."""
        layer = f"layers.{index}"
        stream = residual + self._linear(f"{layer}.self_attn.o_proj", attended.flatten(1))
        norm = self._weights[f"{layer}.post_attention_layernorm.weight"]
        normed = rms_norm(stream, norm, self._eps)
        gate = functional.silu(self._linear(f"{layer}.mlp.gate_proj", normed))
        up = self._linear(f"{layer}.mlp.up_proj", normed)
        return stream + self._linear(f"{layer}.mlp.down_proj", gate * up)

    def _rotations(self, rope: Rope, length: int) -> tuple[Tensor, Tensor]:
        """Cos and sin of each position, ``[length, rotated channels / 2]``."""
        e = self._expected
        dim = e.qk_rope_head_dim if e.attention == "mla" else e.head_dim
        angles = torch.outer(torch.arange(length).float(), inverse_frequencies(rope, dim))
        magnitude = rope.magnitude
        return (angles.cos() * magnitude).to(self._device), (angles.sin() * magnitude).to(
            self._device
        )

    def _scale(self, rope: Rope) -> float:
        e = self._expected
        if e.attention == "llama":
            return float(e.head_dim**-0.5)
        return float((e.qk_nope_head_dim + e.qk_rope_head_dim) ** -0.5) * softmax_correction(rope)

    def _projected(
        self,
        reading: Reading,
        index: int,
        fed: Tensor,
        positions: Tensor,
        rotations: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values by head, ``[T, N, D]``, rotated to their positions."""
        cos, sin = (table[positions][:, None, :] for table in rotations)
        if self._expected.attention == "mla":
            return self._latent(f"layers.{index}.self_attn", fed, cos, sin)
        e, attention = self._expected, f"layers.{index}.self_attn"
        query = self._linear(f"{attention}.q_proj", fed).unflatten(-1, (e.num_heads, -1))
        key = self._linear(f"{attention}.k_proj", fed).unflatten(-1, (e.num_kv_heads, -1))
        value = self._linear(f"{attention}.v_proj", fed).unflatten(-1, (e.num_kv_heads, -1))
        group = e.num_heads // e.num_kv_heads
        return (
            rotate(query, cos, sin, interleaved=False),
            rotate(key, cos, sin, interleaved=False).repeat_interleave(group, dim=1),
            value.repeat_interleave(group, dim=1),
        )

    def _latent(
        self, attention: str, fed: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same of MLA, with keys and values spelled out."""
        e, weights = self._expected, self._weights
        if e.q_lora_rank is None:
            query = self._linear(f"{attention}.q_proj", fed)
        else:
            norm = weights[f"{attention}.q_a_layernorm.weight"]
            low = rms_norm(self._linear(f"{attention}.q_a_proj", fed), norm, self._eps)
            query = self._linear(f"{attention}.q_b_proj", low)
        query = query.unflatten(-1, (e.num_heads, -1))
        plain, turned = query.split([e.qk_nope_head_dim, e.qk_rope_head_dim], dim=-1)
        query = torch.cat((plain, rotate(turned, cos, sin, interleaved=True)), dim=-1)
        latent, key = self._linear(f"{attention}.kv_a_proj_with_mqa", fed).split(
            [e.kv_lora_rank, e.qk_rope_head_dim], dim=-1
        )
        latent = rms_norm(latent, weights[f"{attention}.kv_a_layernorm.weight"], self._eps)
        both = self._linear(f"{attention}.kv_b_proj", latent).unflatten(-1, (e.num_heads, -1))
        plain, value = both.split([e.qk_nope_head_dim, e.v_head_dim], dim=-1)
        key = rotate(key[:, None, :], cos, sin, interleaved=True).expand(-1, e.num_heads, -1)
        return query, torch.cat((plain, key), dim=-1), value
