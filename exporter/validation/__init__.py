"""The gate: golden cases, the numbers measured on them, and the verdict. Nothing here imports torch."""
