# SPDX-License-Identifier: Apache-2.0
"""Is this a Kimi target? Everything the plugin changes is for the configurations named here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# A Kimi-K2.5 (K2.6, K2.7) config wraps its text tower's config; published ones call that tower by
# either name. A text-only K2 has the text tower's config at the top.
MULTIMODAL_MODEL_TYPE = "kimi_k25"
TEXT_MODEL_TYPES = ("kimi_k2", "deepseek_v3")

MULTIMODAL_ARCHITECTURE = "KimiK25ForConditionalGeneration"
TEXT_ARCHITECTURE = "DeepseekV3ForCausalLM"

# A K2 that was saved again as plain ``deepseek_v3`` is told from DeepSeek-V3 (129,280 tokens, 256
# experts) by these two, from the config.json of moonshotai/Kimi-K2-Instruct and Kimi-K2.5.
K2_VOCAB_SIZE = 163_840
K2_ROUTED_EXPERTS = 384

# Where a config may say which token stands for an image, best first. Kimi's own key is the first;
# the third is the one that vLLM's proposer reads up to 0.17.
IMAGE_TOKEN_KEYS = ("media_placeholder_token_id", "image_token_id", "image_token_index")

# The token of every published Kimi-K2.5, K2.6 and K2.7.
DEFAULT_IMAGE_TOKEN = 163_605


def is_kimi_target(config: Any) -> bool:
    """True if ``config`` (a Transformers config or the like) is that of a Kimi K2 or K2.5 target.

    False for everything else, DeepSeek-V3 included. Reads attributes only; never raises.
    """
    model_type = getattr(config, "model_type", None)
    if model_type == MULTIMODAL_MODEL_TYPE:
        return getattr(getattr(config, "text_config", None), "model_type", None) in TEXT_MODEL_TYPES
    return is_text_only_kimi(config)


def is_text_only_kimi(config: Any) -> bool:
    """True if ``config`` is that of a text-only Kimi K2 (a DeepSeek-V3 architecture)."""
    architectures = getattr(config, "architectures", None)
    if not isinstance(architectures, (list, tuple)) or TEXT_ARCHITECTURE not in architectures:
        return False
    model_type = getattr(config, "model_type", None)
    return model_type == "kimi_k2" or (
        model_type == "deepseek_v3"
        and getattr(config, "vocab_size", None) == K2_VOCAB_SIZE
        and getattr(config, "n_routed_experts", None) == K2_ROUTED_EXPERTS
    )


def image_token_id(config: Any) -> int | None:
    """The token id that stands for an image in a multimodal target's prompt, or None.

    Looks at ``config``'s own keys in the order of :data:`IMAGE_TOKEN_KEYS`.
    """
    own = vars(config)
    for key in IMAGE_TOKEN_KEYS:
        value = own.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


class ConfigFile:
    """A config.json with its keys as attributes, as the functions here take a config.

    ``text_config`` is one as well; without a ``model_type`` there it is a DeepSeek-V3's, which is
    what every class for Kimi takes it for.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        vars(self).update(config)
        text = config.get("text_config")
        if isinstance(text, Mapping):
            self.text_config = ConfigFile({"model_type": TEXT_MODEL_TYPES[1], **text})

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)  # Tells type checkers that there may be any.
