# SPDX-License-Identifier: Apache-2.0
"""Acceptance of drafts: what counters say of it, how sure that is, and what it should be.

Shared by ``diagnose`` (live and offline) and ``plan``. Standard library only; nothing of vLLM.
"""
