// A packed weight (`backends.cpu.layouts` has the picture) × activations. The numbers of its layout are macros.
//
// A work item has a row, and the 16 rows of a group are neighbours. A row's result is one chain of float operations over
// the records, whatever the number of tokens: `backends.cpu.matmul.vector_tiles` has it.

#if IS_FLOAT

#define ACTIVATION_INTS BLOCK  // of a record: floats

// Input i of a row.
inline float weight_of(global const uchar *group, long i, int lane)
{
    long at = LANES * i + lane;
#if LOW_BITS == 32
    return ((global const float *)group)[at];
#elif IS_BF16  // pairs of inputs
    return as_float((uint)((global const ushort *)group)[LANES * (i & ~1L) + 2 * lane + (i & 1)] << 16);
#else
    return half_of(group, at);
#endif
}

// Even and odd inputs in a chain each, added at the end.
inline void multiply_row(
    global const uchar *group, int lane, global const int *const *tokens, int records, float *sums)
{
    float odd[TOKENS];
    for (int t = 0; t < TOKENS; t++)
        sums[t] = odd[t] = 0.0f;
    for (int i = 0; i < BLOCK * records; i += 2) {
        float first = weight_of(group, i, lane), second = weight_of(group, i + 1, lane);
        for (int t = 0; t < TOKENS; t++) {
            sums[t] = fused(first, as_float(tokens[t][i]), sums[t]);
            odd[t] = fused(second, as_float(tokens[t][i + 1]), odd[t]);
        }
    }
    for (int t = 0; t < TOKENS; t++)
        sums[t] += odd[t];
}

#else

#define ACTIVATION_INTS RECORD_INTS(PLANES)

// sum + Σ of 4 products of unsigned bytes with signed ones.
inline int dot4(int q, int a, int sum)
{
#ifdef __opencl_c_integer_dot_product_input_4x8bit_packed
    return sum + dot_4x8packed_us_int(as_uint(q), as_uint(a));
#else
    char4 each = as_char4(a);
    return sum + (q & 255) * each.x + (q >> 8 & 255) * each.y + (q >> 16 & 255) * each.z + (q >> 24 & 255) * each.w;
#endif
}

#ifdef CODES
constant uchar codes[16] = {CODES};
#endif

// Quad j of a row's record, 4 inputs, as bytes that are stored as q + OFFSET ≥ 0.
inline int quad_of(global const uchar *record, int quad, int lane)
{
    global const int *low = (global const int *)record + lane;
#if LOW_BITS == 8
    return low[LANES * quad];
#else
    int q = low[LANES * (quad % 4)] >> 4 * (quad / 4) & 0x0F0F0F0F;
#if HIGH_BITS == 1
    q |= (((global const int *)(record + HIGH_AT))[lane] >> quad & 0x01010101) << 4;
#elif HIGH_BITS == 2
    q |= (((global const int *)(record + HIGH_AT))[LANES * (quad / 4) + lane] >> 2 * (quad % 4) & 0x03030303) << 4;
#endif
#ifdef CODES
    q = codes[q & 15] | codes[q >> 8 & 15] << 8 | codes[q >> 16 & 15] << 16 | codes[q >> 24 & 15] << 24;
#endif
    return q;
#endif
}

// Scale or minimum of a part of a record. `super` is its super-block's.
inline float scale_of(global const uchar *at, int part, int lane, float super)
{
#if RECORDS_PER_SUPER == 1
    return half_of(at, lane);
#elif HAS_MINIMUM
    return (float)at[lane] * super;
#else
    return (float)((global const char *)at)[LANES * part + lane] * super;
#endif
}

inline float minimum_of(global const uchar *record, int lane, float super)
{
    float minimum = scale_of(record + MINIMUM_AT, 0, lane, super);
    return RECORDS_PER_SUPER == 1 ? minimum : -minimum;
}

// With a = s × A:  Σ (d q + m) a  =  d s Σ q A  +  m s ΣA, where Σ q A is exact in integers.
inline void add_record(
    global const uchar *record, int lane, float super, float super_minimum, global const int *const *tokens, int at,
    float *sums)
{
    int dots[TOKENS][PARTS][PLANES];
    for (int t = 0; t < TOKENS; t++)
        for (int i = 0; i < PARTS * PLANES; i++)
            dots[t][i / PLANES][i % PLANES] = 0;
#pragma unroll
    for (int quad = 0; quad < 8; quad++) {
        int q = quad_of(record, quad, lane), part = PARTS == 2 ? quad / 4 : 0;
#pragma unroll
        for (int t = 0; t < TOKENS; t++)
#pragma unroll
            for (int plane = 0; plane < PLANES; plane++)
                dots[t][part][plane] = dot4(q, tokens[t][at + 10 * plane + quad], dots[t][part][plane]);
    }
    float scales[PARTS];
    for (int part = 0; part < PARTS; part++)
        scales[part] = scale_of(record + SCALE_AT, part, lane, super);
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        global const int *a = tokens[t] + at, *less = a + ACTIVATION_INTS - 2;
        for (int part = 0; part < PARTS; part++) {
            int dot = dots[t][part][PLANES - 1] + (PARTS == 2 ? less[part] : less[0] + less[1]) * OFFSET;
            if (PLANES == 2)
                dot += dots[t][part][0] * 256;
            sums[t] = fused(scales[part] * as_float(a[8]), (float)dot, sums[t]);
        }
#if HAS_MINIMUM
        sums[t] = fused(minimum_of(record, lane, super_minimum), as_float(a[9]), sums[t]);
#endif
    }
}

// The two factors at the start of a super-block.
inline float2 supers_of(global const uchar *super_block, int lane)
{
#if RECORDS_PER_SUPER > 1
    return (float2)(half_of(super_block, lane), HAS_MINIMUM ? half_of(super_block + 2 * LANES, lane) : 0.0f);
#endif
    return (float2)(0.0f, 0.0f);
}

inline void multiply_row(
    global const uchar *group, int lane, global const int *const *tokens, int records, float *sums)
{
    for (int t = 0; t < TOKENS; t++)
        sums[t] = 0.0f;
    for (int first = 0; first < records; first += RECORDS_PER_SUPER, group += SUPER_BYTES) {
        float2 supers = supers_of(group, lane);
        for (int i = 0; i < RECORDS_PER_SUPER; i++) {
            global const uchar *record = group + SUPER_HEADER + i * RECORD_BYTES;
            add_record(record, lane, supers.x, supers.y, tokens, (first + i) * ACTIVATION_INTS, sums);
        }
    }
}

#endif

inline global const uchar *group_of(global const uchar *weights, int row, int records)
{
    return weights + row / LANES * (long)(records / RECORDS_PER_SUPER) * SUPER_BYTES;
}

// out = y + bias (epilogue 0), or out += y + bias (1), or out = softcap × tanh((y + bias) / softcap) (2).
KERNEL multiply(
    global const uchar *weights, global const int *activations, global float *out, global const float *bias,
    global const int *count, int records, int row_stride, int first_column, int rows, int epilogue, float softcap)
{
    global const int *tokens[TOKENS];
    float sums[TOKENS];
    int first = get_global_id(1) * TOKENS, row = get_global_id(0);
    if (row >= rows)
        return;
    for (int t = 0; t < TOKENS; t++)  // past the last token, the last
        tokens[t] = activations + (long)min(first + t, *count - 1) * records * ACTIVATION_INTS;
    multiply_row(group_of(weights, row, records), row % LANES, tokens, records, sums);
    for (int t = 0; t < TOKENS && first + t < *count; t++) {
        global float *to = out + (long)(first + t) * row_stride + first_column + row;
        float y = bias ? sums[t] + bias[row] : sums[t];
        *to = epilogue == 1 ? *to + y : epilogue == 2 ? softcapped(y, softcap) : y;
    }
}

// Rows of the table, times factor. A work item writes 4 elements. A token outside the table counts as the nearest row.
KERNEL embed(
    global const uchar *weights, global const long *tokens, global float *out, int rows, int features, int records,
    float factor)
{
    int row = (int)clamp(tokens[get_global_id(1)], 0L, rows - 1L), first = 4 * get_global_id(0), lane = row % LANES;
    global const uchar *group = group_of(weights, row, records);
    out += get_global_id(1) * (long)features;
    if (first >= features)
        return;
#if IS_FLOAT
    for (int i = first; i < min(first + 4, features); i++)
        out[i] = weight_of(group, i, lane) * factor;
#else
    int index = first / BLOCK, quad = first % BLOCK / 4;
    group += index / RECORDS_PER_SUPER * (long)SUPER_BYTES;
    global const uchar *record = group + SUPER_HEADER + index % RECORDS_PER_SUPER * RECORD_BYTES;
    float2 supers = supers_of(group, lane);
    float scale = scale_of(record + SCALE_AT, PARTS == 2 ? quad / 4 : 0, lane, supers.x);
    int q = quad_of(record, quad, lane);
    for (int i = 0; i < 4; i++) {
        float value = scale * ((float)(q >> 8 * i & 255) - (float)OFFSET);
        out[first + i] = (HAS_MINIMUM ? value + minimum_of(record, lane, supers.y) : value) * factor;
    }
#endif
}
