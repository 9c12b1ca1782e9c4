"""`updraft bench live`: a real local model with a cloud that knows the answers, calibrated on half of 300 questions."""
