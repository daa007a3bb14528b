# Every target works from a clean clone. It builds what it needs, and nothing twice.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
CPUS := $(shell env -u OMP_NUM_THREADS nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
DEMO := out/demo

# Local runs stay on this machine: Ray listens on loopback only, joins no cluster that was left running, reports nothing.
export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER := 0
export RAY_AUTH_MODE := disabled
export RAY_USAGE_STATS_ENABLED := 0
export RAY_ADDRESS := local

.PHONY: setup models demo test test-slow test-all chromium lint docs bench wheel
setup: $(VENV)/.done
models: .models/.done

# On a machine without a GPU, TORCH_INDEX=https://download.pytorch.org/whl/cpu saves gigabytes of CUDA libraries.
$(VENV)/.done: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("specextend needs Python 3.11 or newer; name one with PYTHON=..." if sys.version_info < (3, 11) else 0)'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) 'torch==2.13.0'
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[dev,docs]'
	touch $@

.models/.done: scripts/make_models.py scripts/tiny_models.py specextend/models/causal_lm.py | $(VENV)/.done
	$(PY) -m scripts.make_models
	touch $@

demo: setup models
	rm -rf $(DEMO)
	$(PY) -m specextend demo --output $(DEMO)

# One file to install: pip install 'out/wheel/specextend-0.1.0-py3-none-any.whl[cpu,documents]'
wheel:
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	rm -rf build out/wheel
	$(PY) -m pip wheel --quiet --no-deps --wheel-dir out/wheel .
	rm -rf build
	@ls out/wheel/*.whl

# One test process for each core, with one thread each.
test test-slow test-all: export HF_HUB_OFFLINE := 1
test test-slow test-all: export OMP_NUM_THREADS := 1
PYTEST := $(PY) -m pytest -n $(CPUS) --dist worksteal --durations 20 --durations-min 5
test: setup models
	$(PYTEST) -m 'not slow and not gpu'

test-slow: setup models
	$(PYTEST) -m 'slow and not gpu'

test-all: test test-slow

# The browser in which the page of a report is tested; without it those tests are skipped. Only root can install it.
chromium:
	@command -v chromium >/dev/null || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null || \
		{ apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; }

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# The site of the documentation: open out/site/index.html, also without a network or a server.
docs: setup
	$(PY) -m sphinx --fail-on-warning --quiet -c docs/site -d out/site-doctrees . out/site

bench: setup models
	mkdir -p out
	$(PY) jobs/bench.py benchmarks/compare.yaml --json out/compare.json
