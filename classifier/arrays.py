"""Array types shared by the classifier."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
