// A packed weight (`backends.cpu.layouts` has the picture) × activations. The numbers of its layout are macros.
//
// A row's result is one chain of float operations over the records, whatever the number of tokens: `backends.cpu.matmul.vector_tiles`
// has it. On a CPU a work item has 16 rows as a vector; elsewhere one, and the 16 of a group are neighbours.

#if LANES == 16
typedef int16 ints;
typedef float16 floats;
#define LOAD_INTS(at) vload16(0, (global const int *)(at))
#define LOAD_HALVES(at) vload_half16(0, (global const half *)(at))
#define LOAD_FLOATS(at) vload16(0, (global const float *)(at))
#define LOAD_BYTES(at) convert_int16(vload16(0, (global const uchar *)(at)))
#define LOAD_CHARS(at) convert_int16(vload16(0, (global const char *)(at)))
#define LOAD_SHORTS(at) convert_uint16(vload16(0, (global const ushort *)(at)))
#define TO_FLOATS convert_float16
#define AS_FLOATS as_float16
#define AS_INTS as_int16
#define GROUP get_global_id(0)
#define CAPPED softcapped
#define LOAD_ROWS load_upto
#define STORE_ROWS store_upto
#else
typedef int ints;
typedef float floats;
#define LANE ((int)(get_global_id(0) % 16))
#define LOAD_INTS(at) ((global const int *)(at))[LANE]
#define LOAD_HALVES(at) vload_half(LANE, (global const half *)(at))
#define LOAD_FLOATS(at) ((global const float *)(at))[LANE]
#define LOAD_BYTES(at) (int)((global const uchar *)(at))[LANE]
#define LOAD_CHARS(at) (int)((global const char *)(at))[LANE]
#define LOAD_SHORTS(at) (uint)((global const ushort *)(at))[LANE]
#define TO_FLOATS (float)
#define AS_FLOATS as_float
#define AS_INTS as_int
#define GROUP (get_global_id(0) / 16)
#define CAPPED(x, cap) softcapped((float16)(x), cap).s0
#define LOAD_ROWS(at, room) (at)[min(LANE, (room) - 1)]
#define STORE_ROWS(at, room, x) \
    if (LANE < (room))          \
        (at)[LANE] = x
#endif

#ifdef IS_FLOAT

#define ACTIVATION_INTS 8  // of a record: 8 floats

inline floats load_weights(global const uchar *at)
{
#if LOW_BITS == 32
    return LOAD_FLOATS(at);
#elif defined(IS_BF16)
    return AS_FLOATS(LOAD_SHORTS(at) << 16);
#else
    return LOAD_HALVES(at);
#endif
}

// Even and odd inputs in a chain each, added at the end.
inline void multiply_group(global const uchar *weights, global const int *const *tokens, int records, floats *sums)
{
    floats odd[TOKENS];
    for (int t = 0; t < TOKENS; t++)
        sums[t] = odd[t] = 0.0f;
    for (int record = 0; record < records; record++, weights += RECORD_BYTES)
        for (int i = 0; i < 8; i += 2) {
            floats first = load_weights(weights + i * 2 * LOW_BITS), second = load_weights(weights + (i + 1) * 2 * LOW_BITS);
            for (int t = 0; t < TOKENS; t++) {
                sums[t] = fma(first, (floats)as_float(tokens[t][8 * record + i]), sums[t]);
                odd[t] = fma(second, (floats)as_float(tokens[t][8 * record + i + 1]), odd[t]);
            }
        }
    for (int t = 0; t < TOKENS; t++)
        sums[t] += odd[t];
}

#else

#define ACTIVATION_INTS RECORD_INTS(PLANES)
#define AHEAD 16384  // bytes: as `backends.cpu.weights.unpacking`

// sum + Σ of 4 products of unsigned bytes with signed ones, in each lane.
inline ints dot4(ints q, int a, ints sum)
{
#if LANES == 16 && defined(__AVX512VNNI__)
    return __builtin_ia32_vpdpbusd512(sum, q, (int16)a);
#else
    char4 each = as_char4(a);
    return sum + (q & 255) * each.x + (q >> 8 & 255) * each.y + (q >> 16 & 255) * each.z + (q >> 24 & 255) * each.w;
#endif
}

#ifdef CODES
constant uchar codes[16] = CODES;

inline ints look_up(ints q)
{
    union { ints all; uchar each[4 * LANES]; } bytes = {q};
    for (int i = 0; i < 4 * LANES; i++)
        bytes.each[i] = codes[bytes.each[i]];
    return bytes.all;
}
#endif

// A record of a super-block: where it lies, where the super-block does, and its number there.
typedef struct {
    global const uchar *at, *base;
    int index;
} Record;

inline Record record_of(global const uchar *base, int index)
{
    Record record = {base + SUPER_HEADER + index * RECORD_BYTES, base, index};
    return record;
}

// In its lowest four bits, what a super-block has for a row's record.
inline ints nibble_of(Record record)
{
    return LOAD_INTS(record.base + NIBBLES_AT) >> 4 * record.index;
}

#ifdef PATTERNS
constant uint patterns[] = PATTERNS;

// Pattern p of each row: a byte per code, codes 4 to 7 in the high nibbles.
inline ints pattern_of(Record record, int p)
{
    union { ints all; int each[LANES]; } words = {LOAD_INTS(record.at + 64 * (p / 4)) >> 8 * (p % 4) & 255};
#ifdef HAS_NUMBERS
    words.all |= (nibble_of(record) >> p & 1) << 8;
#endif
    for (int i = 0; i < LANES; i++)
        words.each[i] = patterns[words.each[i]];
    return words.all;
}
#endif

#ifdef HAS_TRITS
inline ints trits_of(Record record, int quad)
{
    int which = quad / 3, power = quad % 3 == 0 ? 1 : quad % 3 == 1 ? 3 : 9;
    ints rows = LOAD_BYTES(record.at + 96) << 16, rest = 0;
    rows |= AS_INTS(LOAD_SHORTS(record.at + 64));
    for (int i = 0; i < 4; i++)
        rest |= rows << 2 * i & 0x3F << 8 * i;
    ints code = which == 2 ? rest & 0x0F0F0F0F : LOAD_INTS(record.at) >> 4 * which & 0x0F0F0F0F | rest >> which & 0x10101010;
    union { ints all; uchar each[4 * LANES]; } bytes = {code};
    for (int i = 0; i < 4 * LANES; i++)
        bytes.each[i] = bytes.each[i] / power % 3;
    return bytes.all;
}
#endif

// Quad j of a record, 4 inputs of each row, as bytes that are stored as q + OFFSET ≥ 0.
inline ints quad_of(Record record, int quad)
{
#ifdef HAS_TRITS
    ints q = trits_of(record, quad);
#elif defined(PATTERNS)
    ints q = PATTERN_WIDTH == 4 ? pattern_of(record, quad) : pattern_of(record, quad / 2) >> 4 * (quad % 2) & 0x03030303;
#elif LOW_BITS == 8
    return LOAD_INTS(record.at + 64 * quad);
#elif LOW_BITS == 4
    ints q = LOAD_INTS(record.at + 64 * (quad % 4)) >> 4 * (quad / 4) & 0x0F0F0F0F;
#elif LOW_BITS == 2
    ints q = LOAD_INTS(record.at + 64 * (quad / 4)) >> 2 * (quad % 4) & 0x03030303;
#else
    ints q = LOAD_INTS(record.at) >> quad & 0x01010101;
#endif
#if HIGH_BITS
    int bit = HIGH_BITS == 1 ? quad : 2 * (quad % 4);
    ints high = LOAD_INTS(record.at + HIGH_AT + (HIGH_BITS == 1 ? 0 : 64 * (quad / 4)));
    high = bit < LOW_BITS ? high << (LOW_BITS - bit) : high >> (bit - LOW_BITS);
    q |= high & 0x01010101 * (((1 << HIGH_BITS) - 1) << LOW_BITS);
#endif
#ifdef HAS_DELTAS
    q |= -(nibble_of(record) >> quad / 2 & 1) & 0x04040404;
#endif
#ifdef CODES
    q = look_up(q);
#endif
#if LOW_BITS != 8
    return q;
#endif
}

// Scale or minimum of a part of a record, whose first is `offset` bytes after its start. `super` is its super-block's.
inline floats scale_of(Record record, int offset, int part, floats super)
{
    global const uchar *at = record.at + offset;
#if defined(HAS_EXPONENT)
    ints exponent = LOAD_BYTES(at);  // 2^(e − 128): the two least are subnormal
    ints least = (ints)0x00200000 << (exponent & 1);
    return AS_FLOATS(exponent < 2 ? least : (exponent - 1) << 23);
#elif RECORDS_PER_SUPER == 1
    return LOAD_HALVES(at + 32 * part);
#elif SCALES_PER_RECORD == 0
    return super;
#elif defined(HAS_SCALES)
    ints number = nibble_of(record), odd = (number & 7) * 2 + 1;
    return TO_FLOATS((number & 8) != 0 ? -odd : odd) * super;
#elif HAS_MINIMUM
    return TO_FLOATS(LOAD_BYTES(at + 16 * part)) * super;
#elif defined(HAS_NIBBLES)
    return TO_FLOATS((LOAD_BYTES(at) >> 4 * part & 15) * 2 + 1) * super;
#else
    return TO_FLOATS(LOAD_CHARS(at + 16 * part)) * super;
#endif
}

// With a = s × A:  Σ (d q + m) a  =  d s Σ q A  +  m s ΣA, where Σ q A is exact in integers.
inline void add_record(
    Record record, floats super, floats super_minimum, global const int *const *tokens, int at, floats *sums)
{
#if LANES == 16
    for (int i = 0; i < RECORD_BYTES; i += 64)
        prefetch(record.at + AHEAD + i, 64);
#endif
    ints dots[TOKENS][2][PLANES];
    for (int t = 0; t < TOKENS; t++)
        for (int i = 0; i < 2 * PLANES; i++)
            dots[t][i / PLANES][i % PLANES] = 0;
#pragma unroll
    for (int quad = 0; quad < 8; quad++) {
        ints q = quad_of(record, quad);
#pragma unroll
        for (int t = 0; t < TOKENS; t++)
#pragma unroll
            for (int plane = 0; plane < PLANES; plane++) {
                int part = PARTS == 2 ? quad / 4 : 0;
                dots[t][part][plane] = dot4(q, tokens[t][at + 10 * plane + quad], dots[t][part][plane]);
            }
    }
    floats scales[PARTS], minima[PARTS];
    for (int part = 0; part < PARTS; part++) {
        scales[part] = scale_of(record, SCALE_AT, part, super);
#if HAS_MINIMUM
        minima[part] = scale_of(record, MINIMUM_AT, part, super_minimum);
        minima[part] = RECORDS_PER_SUPER == 1 ? minima[part] : -minima[part];
#endif
    }
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        global const int *a = tokens[t] + at, *less = a + ACTIVATION_INTS - 2;
        float scale = as_float(a[8]);
        for (int part = 0; part < PARTS; part++) {
            ints dot = dots[t][part][PLANES - 1] + (PARTS == 2 ? less[part] : less[0] + less[1]) * OFFSET;
            if (PLANES == 2)
                dot += dots[t][part][0] * 256;
            sums[t] = fma(scales[part] * scale, TO_FLOATS(dot), sums[t]);
        }
#if HAS_MINIMUM
        for (int part = 0; part < PARTS; part++)
            sums[t] = fma(minima[part], (floats)(PARTS == 2 ? scale * (float)-less[part] : as_float(a[9])), sums[t]);
#endif
    }
}

inline void multiply_group(global const uchar *weights, global const int *const *tokens, int records, floats *sums)
{
    for (int t = 0; t < TOKENS; t++)
        sums[t] = 0.0f;
    for (int first = 0; first < records; first += RECORDS_PER_SUPER, weights += SUPER_BYTES) {
        floats super = 0.0f, super_minimum = 0.0f;
#if RECORDS_PER_SUPER > 1
        super = LOAD_HALVES(weights) * FACTOR;
        super_minimum = HAS_MINIMUM ? LOAD_HALVES(weights + 32) : super;
#endif
        for (int i = 0; i < RECORDS_PER_SUPER; i++)
            add_record(record_of(weights, i), super, super_minimum, tokens, (first + i) * ACTIVATION_INTS, sums);
    }
}

#endif

// out = y + bias (epilogue 0), or out += y + bias (1), or out = softcap × tanh((y + bias) / softcap) (2).
kernel void multiply(
    global const uchar *weights, global const int *activations, global float *out, global const float *bias,
    global const int *count, int records, int row_stride, int first_column, int num_columns, int epilogue, float softcap)
{
    global const int *tokens[TOKENS];
    floats sums[TOKENS];
    int first = get_global_id(1) * TOKENS, row = GROUP * 16, room = num_columns - row;
    for (int t = 0; t < TOKENS; t++)  // past the last token, the last
        tokens[t] = activations + (long)min(first + t, *count - 1) * records * ACTIVATION_INTS;
    multiply_group(weights + GROUP * (long)(records / RECORDS_PER_SUPER) * SUPER_BYTES, tokens, records, sums);
    for (int t = 0; t < TOKENS && first + t < *count; t++) {
        global float *to = out + (long)(first + t) * row_stride + first_column + row;
        floats y = sums[t];
        if (bias)
            y = y + LOAD_ROWS(bias + row, room);
        if (epilogue == 1)
            y = LOAD_ROWS(to, room) + y;
        STORE_ROWS(to, room, epilogue == 2 ? CAPPED(y, softcap) : y);
    }
}

#if LANES == 1
// Rows of the table, times factor: of 16 work items the one whose lane has the row writes 4 elements. A token outside
// the table counts as the nearest row in it.
kernel void embed(
    global const uchar *weights, global const long *tokens, global float *out, int rows, int features, int records,
    float factor)
{
    int row = (int)clamp(tokens[get_global_id(1)], 0L, rows - 1L), first = 4 * GROUP;
    if (row % 16 != LANE)
        return;
    global const uchar *group = weights + row / 16 * (long)(records / RECORDS_PER_SUPER) * SUPER_BYTES;
    out += get_global_id(1) * (long)features;
#ifdef IS_FLOAT
    for (int i = first; i < min(first + 4, features); i++)
        out[i] = load_weights(group + i * 2L * LOW_BITS) * factor;
#else
    global const uchar *base = group + first / BLOCK / RECORDS_PER_SUPER * (long)SUPER_BYTES;
    Record record = record_of(base, first / BLOCK % RECORDS_PER_SUPER);
    int part = PARTS == 2 ? first % BLOCK / 16 : 0, q = quad_of(record, first % BLOCK / 4);
    float super = RECORDS_PER_SUPER > 1 ? LOAD_HALVES(base) * FACTOR : 0.0f;
    float scale = scale_of(record, SCALE_AT, part, super), minimum = 0.0f;
#if HAS_MINIMUM
    minimum = scale_of(record, MINIMUM_AT, part, RECORDS_PER_SUPER > 1 ? LOAD_HALVES(base + 32) : 0.0f);
    minimum = RECORDS_PER_SUPER > 1 ? -minimum : minimum;
#endif
    for (int i = 0; i < 4; i++) {
        float value = scale * ((float)(q >> 8 * i & 255) - (float)OFFSET);
        out[first + i] = (HAS_MINIMUM ? value + minimum : value) * factor;
    }
#endif
}
#endif
