"""Runtimes of a denoiser: torch, ONNX Runtime, TensorRT, distributed. Each is a `sampling.guidance.Denoiser`."""
