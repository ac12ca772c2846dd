"""Live towers, ONNX models and engines side by side on the same calls; only a live tower's process imports torch."""
