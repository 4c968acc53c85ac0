# Needs Python 3.11 or newer with pip; everything else is installed into the checkout.
PYTHON ?= python3
# The newest JAX needs Python 3.12 or newer: the newest Python on the path or among those of pyenv.
NEWEST_PYTHON ?= $(shell for python in $$(ls -d $$HOME/.pyenv/versions/*/bin/python3 2>/dev/null | sort -rV) \
	python3.14 python3.13 python3.12 $(PYTHON); do $$python -c \
	'import sys, venv; sys.exit(not (3, 12) <= sys.version_info < (3, 15))' 2>/dev/null && echo $$python && break; done)

VENV := .venv
OLDEST := .venv-oldest
NEWEST := .venv-newest
TORCH := .venv-torch
TPU := .venv-tpu
GPU := .venv-gpu
OLDEST_JAX := jax==0.7.2 jaxlib==0.7.2
# What depends on the version of JAX: all but the lab, the examples and the checks of the project's files.
ENGINE := $(filter-out tests/lab/% %/test_examples.py %/test_processes.py %/test_project.py, \
	$(wildcard tests/test_*.py tests/*/test_*.py))
# Three processes keep two cores busy: some tests wait for processes of their own.
PYTEST := -m pytest -n 3
PROGRAMS ?= 1000
FIRST_SEED ?= 0

.DEFAULT_GOAL := help
.PHONY: help demo private-digits mislabelled growing-batches fisher-from-few \
	test test-all test-oldest test-newest test-tpu test-gpu \
	test-engine-oldest test-engine-newest mutants fuzz lint bench bench-torch clean

help: ## list the targets
	@awk -F ': .*## ' '/^[a-z-]+:.*## / { printf "make %-18s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/installed ## a model's plan, the price of its statistics, a study on real text
	$(VENV)/bin/pergrad demo

private-digits: $(VENV)/installed ## train with differential privacy, show accuracy beside epsilon
	$(VENV)/bin/python -m examples.private_digits

mislabelled: $(VENV)/installed ## find wrong labels by the examples' gradients, draw mislabelled.png
	$(VENV)/bin/python -m examples.mislabelled

growing-batches: $(VENV)/installed ## train with batches that follow the noise scale, count the examples it takes
	$(VENV)/bin/python -m examples.growing_batches

fisher-from-few: $(VENV)/installed ## train a network that reads gradients, compare it with statistics of few examples
	$(VENV)/bin/python -m examples.fisher_from_few

test: $(VENV)/installed ## run the tests with the JAX that pip brings for this Python
	$(VENV)/bin/python $(PYTEST)

test-all: $(VENV)/installed ## run all of the long lists of cases too, which takes much longer
	PERGRAD_TESTS=all $(VENV)/bin/python $(PYTEST)

test-oldest: $(OLDEST)/installed ## run the tests with the oldest supported JAX
	$(OLDEST)/bin/python $(PYTEST)

test-newest: $(NEWEST)/installed ## run the tests with the newest JAX, on Python 3.12 or newer
	$(NEWEST)/bin/python $(PYTEST)

test-tpu: $(TPU)/installed ## hold the costs on a TPU, as its compiler has them on any machine, to their limits
	$(TPU)/bin/python -m pytest tests/library/test_guard_tpu.py tests/lab/bench/test_meter.py

test-gpu: $(GPU)/installed ## the same for a GPU: memory, and a roofline in the place of time; installs 5.6 GB
	JAX_PLATFORMS=cpu $(GPU)/bin/python -m pytest tests/library/test_guard_gpu.py tests/lab/bench/test_gpu.py

test-engine-oldest: $(OLDEST)/installed ## run the engine's tests alone, few of the cases, with the oldest JAX
	PERGRAD_TESTS=few $(OLDEST)/bin/python $(PYTEST) $(ENGINE)

test-engine-newest: $(NEWEST)/installed ## run the engine's tests alone, few of the cases, with the newest JAX
	PERGRAD_TESTS=few $(NEWEST)/bin/python $(PYTEST) $(ENGINE)

mutants: $(VENV)/installed ## break the engine in many small ways and see that the tests notice
	$(VENV)/bin/python -m tests.support.mutants

fuzz: $(VENV)/installed ## compare PROGRAMS=1000 random programs from FIRST_SEED=0 on with the oracle, into fuzz.log
	$(VENV)/bin/python -m tests.support.fuzz --programs $(PROGRAMS) --first-seed $(FIRST_SEED) --log fuzz.log

lint: $(VENV)/installed ## check style, formatting and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright

bench: $(VENV)/bench ## time and memory beside jax.grad, vmap(grad), optax and jax_privacy, with figures
	$(VENV)/bin/pergrad bench

bench-torch: $(TORCH)/installed ## the same for PyTorch: BackPACK, Opacus and torch.func
	$(TORCH)/bin/python -m pergrad.lab.bench.torch_side_by_side

clean: ## remove the environments and all caches
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(TORCH) $(TPU) $(GPU) .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp files below are written last: an interrupted installation is done again.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager --editable '.[dev]'
	touch $@

$(VENV)/bench: $(VENV)/installed
	$(VENV)/bin/python -m pip install --quiet --editable '.[bench]'
	touch $@

$(TORCH)/installed: pyproject.toml
	$(PYTHON) -m venv $(TORCH)
	$(TORCH)/bin/python -m pip install --quiet --editable '.[bench-torch]'
	touch $@

$(TPU)/installed: pyproject.toml
	$(PYTHON) -m venv $(TPU)
	$(TPU)/bin/python -m pip install --quiet --editable '.[dev,tpu-aot]'
	touch $@

$(GPU)/installed: pyproject.toml
	$(PYTHON) -m venv $(GPU)
	$(GPU)/bin/python -m pip install --quiet --editable '.[dev,gpu-aot]'
	touch $@

$(OLDEST)/installed: pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet $(OLDEST_JAX) --editable '.[dev]'
	touch $@

$(NEWEST)/installed: pyproject.toml
	@test -n '$(NEWEST_PYTHON)' || \
		{ echo 'The newest JAX needs Python 3.12 or newer: make test-newest NEWEST_PYTHON=python3.13'; exit 1; }
	$(NEWEST_PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager --editable '.[dev]'
	touch $@
