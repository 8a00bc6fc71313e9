"""The numbers of `noise`, without torch. Kernels are compiled with the same numbers."""

MAX_NOISE = 22.88  # above −ln(2⁻³³)
MIN_NOISE = -3.14  # below −ln(33 ln 2)

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
LN2_HIGH = 0.693359375
LN2_LOW = -2.12194440e-4
SQRT_HALF_BITS = 0x3F3504F3  # float32 √½
ONE_BITS = 0x3F800000
