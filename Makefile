# `make demo` and `make test` do all of their own set-up, in .venv and build/.
PYTHON ?= python3
VENV ?= .venv
# The wheel's build tree; scikit-build-core keeps it, so that only what changed is compiled again.
BUILD = build/wheel
PIP = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check
INSTALL = $(PIP) --no-build-isolation --no-deps --force-reinstall --config-settings=build-dir=$(BUILD)

SOURCES := $(shell find CMakeLists.txt pyproject.toml builder runtime plugins tools cpp -type f \
                   -not -name '*.pyc' -not -path '*/__pycache__*')
CPP_TESTS := $(shell find tests/cpp -type f)
CPP_FILES = $$(git ls-files 'cpp/*.h' 'cpp/*.cpp' 'cpp/*.inl' 'tests/cpp/*.h' 'tests/cpp/*.cpp' 'bench/*.cpp')

.PHONY: demo install test lint format sanitize bench clean

demo: $(VENV)/.installed  ## Build everything, then serve one mixed batch of adapters
	$(VENV)/bin/python -m adaptrt.tools.demo

install: $(VENV)/.installed  ## Install the package into .venv

test: $(VENV)/.installed-with-tests  ## C++ tests, then the Python tests against the installed package
	$(VENV)/bin/ctest --test-dir $(BUILD) --output-on-failure
	cd tests && ../$(VENV)/bin/python -m pytest -c ../pyproject.toml --rootdir .. -n 2 --dist worksteal python

lint: $(VENV)/.installed-dev  ## ruff, mypy --strict, clang-format
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	cd tests && ../$(VENV)/bin/mypy --config-file ../pyproject.toml -p adaptrt
	$(VENV)/bin/clang-format --dry-run --Werror $(CPP_FILES)

format: $(VENV)/.installed-dev  ## Rewrite sources in the house style
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(CPP_FILES)

sanitize: $(VENV)/.test-tools  ## C++ tests under ASan+UBSan and under TSan
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" && for preset in asan-ubsan tsan; do \
	  cmake --preset $$preset && cmake --build --preset $$preset && ctest --preset $$preset || exit 1; done

bench: $(VENV)/.installed  ## Throughput and latency beside the machine's limits
	$(VENV)/bin/adaptrt bench

clean:  ## Remove everything that the other targets made
	rm -rf build $(VENV)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV) || { \
	  echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }

$(VENV)/.build-tools: $(VENV)/bin/python pyproject.toml
	$(PIP) --upgrade 'pip>=23.1'
	$(PIP) 'cmake>=3.25' ninja 'pybind11>=3.0' 'scikit-build-core>=1.0'
	@touch $@

# Everything in pyproject.toml's dependencies; the package itself follows without them.
$(VENV)/.dependencies: $(VENV)/.build-tools
	$(VENV)/bin/python tools/list_dependencies.py > $(VENV)/requirements.txt
	$(PIP) -r $(VENV)/requirements.txt
	@touch $@

# torch is pinned to a version whose CPU build is at hand; see docs/dependencies.md.
$(VENV)/.test-tools: $(VENV)/.dependencies
	$(PIP) torch==2.13.0
	$(VENV)/bin/python tools/list_dependencies.py test > $(VENV)/requirements-test.txt
	$(PIP) -r $(VENV)/requirements-test.txt
	@touch $@

$(VENV)/.installed: $(VENV)/.dependencies $(SOURCES)
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(INSTALL) .
	@touch $@

$(VENV)/.installed-with-tests: $(VENV)/.test-tools $(SOURCES) $(CPP_TESTS)
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(INSTALL) --config-settings=cmake.define.ADAPTRT_BUILD_TESTS=ON .
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-dev: $(VENV)/.installed
	$(VENV)/bin/python tools/list_dependencies.py dev > $(VENV)/requirements-dev.txt
	$(PIP) -r $(VENV)/requirements-dev.txt
	@touch $@
