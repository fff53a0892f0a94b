# Two commands for a newcomer: `make demo` and `make test`. Each sets up what it needs.
# Needs Python 3.11 or later; PYTHON=python3.12 chooses another.
PYTHON ?= python3
NOX := .venv/bin/python -m nox

.PHONY: demo test hosts clean

# A real `vllm serve` of the tiny pair on the CPU, with speculation and without.
# HOST=0.32.0 chooses another vLLM.
HOST ?= 0.17.1
demo: .venv/ready
	$(NOX) -s demo -- --host $(HOST)

# What CI runs.
test: .venv/ready
	$(NOX) -s lint types unit kernels "hosts(0.15.1)" "hosts(0.17.1)" "hosts(0.32.0)"

# The end-to-end tests on every host.
hosts: .venv/ready
	$(NOX) -s hosts -- --everything

.venv/ready:
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet nox uv
	touch $@

clean:
	rm -rf .venv .nox .hosts
