# For people and for CI: every target first makes the environment that it needs.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
KERAS ?= stable
RELEASES ?= pinned
VENV ?= .venv$(if $(filter nightly,$(KERAS)),-nightly)$(if $(filter newest,$(RELEASES)),-newest)
# On a platform without tensorflow-cpu: make test TENSORFLOW=tensorflow
TENSORFLOW ?= tensorflow-cpu
BACKENDS = $(subst $(comma), ,$(or $(KS_BACKENDS),jax$(comma)torch$(comma)tensorflow))

export PIP_DISABLE_PIP_VERSION_CHECK := 1
comma := ,
bin := $(VENV)/bin
pip := $(bin)/pip --quiet
stamp := $(VENV)/.installed
pins := $(if $(filter pinned,$(RELEASES)),-c constraints.txt)

ifeq ($(filter stable nightly,$(KERAS)),)
$(error KERAS is "$(KERAS)"; expected stable or nightly)
endif
ifeq ($(filter pinned newest,$(RELEASES)),)
$(error RELEASES is "$(RELEASES)"; expected pinned or newest)
endif

.PHONY: help env demo test check test-full lint format bench notebooks docs clean

help: ## Show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile
	@echo
	@echo "  KS_BACKENDS=jax,torch   only these backends (default: all three)"
	@echo "  TESTS='tests/input ...' only these files or folders of tests"
	@echo "  KERAS=nightly           with keras-nightly, in .venv-nightly"
	@echo "  RELEASES=newest         the newest that pyproject.toml allows, in .venv-newest"
	@echo "  VENV=DIR PYTHON=EXE     another environment, another Python"
	@echo "  PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu"
	@echo "                          torch without its CUDA libraries"

env: $(stamp) ## Make the environment

demo: .venv-demo/.installed ## Train on one device and on two, on each backend, and compare
	@.venv-demo/bin/python examples/demo.py

.venv-demo/.installed: pyproject.toml constraints.txt
	@echo "First this installs Keras, JAX, Torch and TensorFlow, without their GPU"
	@echo "libraries, and scikit-learn in .venv-demo: about 2 GB, some minutes."
	$(PYTHON) -m venv .venv-demo
	PIP_EXTRA_INDEX_URL=$${PIP_EXTRA_INDEX_URL-https://download.pytorch.org/whl/cpu} \
	    .venv-demo/bin/pip install --progress-bar off $(pins) $(TENSORFLOW) scikit-learn -e '.[jax,torch]'
	touch $@

check: $(stamp) ## Before a commit: lint, types and the quickest tests (2 minutes)
	$(bin)/python tests/run.py --lint --check

test: $(stamp) ## Lint, types, a test of every promise (7 to 12 minutes)
	$(bin)/python tests/run.py --lint $(TESTS)

test-full: $(stamp) ## The same and the cross product (nightly, hours)
	$(bin)/python tests/run.py --lint --nightly $(TESTS)

lint: $(stamp) ## Check style and types
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy

format: $(stamp) ## Format the code and mend what ruff can
	$(bin)/ruff check --fix .
	$(bin)/ruff format .

bench: $(stamp) ## Measure fit against its peers
	$(bin)/python benchmarks/fit.py

notebooks: $(stamp) ## Execute every notebook on each backend
	for backend in $(BACKENDS); do \
	    KERAS_BACKEND=$$backend $(bin)/jupyter execute notebooks/*.ipynb || exit 1; \
	done

docs: .venv-docs/.installed ## Build the pages as a site in site/, strictly
	.venv-docs/bin/mkdocs build --strict

.venv-docs/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip --quiet install -c constraints.txt -e '.[docs]'
	touch $@

clean: ## Remove the environments, caches and logs
	rm -rf .venv .venv-demo .venv-nightly .venv-newest .venv-nightly-newest .venv-docs site .cache .test-logs .test-references build dist .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

# keras-hub comes alone: it would bring tensorflow-text and with it another TensorFlow.
# keras and keras-nightly are the same module, so one has to leave for the other, and
# keras-hub with it, because each release uses symbols of one Keras.
$(stamp): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(pip) install $(pins) $(TENSORFLOW) -e '.[jax,torch,test]'
ifeq ($(KERAS),nightly)
	$(pip) uninstall -y keras
	$(pip) install --pre --no-deps --force-reinstall keras-nightly keras-hub-nightly
else
	$(pip) install $(pins) --no-deps keras-hub
endif
	touch $@
