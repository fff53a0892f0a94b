# SPDX-License-Identifier: Apache-2.0
"""Property tests are not timed: an example takes what the machine's other work leaves it."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
