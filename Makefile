# Needs Python 3.11 or newer with pip; everything else is installed into the checkout.
PYTHON ?= python3

NEWEST := .venv
OLDEST := .venv-oldest
TORCH := .venv-torch
OLDEST_JAX := jax==0.7.0 jaxlib==0.7.0

.DEFAULT_GOAL := help
.PHONY: help demo private-digits mislabelled test test-all test-oldest lint bench bench-torch clean

help: ## list the targets
	@awk -F ': .*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' Makefile

demo: $(NEWEST)/installed ## a model's plan, the price of its statistics, a study on real text
	$(NEWEST)/bin/pergrad demo

private-digits: $(NEWEST)/installed ## train with differential privacy, show accuracy beside epsilon
	$(NEWEST)/bin/python -m examples.private_digits

mislabelled: $(NEWEST)/installed ## find wrong labels by the examples' gradients, draw mislabelled.png
	$(NEWEST)/bin/python -m examples.mislabelled

test: $(NEWEST)/installed ## run the tests with the newest JAX
	$(NEWEST)/bin/python -m pytest -n 2 --dist loadgroup

test-all: $(NEWEST)/installed ## run all of the long lists of cases too, which takes half as long again
	PERGRAD_TESTS=all $(NEWEST)/bin/python -m pytest -n 2 --dist loadgroup

test-oldest: $(OLDEST)/installed ## run the tests with the oldest supported JAX
	$(OLDEST)/bin/python -m pytest -n 2 --dist loadgroup

lint: $(NEWEST)/installed ## check style, formatting and types
	$(NEWEST)/bin/ruff check .
	$(NEWEST)/bin/ruff format --check .
	$(NEWEST)/bin/pyright

bench: $(NEWEST)/bench ## time and memory beside jax.grad, vmap(grad), optax and jax_privacy, with figures
	$(NEWEST)/bin/pergrad bench

bench-torch: $(TORCH)/installed ## the same for PyTorch: BackPACK, Opacus and torch.func
	$(TORCH)/bin/python -m benchmarks.torch_side_by_side

clean: ## remove the environments and all caches
	rm -rf $(NEWEST) $(OLDEST) $(TORCH) .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp files below are written last: an interrupted installation is done again.
$(NEWEST)/installed: pyproject.toml
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager --editable '.[dev]'
	touch $@

$(NEWEST)/bench: $(NEWEST)/installed
	$(NEWEST)/bin/python -m pip install --quiet --editable '.[bench]'
	touch $@

$(TORCH)/installed: pyproject.toml
	$(PYTHON) -m venv $(TORCH)
	$(TORCH)/bin/python -m pip install --quiet --editable '.[bench-torch]'
	touch $@

$(OLDEST)/installed: pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet $(OLDEST_JAX) --editable '.[dev]'
	touch $@
