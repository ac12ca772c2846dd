# Every target does all that it needs on a fresh machine: environment, install, work.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# torch_xla goes with one version of PyTorch, older than the one above
VENV_XLA ?= .venv-xla
STAMP_XLA := $(VENV_XLA)/.installed

.PHONY: demo test test-xla lint clean

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

$(STAMP_XLA): constraints-xla.txt
	$(PYTHON) -m venv $(VENV_XLA)
	$(VENV_XLA)/bin/python -m pip install --quiet --no-compile -r constraints-xla.txt
	touch $@

test-xla: $(STAMP_XLA)  ## the tower on a real XLA device, the CPU by default; needs 7 GB and, the first time, minutes
	PJRT_DEVICE=$${PJRT_DEVICE:-CPU} $(VENV_XLA)/bin/python -m pytest tests/xla -ra

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(VENV_XLA) build out *.egg-info .mypy_cache .ruff_cache
