"""Layer 4: learned difficulty: features, training, calibration and ONNX inference."""
