"""Engines: built with TensorRT or TensorRT-RTX, and run."""
