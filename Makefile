# Needs Python 3.11 or newer with pip; everything else is installed into the checkout.
PYTHON ?= python3
# The newest JAX needs Python 3.12 or newer: the newest Python on the path or among those of pyenv.
NEWEST_PYTHON ?= $(shell for python in $$(ls -d $$HOME/.pyenv/versions/*/bin/python3 2>/dev/null | sort -rV) \
	python3.14 python3.13 python3.12 $(PYTHON); do $$python -c \
	'import sys, venv; sys.exit(not (3, 12) <= sys.version_info < (3, 15))' 2>/dev/null && echo $$python && break; done)
# The Pythons in which a built package is tried: those of the classifiers that are on the path or among pyenv's.
DIST_PYTHONS ?= $(shell for minor in 11 12 13; do \
	for python in $$HOME/.pyenv/versions/3.$$minor.*/bin/python3 python3.$$minor; do \
	$$python -c 'import venv' 2>/dev/null && echo $$python && break; done; done)

VENV := .venv
OLDEST := .venv-oldest
NEWEST := .venv-newest
TORCH := .venv-torch
TPU := .venv-tpu
GPU := .venv-gpu
DOCS := .venv-docs
DIST := .venv-dist
NIGHTLY := .venv-nightly
OLDEST_JAX := jax==0.7.2 jaxlib==0.7.2
# What depends on the version of JAX: all but the lab, the examples and the checks of the project's files.
ENGINE := $(filter-out tests/lab/% %/test_examples.py %/test_processes.py %/test_project.py %/test_site.py \
	%/test_release.py, \
	$(wildcard tests/test_*.py tests/*/test_*.py))
# Three processes keep two cores busy: some tests wait for processes of their own.
PYTEST := -m pytest -n 3
PROGRAMS ?= 1000
FIRST_SEED ?= 0

.DEFAULT_GOAL := help
.PHONY: help demo private-digits mislabelled attribution growing-batches fisher-from-few \
	test test-all test-oldest test-newest test-tpu test-gpu \
	test-engine-oldest test-engine-newest test-nightly mutants fuzz lint bench bench-torch \
	docs docs-figures test-docs dist constraints clean

help: ## list the targets
	@awk -F ': .*## ' '/^[a-z-]+:.*## / { printf "make %-18s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/installed ## a model's plan and price, the noise of a run as it trains, a study of signs
	$(VENV)/bin/pergrad demo

private-digits: $(VENV)/installed ## train with differential privacy, show accuracy beside epsilon
	$(VENV)/bin/python -m examples.private_digits

mislabelled: $(VENV)/installed ## find wrong labels by the examples' gradients, draw mislabelled.png
	$(VENV)/bin/python -m examples.mislabelled

attribution: $(VENV)/installed ## find the training images behind a prediction, train without them, draw attribution.png
	$(VENV)/bin/python -m examples.attribution

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
	PERGRAD_TESTS=all $(TPU)/bin/python -m pytest tests/library/test_guard_tpu.py tests/lab/bench/test_meter.py

test-gpu: $(GPU)/installed ## the same for a GPU: memory, and a roofline in the place of time; installs 5.6 GB
	PERGRAD_TESTS=all JAX_PLATFORMS=cpu $(GPU)/bin/python -m pytest tests/library/test_guard_gpu.py tests/lab/bench/test_gpu.py

test-engine-oldest: $(OLDEST)/installed ## run the engine's tests alone, few of the cases, with the oldest JAX
	PERGRAD_TESTS=few $(OLDEST)/bin/python $(PYTEST) $(ENGINE)

test-engine-newest: $(NEWEST)/installed ## run the engine's tests alone, few of the cases, with the newest JAX
	PERGRAD_TESTS=few $(NEWEST)/bin/python $(PYTEST) $(ENGINE)

test-nightly: $(NIGHTLY)/installed ## run the tests with last night's JAX, from the index JAX_NIGHTLY_INDEX
	$(NIGHTLY)/bin/python $(PYTEST) -W 'ignore:pergrad is tested with JAX' \
		--deselect tests/test_compat.py::test_this_jax_is_tested

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

docs: $(DOCS)/installed ## build the site into site/, strictly; site/index.html opens without a network
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

docs-figures: $(VENV)/installed ## draw the figures of the tutorials and of the studies' tables again
	$(VENV)/bin/python -m docs.make_figures

test-docs: docs $(VENV)/installed ## build the site, and open every page in a browser
	PERGRAD_TESTS=all PERGRAD_SITE=site $(VENV)/bin/python -m pytest tests/test_site.py

dist: $(DIST)/installed ## build sdist and wheel, look into them, and try them in empty environments
	rm -rf dist
	$(DIST)/bin/python -m build --outdir dist
	$(DIST)/bin/python tests/support/dist.py dist $(DIST_PYTHONS)

constraints: $(VENV)/bench ## write the versions of all packages that the tests use to constraints.txt
	$(VENV)/bin/python tests/support/constraints.py > constraints.tmp
	mv constraints.tmp constraints.txt

clean: ## remove the environments and all caches
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(TORCH) $(TPU) $(GPU) $(DOCS) $(DIST) $(NIGHTLY)
	rm -rf .pytest_cache .ruff_cache build dist site
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

$(DOCS)/installed: pyproject.toml
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --editable '.[docs]'
	touch $@

$(DIST)/installed:
	$(PYTHON) -m venv $(DIST)
	$(DIST)/bin/python -m pip install --quiet build
	touch $@

$(NIGHTLY)/installed: pyproject.toml
	@test -n '$(JAX_NIGHTLY_INDEX)' || \
		{ echo 'Where are the nightly builds of JAX? make test-nightly JAX_NIGHTLY_INDEX=https://...'; exit 1; }
	$(PYTHON) -m venv $(NIGHTLY)
	$(NIGHTLY)/bin/python -m pip install --quiet --editable '.[dev]'
	$(NIGHTLY)/bin/python -m pip install --quiet --pre --upgrade --index-url '$(JAX_NIGHTLY_INDEX)' jax jaxlib
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
