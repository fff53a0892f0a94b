# SPDX-License-Identifier: Apache-2.0
"""Model classes for vLLM 0.15 to 0.17, subclasses of the release's own. From 0.18 none is used.

The modules' names differ from those of vLLM's model files on purpose: vLLM caches what it learns
of a class under the hash of the *stock* file of the same name.
"""
