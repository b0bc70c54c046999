"""Export of bundles to ONNX and TensorRT."""
