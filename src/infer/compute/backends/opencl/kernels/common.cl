// Curves, norms and quantised activations: the formulas of `backends.cpu`, in the same order. A vector of 16 floats there
// is 16 work items here, or a loop. All kernels run in work groups of ITEMS.
#pragma OPENCL FP_CONTRACT OFF

#define KERNEL kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void
#define BLOCK 32  // inputs of a record of quantised activations
#define LANES 16  // rows of a packed group, positions of a cached block, chains of a sum
#define RECORD_INTS(planes) (10 * (planes) + ((planes) == 1 ? 2 : 0))
#define ROUNDER 12582912.0f  // adding 1.5 × 2²³ leaves the nearest integer (ties to even) in the low bits

inline float fused(float x, float y, float z)
{
#if defined(__clang__) && defined(__FMA__)  // PoCL calls its library for `fma`; this is one instruction
#pragma OPENCL FP_CONTRACT ON
    return x * y + z;
#else
    return fma(x, y, z);
#endif
}

inline float half_of(global const uchar *at, int i)
{
#if defined(__clang__) && defined(__F16C__)  // and for `vload_half`
    return __builtin_load_halff((global const half *)at + i);
#else
    return vload_half(i, (global const half *)at);
#endif
}

// Of LANES sums: the first half plus the second, until one is left.
inline float sum_of(local const float *sums)
{
    float folded[LANES / 2];
    for (int i = 0; i < LANES / 2; i++)
        folded[i] = sums[i] + sums[i + LANES / 2];
    for (int left = LANES / 4; left > 0; left /= 2)
        for (int i = 0; i < left; i++)
            folded[i] += folded[i + left];
    return folded[0];
}

// The larger; NaN if either is.
inline float larger(float x, float y)
{
    return x != x || x > y ? x : y;
}

inline int nearest(float x)
{
    return as_int(x + ROUNDER) - 0x4B400000;
}

// x^n × first coefficient + … + last one, by Horner's rule.
inline float polynomial(constant float *coefficients, int n, float x)
{
    float p = coefficients[0];
    for (int i = 1; i <= n; i++)
        p = fused(p, x, coefficients[i]);
    return p;
}

constant float exp_near[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                             5.0000001201e-1f};
constant float tanh_near[] = {-5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f,
                              -3.33332819422e-1f};
constant float erf_near[] = {-5.96761703e-4f, 4.99119423e-3f, -2.67681349e-2f, 1.12819925e-1f, -3.76125336e-1f,
                             1.28379166e-1f};
constant float erf_far[] = {-1.72853470e-5f, 3.83197126e-4f, -3.88396438e-3f, 2.42546219e-2f, -1.06777877e-1f,
                            -6.34846687e-1f, -1.28717512e-1f};

// e^x to 2 ulp where x ≤ 88: 2^n p(r), r = x − n ln 2 (Cephes' polynomial); 0 below −87.3; a NaN stays one.
inline float exp_below_88(float x)
{
    float low = -87.33654f, bounded = x < low ? low : x;
    float shifted = bounded * 1.44269504088896341f + ROUNDER, n = shifted - ROUNDER;
    float r = fused(n, -0.693359375f, bounded);
    r = fused(n, 2.12194440e-4f, r);
    float p = fused(polynomial(exp_near, 5, r), r * r, r) + 1.0f;
    return x < low ? 0.0f : as_float(as_int(p) + ((as_int(shifted) - 0x4B400000) << 23));
}

// The same, above 88.3 as at 88.3.
inline float exp_of(float x)
{
    return exp_below_88(x > 88.37626f ? 88.37626f : x);
}

// To 3 ulp: an odd polynomial where |x| < 0.625 (Cephes'), else 1 − 2 / (e^2|x| + 1) with x's sign.
inline float tanh_of(float x)
{
    float size = fabs(x), square = x * x;
    if (!(size >= 0.625f))
        return fused(polynomial(tanh_near, 4, square) * square, x, x);
    float far = 1.0f - 2.0f / (exp_of(size + size) + 1.0f);
    return x < 0.0f ? -far : far;
}

// To 2 ulp: an odd polynomial where |x| < 0.927734375, else 1 − e^p(|x|) with x's sign (N. Juffa's minimax).
inline float erf_of(float x)
{
    float size = fabs(x), bounded = size < 4.0f ? size : 4.0f;
    if (!(size >= 0.927734375f))
        return fused(polynomial(erf_near, 5, x * x), x, x);
    float far = 1.0f - exp_of(fused(polynomial(erf_far, 6, bounded), bounded, -bounded));
    return x < 0.0f ? -far : far;
}

inline float sigmoid(float x)
{
    return 1.0f / (1.0f + exp_of(0.0f - x));
}

inline float silu(float x)
{
    return x * sigmoid(x);
}

// x / 2 × (1 + tanh u) = x × sigmoid(2 u), u = sqrt(2 / π) (x + 0.044715 x³)
inline float gelu_tanh(float x)
{
    float cube = x * x * x * 0.044715f;
    return x * sigmoid((x + cube) * 1.5957691216057308f);
}

inline float gelu(float x)
{
    return x * 0.5f * (1.0f + erf_of(x * 0.7071067811865476f));
}

inline float gelu_sigmoid(float x)
{
    return x * sigmoid(x * 1.702f);
}

inline float relu(float x)
{
    return larger(x, 0.0f);
}

inline float relu_squared(float x)
{
    return relu(x) * relu(x);
}

inline float softcapped(float x, float cap)
{
    return cap * tanh_of(x / cap);
}

// 1 / sqrt(mean(x²) + eps), by a work group that calls it once. `sums` has LANES floats.
inline float inverse_rms(global const float *x, int features, float eps, local float *sums)
{
    int lane = get_local_id(0), whole = features / LANES * LANES;
    if (lane < LANES) {
        float sum = 0.0f;
        for (int i = lane; i < whole; i += LANES)
            sum = fused(x[i], x[i], sum);
        sums[lane] = sum;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    float total = sum_of(sums);
    for (int i = whole; i < features; i++)
        total += x[i] * x[i];
    return 1.0f / sqrt(total / (float)features + eps);
}

// 32 values as a record: [hi × 32] scale, scale × ΣA [lo × 32] −ΣA of each half, where A = 256 hi + lo and a = scale × A.
// With one plane A = hi.
inline void quantize_block(const float *x, int planes, global int *record)
{
    global char *high = (global char *)record, *low = (global char *)(record + 10);
    int bits = 0, sums[2] = {0, 0};  // bits are in the order of |x|, NaN above all
    for (int i = 0; i < BLOCK; i++)
        bits = bits > (as_int(x[i]) & 0x7FFFFFFF) ? bits : as_int(x[i]) & 0x7FFFFFFF;
    float unit = planes == 2 ? 32512.0f : 127.0f, largest = as_float(bits);
    largest = largest < 1e-33f ? 1e-33f : largest;
    float inverse = unit / largest, scale = largest / unit;
    for (int i = 0; i < BLOCK; i++) {
        int a = nearest(x[i] * inverse), top = planes == 2 ? (a + 128) >> 8 : a;
        high[i] = (char)top;
        if (planes == 2)
            low[i] = (char)(a - top * 256);
        sums[i / 16] += a;
    }
    record[8] = as_int(scale);
    record[9] = as_int(scale * (float)(sums[0] + sums[1]));
    record[RECORD_INTS(planes) - 2] = -sums[0];
    record[RECORD_INTS(planes) - 1] = -sums[1];
}
