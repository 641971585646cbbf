# make demo   set up .venv, build dlx, and convert real files
# make test   set up .venv, build dlx, and run the tests: SLOW=1 all of them, ARGS="-k name" some of them
# make lint   check Python and C
# make docs   build the site in site/; SCREENSHOTS=folder keeps pictures of its pages
# make dist   build an sdist and a wheel in dist/, and try the wheel
# make nox    list the sessions of noxfile.py, which do everything else; `make nox-NAME` or `nox -s NAME` runs one
# make clean  delete what make and nox have built
# make help   print this text
#
# PYTHON, TORCH and VENV name another interpreter, torch and environment (TORCH= installs no torch). DLX_SANITIZE=1 builds the
# extensions with sanitizers; the next target without it builds them as usual.

# The first interpreter that runs: the one on the path, or pyenv's, since a shim of pyenv on the path may fail.
PYENV_ROOT ?= $(HOME)/.pyenv
pyenv = $(wildcard $(PYENV_ROOT)/versions/$(patsubst python%,%,$(notdir $(1)))*/bin/$(notdir $(1)))
running = $(shell for python in $(foreach name,$(1),$(name) $(call pyenv,$(name))); do \
    $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$python; exit; }; done)

PYTHON ?= python3.11 python3.12 python3.13 python3.14 python3.15 python3
override PYTHON := $(or $(call running,$(PYTHON)),no-python-3.11-or-later-found)
TORCH ?= torch==2.13.0
VENV ?= .venv
EXTRA ?= test
JOBS ?= auto
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SANITIZE := $(filter 1,$(DLX_SANITIZE))
# libasan must be loaded first, and libstdc++ with it: torch throws while it loads. Python itself leaks at exit.
RUN = $(if $(SANITIZE),env LD_PRELOAD="$(shell cc -print-file-name=libasan.so) $(shell cc -print-file-name=libstdc++.so)" \
    PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 )$(BIN)/python
SOURCES := Makefile build_ffi.py setup.py pyproject.toml constraints.txt dlx/_core/headers.py $(wildcard c_src/*/* dlx_adapters/*.c)
TORCH_STAMP := $(VENV)/.torch-$(subst =,-,$(TORCH))
# dlx comes first: a missing compiler fails before a gigabyte is downloaded.
ENVIRONMENT = $(VENV)/.built $(VENV)/.extra-$(EXTRA) $(TORCH_STAMP) $(VENV)/.compiled
SIZE_demo = , 25 MB to download
SIZE_test = , 1.2 GB when installed
QUICK = $(if $(filter 1,$(SLOW))$(ARGS),,1)

.NOTPARALLEL:
.PHONY: demo test takes lint docs dist nox clean help env run interpreter

demo: $(VENV)/.built $(VENV)/.extra-demo $(TORCH_STAMP)
	PYTHONDONTWRITEBYTECODE= $(RUN) examples/quickstart.py

# Files with many slow tests start first (tests/conftest.py). Tests start Python often, so dlx is compiled to byte code first.
test: takes $(ENVIRONMENT)
	@$(BIN)/python -m compileall -q dlx dlx_adapters tests/support docs/tools
	$(if $(QUICK),DLX_EXAMPLES=$${DLX_EXAMPLES:-500} DLX_SHORT_EXIT=1 )$(RUN) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(if $(QUICK),-m "not slow") $(ARGS)

takes:
	@echo "note: the tests take $(if $(QUICK),four,twelve) minutes on two cores, once $(VENV) exists; ARGS=\"-k name\" runs some, SLOW=1 all"

lint docs dist: %: nox-%

nox: .venv-nox/bin/nox
	@$< --list

nox-%: .venv-nox/bin/nox
	@$< --session $*

clean:
	rm -rf .venv .venv-* build dist site dlx/_ffi.*so dlx_adapters/*.so *.egg-info

help:
	@sed -n '/^#/!q;s/^# \{0,1\}//p' Makefile

# The targets below are for noxfile.py.
env: $(ENVIRONMENT)

run: $(ENVIRONMENT)
	@$(RUN) $(ARGS)

interpreter:
	@echo $(filter-out no-%,$(PYTHON))

.venv-nox/bin/nox: constraints.txt
	$(PYTHON) -m venv .venv-nox
	.venv-nox/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt nox
	@touch $@

$(VENV)/.made:
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.extra-%: $(VENV)/.made pyproject.toml constraints.txt
	@echo "note: installing the extra '$*' into $(VENV)$(SIZE_$*)"
	@$(BIN)/python -c 'import sys, tomllib; groups = tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]; \
	    print(*groups[sys.argv[1]], sep="\n")' $* >$@.txt
	$(PIP) install $(if $(filter demo,$*),--no-compile )--constraint constraints.txt --requirement $@.txt
	@touch $@

# An editable install by .pth files, which type checkers and editors read, too; setuptools' import hook slows each start of
# Python. Two environments share the build folder: one waits.
$(VENV)/.built: $(VENV)/.made $(SOURCES) build/sanitize
	@echo "note: compiling dlx (about 30 s)"
	$(PIP) install --quiet --constraint constraints.txt setuptools wheel cffi
	@$(BIN)/python -W ignore setup.py --name >/dev/null
	@(s=0; while sleep 10; do s=$$((s + 10)); echo "note: still compiling ($$s s)"; done) & clock=$$!; \
	    $(if $(shell command -v flock),flock build/lock) $(PIP) install --quiet --constraint constraints.txt --no-build-isolation --config-settings editable_mode=compat --editable .; \
	    status=$$?; kill $$clock; exit $$status
	@echo "$(CURDIR)" > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/dlx-checkout.pth"
	@touch $@

# The value of DLX_SANITIZE in the last build: the extensions lie next to their sources, so every environment shares them.
build/sanitize: $(if $(filter-out =$(SANITIZE),=$(shell cat build/sanitize 2>&1)),FORCE)
	@mkdir -p $(@D)
	@echo "$(SANITIZE)" > $@
FORCE:

$(TORCH_STAMP): $(VENV)/.made
	@if [ -n "$(TORCH)" ]; then \
	    echo "note: $(TORCH), 1 GB when installed, more if only its CUDA build is available; TORCH= leaves it out"; \
	    $(PIP) install --no-compile --only-binary :all: "$(TORCH)" || echo "note: $(TORCH) is not available here; going on without torch"; fi
	@touch $@

# Byte code of all packages, on all cores: pip compiles on one.
$(VENV)/.compiled: $(VENV)/.extra-$(EXTRA) $(TORCH_STAMP)
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@
