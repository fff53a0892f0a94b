# SPDX-License-Identifier: Apache-2.0
"""What a target's or a drafter's configuration says, whoever wrote it. Imports nothing of vLLM."""
