"""Bundle -> ONNX -> TensorRT."""
