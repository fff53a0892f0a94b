# SPDX-License-Identifier: Apache-2.0
"""What the drafter class of a vLLM release can do, and what a drafter needs that it cannot.

Two classes serve Kimi's drafters, ``llama_eagle3.py`` and ``deepseek_eagle3.py``. What they lack
differs by release, and so does what they make of it: a bare error, or nothing said. A server reads
it from the class itself (patches/eagle31_drafter.py); before there is one, the release tells.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from packaging.version import Version

from .drafter_tensors import Expected

Attention = Literal["llama", "mla"]

# EAGLE-3's number of aux layers, which the releases before 0.22 have as a constant.
_USUAL_COUNT = 3


@dataclass(frozen=True)
class DrafterClass:
    """What a drafter class does.

    Attributes:
        fc_norm: applies a norm to each aux hidden state.
        norm_output: hands on the hidden state after the final norm.
        norm_before_fc: applies one norm to the joined hidden states.
        without_aux: can read the target's final hidden state in place of aux hidden states.
        any_count: can join other than three aux hidden states.
        takes_full_d2t: has a parameter for the ``d2t`` of a full vocabulary.
        quantized_head: can load a quantised LM head.
    """

    fc_norm: bool
    norm_output: bool
    norm_before_fc: bool
    without_aux: bool
    any_count: bool
    takes_full_d2t: bool
    quantized_head: bool

    def lacks(self, expected: Expected, norm_output: bool, identity_d2t: str = "") -> list[str]:
        """What a drafter needs that the class does not do, by the names of its parts.

        Args:
            expected: what the drafter's class has to hold.
            norm_output: of the drafter's config.
            identity_d2t: ``offsets`` or ``ids`` where its ``d2t`` maps every token to itself.
        """
        count = expected.aux_count
        needed = {
            "fc_norm": expected.fc_norm and not self.fc_norm,
            "norm_before_fc": expected.norm_before_fc and not self.norm_before_fc,
            "norm_output": norm_output and not self.norm_output,
            "use_aux_hidden_state: false": not count and not self.without_aux,
            f"{count} aux layers": count not in (0, _USUAL_COUNT) and not self.any_count,
            # Offsets of zero may be added; token ids may not.
            "a d2t that maps every token to itself": identity_d2t == "ids"
            or (bool(identity_d2t) and not self.takes_full_d2t),
        }
        return [name for name, lacking in needed.items() if lacking]


# The first release in which the class does it; None for none up to 0.33.
_LLAMA_SINCE = {
    "fc_norm": "0.22",
    "norm_output": "0.22",
    "norm_before_fc": "0.18",
    "without_aux": "0.15",
    "any_count": "0.22",
    "quantized_head": "0.19",
}
_MLA_SINCE = {
    "fc_norm": "0.23",  # 0.22 has the parameters and does not apply them.
    "norm_output": "0.22",
    "norm_before_fc": None,
    "without_aux": None,
    "any_count": "0.22",
    "quantized_head": None,
}
# Up to 0.17 the plugin's own class serves an MLA drafter (models/kimi_mla_drafter.py).
_OWN = DrafterClass(
    fc_norm=False,
    norm_output=False,
    norm_before_fc=False,
    without_aux=True,
    any_count=True,
    takes_full_d2t=True,
    quantized_head=False,
)
_MLA_CLASS_SINCE = Version("0.18")
_FULL_D2T_BEFORE = Version("0.30")


def drafter_class(attention: Attention, version: Version) -> DrafterClass:
    """The class that serves a drafter in a vLLM release, as its source has it."""
    base = Version(version.base_version)
    if attention == "mla" and base < _MLA_CLASS_SINCE:
        return _OWN
    since = _LLAMA_SINCE if attention == "llama" else _MLA_SINCE
    does = {
        field.name: (first := since.get(field.name)) is not None and base >= Version(first)
        for field in fields(DrafterClass)
    }
    return DrafterClass(**{**does, "takes_full_d2t": base < _FULL_D2T_BEFORE})
