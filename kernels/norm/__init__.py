"""RMSNorm, alone or after a residual addition."""
