"""Layer 4: learned difficulty: features, training, calibration, ONNX inference."""
