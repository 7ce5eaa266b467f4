# Two commands do everything on a machine with python3 (3.10 or newer) and make: `make demo` and `make test`.

BIN := .venv/bin

.PHONY: demo test test-older-transformers vllm test-vllm check docs format bench bench-vllm setup clean

demo: ## Index a corpus, ask three questions, compare full prefill with reuse
	@scripts/setup.sh run
	@$(BIN)/kvboost-rag demo

test: ## The whole test suite, offline
	@scripts/setup.sh dev
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

test-older-transformers: ## A few promises on the last transformers that calls the cache `past_key_values`
	@scripts/setup.sh dev
	$(BIN)/python -m pip install -q --no-deps --target build/transformers-5.23 "transformers==5.23.*"
	PYTHONPATH=build/transformers-5.23 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q tests/test_older_transformers.py \
		tests/test_promises.py -k "older or from_disk or sliding or (full_repair and (llama or gemma3))"

vllm: ## Only make .venv-vllm: vLLM and the connector (about 2 GB)
	@scripts/setup_vllm.sh

test-vllm: ## The connector's tests, in vLLM's own environment
	@scripts/test_vllm.sh $(PYTEST_ARGS)

check: ## Linter, formatter and types
	@scripts/setup.sh dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: ## The documentation as a site, in build/site; any broken link or name is an error
	@scripts/setup.sh dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

format: ## Apply what `check` asks for, where it can be applied
	@scripts/setup.sh dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: ## Speed and quality, and the pages about them. BENCH_ARGS=--quick for a look (under 15 minutes)
	@scripts/setup.sh dev
	$(BIN)/python benchmarks/run_all.py $(BENCH_ARGS)

bench-vllm: ## vLLM with prefix caching, and with the connector, on the same prompts
	@scripts/setup.sh dev
	@scripts/bench_vllm.sh

setup: ## Only make .venv with everything
	@scripts/setup.sh dev

clean: ## Remove .venv and what the tools left
	rm -rf .venv .venv-vllm build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
