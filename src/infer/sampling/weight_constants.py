"""The numbers of `integer_probs`, without torch. Kernels are compiled with the same numbers."""

WEIGHT_BITS = 42
LOG2_E = 1.4426950408889634
LN2_HIGH = 0.693147180369123816490  # 33 bits: n × this is exact
LN2_LOW = 1.90821492927058770002e-10
TAYLOR = tuple(
    1.0 / factorial
    for factorial in (39916800, 3628800, 362880, 40320, 5040, 720, 120, 24, 6, 2, 1, 1)  # 11! to 0!
)
ROUNDER = 1.5 * 2.0**52  # adding and subtracting it rounds to an integer, ties to even
LOWEST = -32.0  # below it a token weighs nothing: e⁻³² × 2⁴² is 0.06
