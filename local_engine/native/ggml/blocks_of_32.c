/* Products of weights in blocks of 32: Q4_0, Q5_0 and Q8_0. */

#include "product.h"

PANELS(Q8_0)
PRODUCT(updraft_q4_0, Q4_0, Q8_0)
PRODUCT(updraft_q5_0, Q5_0, Q8_0)
PRODUCT(updraft_q8_0, Q8_0, Q8_0)
