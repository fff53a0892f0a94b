# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 speculative decoding for Kimi-K2.5 (K2, K2.6, K2.7) on stock vLLM, as a general plugin.

vLLM finds the plugin through the entry point ``kimi_eagle3`` in the group ``vllm.general_plugins``
and calls :func:`vllm_kimi_eagle3.plugin.register` in every process it starts. Importing this
package imports nothing else, so that it costs other models nothing.
"""

__version__ = "0.1.0"
