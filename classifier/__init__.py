"""Learned difficulty: features, training, calibration and ONNX inference."""
