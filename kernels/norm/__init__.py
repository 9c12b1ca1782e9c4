"""RMSNorm, alone, behind a residual addition and over heads."""
