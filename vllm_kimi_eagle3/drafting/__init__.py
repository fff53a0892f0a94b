# SPDX-License-Identifier: Apache-2.0
"""The drafter's forward pass on the plugin's kernels, and the loop of draft steps around it.

What a drafter is, is read from the release's own module (`weights.py`), so that its loading, its
sharing with the target and its shards stay as they are. `forward.py` computes one draft step from
it, with attention by `attend.py`: the release's own layer, or the kernels over its paged cache.
"""
