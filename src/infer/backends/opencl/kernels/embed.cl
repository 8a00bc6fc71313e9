// Rows of a packed table, times scale. A token outside the table counts as the nearest row in it.

#ifdef IS_FLOAT
inline float value_at(global const uchar *group, int i, int lane)
{
#if LOW_BITS == 32
    return ((global const float *)group)[16 * i + lane];
#elif defined(IS_BF16)
    return as_float((uint)((global const ushort *)group)[16 * i + lane] << 16);
#else
    return vload_half(16 * i + lane, (global const half *)group);
#endif
}
#else
#ifdef CODES
constant uchar codes[16] = CODES;
#endif

inline int integer_at(global const uchar *record, int quad, int byte)
{
#if LOW_BITS == 8
    return record[64 * quad + byte];
#elif LOW_BITS == 4
    int q = record[64 * (quad % 4) + byte] >> 4 * (quad / 4) & 15;
#else
    int q = record[64 * (quad / 4) + byte] >> 2 * (quad % 4) & 3;
#endif
#if HIGH_BITS
    int bit = HIGH_BITS == 1 ? quad : 2 * (quad % 4);
    int high = record[HIGH_AT + (HIGH_BITS == 1 ? 0 : 64 * (quad / 4)) + byte];
    q |= (high >> bit & ((1 << HIGH_BITS) - 1)) << LOW_BITS;
#endif
#ifdef CODES
    return codes[q];
#elif LOW_BITS != 8
    return q;
#endif
}

inline float scale_at(global const uchar *at, int part, int lane, global const uchar *super)
{
#if defined(HAS_EXPONENT)
    return as_float(at[lane] < 2 ? 0x00200000 << at[lane] : (at[lane] - 1) << 23);
#elif PER_SUPER == 1
    return vload_half(lane, (global const half *)at);
#else
    int index = 16 * (PARTS == 2 ? part : 0) + lane;
    int scale = HAS_MINIMUM ? (int)at[index] : (int)(char)at[index];
    return (float)scale * vload_half(lane, (global const half *)super);
#endif
}

inline float value_at(global const uchar *group, int i, int lane)
{
    global const uchar *base = group + i / BLOCK / PER_SUPER * (long)SUPER_BYTES;
    global const uchar *record = base + HEADER + i / BLOCK % PER_SUPER * RECORD_BYTES;
    int q = integer_at(record, i % BLOCK / 4, 4 * lane + i % 4), part = i % BLOCK / 16;
    float value = scale_at(record + SCALE_AT, part, lane, base) * ((float)q - (float)OFFSET);
#if HAS_MINIMUM
    float minimum = scale_at(record + MINIMUM_AT, part, lane, base + 32);
    value += PER_SUPER > 1 ? -minimum : minimum;
#endif
    return value;
}
#endif

kernel void embed(
    global const uchar *table, global const long *tokens, global float *out, int rows, int features, int records,
    float scale)
{
    int i = get_global_id(0), token = get_global_id(1);
    int row = (int)clamp(tokens[token], 0L, (long)rows - 1);
    global const uchar *group = table + row / 16 * (long)(records / PER_SUPER) * SUPER_BYTES;
    out[token * (long)features + i] = value_at(group, i, row % 16) * scale;
}
