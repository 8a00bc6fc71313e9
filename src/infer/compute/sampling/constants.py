"""The numbers of the sampler, without torch. Kernels are compiled with the same numbers.

`noise` computes noise in float32 and weights in float64: ln 2 is divided into a high and a low part for each.
"""

# Codes that replace the token of a failed row. `sampler.message_of` returns the message of a code.
NOT_A_NUMBER, NOTHING_ALLOWED = -1, -2

# Noise
MAX_NOISE = 22.88  # above −ln(2⁻³³)
LN2_HIGH_32 = 0.693359375
LN2_LOW_32 = -2.12194440e-4
SQRT_HALF_BITS = 0x3F3504F3  # float32 √½
ONE_BITS = 0x3F800000
# Cephes logf: ln(1 + f) = f − f²/2 + f³ P(f) for √½ ≤ 1 + f < √2, highest power first. Each rounds to float32.
LOG_COEFFICIENTS = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)

# Weights
WEIGHT_BITS = 42
LOG2_E = 1.4426950408889634
LN2_HIGH_64 = 0.693147180369123816490  # 33 bits: n × this is exact
LN2_LOW_64 = 1.90821492927058770002e-10
TAYLOR = tuple(
    1.0 / factorial
    for factorial in (39916800, 3628800, 362880, 40320, 5040, 720, 120, 24, 6, 2, 1, 1)  # 11! to 0!
)
ROUNDER = 1.5 * 2.0**52  # adding and subtracting it rounds to an integer, ties to even
LOWEST = -32.0  # below it a token weighs nothing: e⁻³² × 2⁴² is 0.06
