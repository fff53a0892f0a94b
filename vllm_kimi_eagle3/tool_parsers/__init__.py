# SPDX-License-Identifier: Apache-2.0
"""Kimi's tool-call format, and the parser that vLLM's server asks for by name."""
