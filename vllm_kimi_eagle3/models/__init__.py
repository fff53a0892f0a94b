# SPDX-License-Identifier: Apache-2.0
"""Model classes: the backport's for vLLM 0.15 to 0.17, and what completes a release's own class.

All extend the release's classes under their own names. From 0.18 on one is imported only where a
drafter needs what the release's class lacks. The modules' names differ from those of vLLM's model
files on purpose: vLLM caches what it learns of a class under the hash of the *stock* file of the
same name.
"""
