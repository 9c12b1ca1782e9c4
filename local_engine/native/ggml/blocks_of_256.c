/* Products of weights in blocks of 256: Q4_K, Q5_K and Q6_K. */

#include "product.h"

PANELS(Q4_K)
PANELS(Q6_K)
PRODUCT(updraft_q4_k, Q4_K, Q4_K)
PRODUCT(updraft_q5_k, Q5_K, Q4_K)
PRODUCT(updraft_q6_k, Q6_K, Q6_K)
