# make demo      install, fetch a small model, quantize it to FP8 and NVFP4, evaluate, decide, write a report
# make demo-image  the same for a small model that draws, to FP8, NVFP4, and NVFP4 with SVDQuant
# make test      the tests           make check   format, lint, types, order of the rooms
# make test-slow the slow ones       make bench   speed measurements
# make test-gpu  tests on a GPU      make tree    writes the annotated tree of README.md anew
# make docs      the documents as a site, strictly

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
MODEL := models/SmolLM2-135M-Instruct
PYTEST := $(BIN)/python -m pytest
# Tests of one file stay together, since they share what is dear to make; a process takes up to 4 GiB.
WORKERS ?= 2
BESIDE := OMP_NUM_THREADS=1 $(PYTEST) --numprocesses $(WORKERS) --dist loadfile

# Tests on the real model run where it has been fetched.
export HALFBYTE_SMOLLM2 ?= $(wildcard $(CURDIR)/$(MODEL))

.PHONY: install model demo demo-image test test-slow test-gpu bench check docs tree

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,docs,gguf,image,notebooks]'
	touch $@

model: $(INSTALLED)
	$(BIN)/python tests/fetch_smollm2.py $(MODEL)

# A verdict is a result, and NVFP4 is expected to fail here: only bad input and bugs fail the demo.
demo: model
	$(BIN)/halfbyte run demo-fp8 demo-nvfp4 || case $$? in 1|3) ;; *) exit 1 ;; esac

# The small Flux is in the repository: tests/small_flux/train.py has trained it.
demo-image: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/halfbyte run demo-image-fp8 demo-image-nvfp4 demo-image-nvfp4-svdquant || case $$? in 1|3) ;; *) exit 1 ;; esac

test: $(INSTALLED)
	$(BESIDE) -m 'not gpu and not bench and not slow'

test-slow: $(INSTALLED)
	$(BESIDE) -m 'slow and not gpu and not bench'

test-gpu: $(INSTALLED)
	$(PYTEST) -m gpu

bench: $(INSTALLED)
	$(PYTEST) -m bench -s tests/benchmarks

# Types and imports are checked on an installed copy: no checker follows an editable install of mapped folders.
# A build folder from before would put deleted modules into that copy.
check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf .typecheck build
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --target .typecheck .
	rm -rf build
	MYPYPATH=.typecheck $(BIN)/mypy
	PYTHONPATH=.typecheck $(BIN)/lint-imports

# The documents as a site in site/, which needs no network; a warning or a dead link is an error.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

tree: $(INSTALLED)
	$(BIN)/python tests/readme_tree.py
