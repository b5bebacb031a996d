# make demo and make test do everything on a machine with Python 3.10+ (headers, venv), C and C++ compilers and make.
# With nvcc and a GPU the CUDA kernels are built and used.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
SOURCES := setup.py pyproject.toml $(shell find csrc -type f)
# Kernels are compiled for the GPUs of this machine. Where there is none, demo and test do without them, and the targets
# below compile them for one GPU, to see that they do.
include csrc/gpus.mk
ifeq ($(HAS_GPU),)
test-all test-slow test-gpu sanitize-gpu bench: export TORCH_CUDA_ARCH_LIST ?= 9.0
endif

.PHONY: help demo test test-all test-slow test-gpu sanitize-gpu bench reproduce stale docs lint format \
    install uninstall clean FORCE

help:
	@echo "make demo    compress the shipped tensors, check every bit, print a table, draw build/demo.png"
	@echo "make test    what to run after a change (PYTEST_ARGS=...)"
	@echo "make test-all   every test that this machine can run; make test-slow: those of them that make test leaves out"
	@echo "make test-gpu   every test, a process a file, on a machine with a GPU: none may skip for want of one"
	@echo "make sanitize-gpu   every family of kernels under the tools of compute-sanitizer (SANITIZE_ARGS=...)"
	@echo "make bench   python -m benchmarks (BENCH_ARGS=...)"
	@echo "make reproduce   all measurements of docs/reproduction.md, and its tables (BENCH_ARGS=...)"
	@echo "make stale   which of those figures are older than the code that they measure"
	@echo "make docs    the site of the documentation, into build/site"
	@echo "make lint    clang-format, ruff and mypy in check mode"
	@echo "make format  what make lint asks of the layout of the code"
	@echo "make clean   remove $(VENV) and everything built"
	@echo "make install PREFIX=...    the C and CUDA library alone, no Python (make uninstall; csrc/Makefile says more)"
	@echo "PYTHON=$(PYTHON) makes $(VENV); its torch is used if it imports one, else a pinned one is installed"

demo: $(VENV)/.ibp $(VENV)/.demo
	$(RUN) examples/demo.py

# Tests start hundreds of Pythons: the bytecode of a module that one has compiled is kept for the others.
unexport PYTHONDONTWRITEBYTECODE

# Tests run in a process a core where pytest-xdist could be installed, in one where it could not.
PYTEST = $(RUN) -m pytest -q $$($(RUN) -c 'import xdist' 2> /dev/null && echo $(WORKERS))
WORKERS := --numprocesses=auto --maxprocesses=8 --dist=worksteal

test: $(VENV)/.ibp $(VENV)/.test
	$(PYTEST) -m 'not slow and not frameworks' $(PYTEST_ARGS)

test-all: $(VENV)/.ibp $(VENV)/.test $(VENV)/.frameworks
	$(PYTEST) --hypothesis-profile=full $(PYTEST_ARGS)

# Tests of drawn examples are in both: here they draw three times as many.
test-slow: $(VENV)/.ibp $(VENV)/.test $(VENV)/.frameworks
	$(PYTEST) -m 'slow or hypothesis or frameworks' --hypothesis-profile=full $(PYTEST_ARGS)

test-gpu: $(VENV)/.ibp $(VENV)/.test
	$(RUN) tools/test_gpu.py $(PYTEST_ARGS)

# Needs compute-sanitizer, which comes with CUDA. Under five minutes of one GPU.
sanitize-gpu: $(VENV)/.ibp
	$(RUN) tools/sanitize_gpu.py $(SANITIZE_ARGS)

bench: $(VENV)/.ibp $(VENV)/.demo $(VENV)/.bench
	$(RUN) -m benchmarks $(BENCH_ARGS)

reproduce: $(VENV)/.ibp $(VENV)/.demo $(VENV)/.bench
	$(RUN) -m benchmarks --papers $(BENCH_ARGS)
	$(RUN) -m benchmarks.claims

# Which figures are older than the code that they measure.
stale: $(VENV)/.ibp
	$(RUN) -m benchmarks.stale

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet

# Each stamp is a step done; a later one runs again when an earlier one, or a source of the library, is newer.
$(VENV)/.build: tools/make_venv.py tools/requirements.py pyproject.toml
	$(PYTHON) tools/make_venv.py $(VENV) build
	@touch $@

$(VENV)/.test: $(VENV)/.build
	$(PYTHON) tools/make_venv.py $(VENV) test --optional test-workers
	@touch $@

$(VENV)/.demo $(VENV)/.docs $(VENV)/.lint: $(VENV)/.build
	$(PYTHON) tools/make_venv.py $(VENV) $(@F:.%=%)
	@touch $@

# Host frameworks, and codecs that the benchmarks compare with: what cannot be had is left out, with its tests and arms.
$(VENV)/.frameworks $(VENV)/.bench: $(VENV)/.build
	$(PYTHON) tools/make_venv.py $(VENV) --optional $(@F:.%=%)
	@touch $@

# The library is built again when what it is built with changes.
BUILT_WITH = $(IBP_NO_CUDA) $(CC) $(CXX) $(CFLAGS) $(CXXFLAGS) $(LDFLAGS) $(NVCCFLAGS) $(IBP_ONLY_PTX) \
    $(TORCH_CUDA_ARCH_LIST) $(GPUS)
$(VENV)/.environment: FORCE
	@mkdir -p $(@D)
	@printf '%s\n' '$(BUILT_WITH)' > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

$(VENV)/.ibp: $(VENV)/.build $(VENV)/.environment $(SOURCES)
	$(RUN) -m pip --disable-pip-version-check --quiet install --no-build-isolation --no-deps --no-index -e .
	@touch $@

CLANG_FORMAT = $(RUN) -c 'import clang_format; clang_format.clang_format()'
C_FILES = $(shell find benchmarks csrc tests/c tests/fuzz examples/c \
    -name '*.[ch]' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

lint: $(VENV)/.lint
	$(CLANG_FORMAT) --dry-run --Werror $(C_FILES)
	@! grep -nE '^.{121}' $(C_FILES) Makefile csrc/Makefile  # comments too, which clang-format leaves as they are
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy

format: $(VENV)/.lint
	$(CLANG_FORMAT) -i $(C_FILES)
	$(RUN) -m ruff check --fix
	$(RUN) -m ruff format

# The library alone: no Python, no $(VENV).
install uninstall:
	$(MAKE) -C csrc $@ $(if $(PREFIX),PREFIX='$(abspath $(PREFIX))')

clean:
	rm -rf $(VENV) build ibp.egg-info ibp/_lib ibp/include ibp/_core.*.so
