# SPDX-License-Identifier: Apache-2.0
"""Why acceptance is what it is, of a server that runs (``diagnose --url``) or of one load of the
target (``diagnose --offline``).

The live mode reads counters over HTTP, so it needs neither vLLM nor the plugin here or there: one
file for the counters (``metrics.py``), the server (``server.py``), its driving (``drive.py``), what
the counters look like (``signature.py``), and the command (``run.py``). Standard library only.
"""
