# SPDX-License-Identifier: Apache-2.0
"""The attention back-end that verifies k + 1 tokens in one pass over the KV cache.

It is vLLM's own TRITON_MLA, of whichever release, with the decode step replaced: ``triton_mla`` is
where vLLM finds it by name, ``plan`` decides what serves a model, ``backend`` holds the classes.
"""
