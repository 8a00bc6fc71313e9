// Vectors of 16 floats, curves and quantised activations: the formulas of `backends.cpu`, in the same order.
#pragma OPENCL FP_CONTRACT OFF

#define BLOCK 32       // inputs of a record of quantised activations
#define RECORD_INTS(planes) (10 * (planes) + ((planes) == 1 ? 2 : 0))
#define LANE_NUMBERS ((int16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15))
#define ROUNDER 12582912.0f  // adding 1.5 × 2²³ leaves the nearest integer (ties to even) in the low bits

#define SUM_OF(name, type)           \
    inline type name(type##16 x)     \
    {                                \
        type##8 a = x.lo + x.hi;     \
        type##4 b = a.lo + a.hi;     \
        type##2 c = b.lo + b.hi;     \
        return c.x + c.y;            \
    }
SUM_OF(sum_of, float)
SUM_OF(sum_of_ints, int)

// The larger; NaN if either is.
inline float16 larger(float16 x, float16 y)
{
    return select(select(y, x, x > y), x, isnan(x));
}

inline float largest_of(float16 x)
{
    x = larger(x, x.s89abcdef01234567);
    x = larger(x, x.s456789abcdef0123);
    x = larger(x, x.s23456789abcdef01);
    return larger(x, x.s123456789abcdef0).s0;
}

inline int16 nearest(float16 x)
{
    return as_int16(x + ROUNDER) - 0x4B400000;
}

// x^n × first coefficient + … + last one, by Horner's rule.
inline float16 polynomial(constant float *coefficients, int n, float16 x)
{
    float16 p = coefficients[0];
    for (int i = 1; i <= n; i++)
        p = fma(p, x, (float16)coefficients[i]);
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
inline float16 exp16(float16 x)
{
    float16 low = -87.33654f;
    float16 bounded = select(x, low, x < low);
    float16 shifted = bounded * 1.44269504088896341f + ROUNDER;
    float16 n = shifted - ROUNDER;
    float16 r = fma(n, (float16)-0.693359375f, bounded);
    r = fma(n, (float16)2.12194440e-4f, r);
    float16 p = fma(polynomial(exp_near, 5, r), r * r, r) + 1.0f;
    float16 result = as_float16(as_int16(p) + ((as_int16(shifted) - 0x4B400000) << 23));
    return select(result, (float16)0.0f, x < low);
}

// The same, above 88.3 as at 88.3.
inline float16 exp_of(float16 x)
{
    return exp16(select(x, (float16)88.37626f, x > 88.37626f));
}

// To 3 ulp: an odd polynomial where |x| < 0.625 (Cephes'), else 1 − 2 / (e^2|x| + 1) with x's sign.
inline float16 tanh_of(float16 x)
{
    float16 size = fabs(x), square = x * x;
    float16 near = fma(polynomial(tanh_near, 4, square) * square, x, x);
    float16 far = 1.0f - 2.0f / (exp_of(size + size) + 1.0f);
    return select(near, select(far, -far, x < 0.0f), size >= 0.625f);
}

// To 2 ulp: an odd polynomial where |x| < 0.927734375, else 1 − e^p(|x|) with x's sign (N. Juffa's minimax).
inline float16 erf_of(float16 x)
{
    float16 size = fabs(x), bounded = select((float16)4.0f, size, size < 4.0f);
    float16 near = fma(polynomial(erf_near, 5, x * x), x, x);
    float16 far = 1.0f - exp_of(fma(polynomial(erf_far, 6, bounded), bounded, -bounded));
    return select(near, select(far, -far, x < 0.0f), size >= 0.927734375f);
}

inline float16 sigmoid(float16 x)
{
    return 1.0f / (1.0f + exp_of(0.0f - x));
}

inline float16 silu(float16 x)
{
    return x * sigmoid(x);
}

// x / 2 × (1 + tanh u) = x × sigmoid(2 u), u = sqrt(2 / π) (x + 0.044715 x³)
inline float16 gelu_tanh(float16 x)
{
    float16 cube = x * x * x * 0.044715f;
    return x * sigmoid((x + cube) * 1.5957691216057308f);
}

inline float16 gelu(float16 x)
{
    return x * 0.5f * (1.0f + erf_of(x * 0.7071067811865476f));
}

inline float16 gelu_sigmoid(float16 x)
{
    return x * sigmoid(x * 1.702f);
}

inline float16 relu(float16 x)
{
    return larger(x, (float16)0.0f);
}

inline float16 relu_squared(float16 x)
{
    return relu(x) * relu(x);
}

// activation(gate) × up
#define TIMES_UP(activation) inline float16 gated_##activation(float16 gate, float16 up) { return activation(gate) * up; }
TIMES_UP(silu)
TIMES_UP(gelu_tanh)
TIMES_UP(gelu)
TIMES_UP(gelu_sigmoid)
TIMES_UP(relu)
TIMES_UP(relu_squared)

// (up + 1) × gate × sigmoid(1.702 gate), with gate at most 7 and up between −7 and 7, as in gpt-oss
inline float16 gated_clamped_swiglu(float16 gate, float16 up)
{
    float16 limit = 7.0f;
    up = select(up, limit, up > limit);
    up = select(up, -limit, up < -limit);
    return (up + 1.0f) * gelu_sigmoid(select(gate, limit, gate > limit));
}

inline float16 softcapped(float16 x, float cap)
{
    return cap * tanh_of(x / cap);
}

// Up to 16 floats, 0 for those that are not there.
inline float16 load_upto(global const float *x, int room)
{
    if (room >= 16)
        return vload16(0, x);
    float values[16];
    for (int i = 0; i < 16; i++)
        values[i] = i < room ? x[i] : 0.0f;
    return vload16(0, values);
}

inline void store_upto(global float *x, int room, float16 values)
{
    if (room >= 16) {
        vstore16(values, 0, x);
        return;
    }
    float each[16];
    vstore16(values, 0, each);
    for (int i = 0; i < room; i++)
        x[i] = each[i];
}

// 1 / sqrt(mean(x²) + eps)
inline float inverse_rms(global const float *x, int features, float eps)
{
    float16 squares = 0.0f;
    int whole = features / 16 * 16;
    for (int i = 0; i < whole; i += 16) {
        float16 v = vload16(0, x + i);
        squares = fma(v, v, squares);
    }
    float total = sum_of(squares);
    for (int i = whole; i < features; i++)
        total += x[i] * x[i];
    return 1.0f / sqrt(total / (float)features + eps);
}

// 32 values as a record: [hi × 32] scale, scale × ΣA [lo × 32] −ΣA of each half, where A = 256 hi + lo and a = scale × A.
// With one plane A = hi.
inline void quantize_block(float16 first, float16 second, int planes, global int *record)
{
    float unit = planes == 2 ? 32512.0f : 127.0f;
    int16 bits = max(as_int16(first) & 0x7FFFFFFF, as_int16(second) & 0x7FFFFFFF);  // in the order of |x|, NaN above all
    int8 a = max(bits.lo, bits.hi);
    int4 b = max(a.lo, a.hi);
    float largest = as_float(max(max(b.x, b.y), max(b.z, b.w)));
    largest = largest < 1e-33f ? 1e-33f : largest;
    float inverse = unit / largest, scale = largest / unit;
    int16 left = nearest(first * inverse), right = nearest(second * inverse);
    int16 high_left = left, high_right = right;
    if (planes == 2) {
        high_left = (left + 128) >> 8;
        high_right = (right + 128) >> 8;
        vstore16(convert_char16(left - high_left * 256), 0, (global char *)(record + 10));
        vstore16(convert_char16(right - high_right * 256), 1, (global char *)(record + 10));
    }
    vstore16(convert_char16(high_left), 0, (global char *)record);
    vstore16(convert_char16(high_right), 1, (global char *)record);
    int sum_left = sum_of_ints(left), sum_right = sum_of_ints(right);
    record[8] = as_int(scale);
    record[9] = as_int(scale * (float)(sum_left + sum_right));
    record[RECORD_INTS(planes) - 2] = -sum_left;
    record[RECORD_INTS(planes) - 1] = -sum_right;
}
