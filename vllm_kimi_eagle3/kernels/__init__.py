# SPDX-License-Identifier: Apache-2.0
"""Triton kernels: tensors in, tensors out.

Nothing here imports vLLM. ``arch`` is the only file that knows hardware; ``reference`` says in
plain torch what each kernel computes, and is what tests and benchmarks judge them by.
"""
