"""Runtimes of a denoiser: torch, ONNX Runtime, OpenVINO, TensorRT, distributed; each is a `guidance.Denoiser`."""
