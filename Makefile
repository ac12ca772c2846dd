# Every target does all that it needs on a fresh machine: environment, install, work.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[cpu,dev]"
	touch $@

demo: $(STAMP)  ## a real photo through PyTorch and ONNX Runtime; FULL=1 for the real size
	$(BIN)/python scripts/demo.py $(if $(FULL),--full)

test: $(STAMP)  ## everything that needs no GPU
	$(BIN)/python -m pytest -n 2 --dist worksteal -ra
	$(MAKE) lint

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build out *.egg-info .mypy_cache .ruff_cache
