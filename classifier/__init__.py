"""Layer 4: the classifier that the routing gates use: features, training, calibration and ONNX inference."""
