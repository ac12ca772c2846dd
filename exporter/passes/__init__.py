"""Passes over an ONNX graph: each takes a model, changes it in place and says what it did."""
