// What is done to a row of activations: normalised and quantised, gated, added.

#ifdef GATED
// GATED(gate, up) of 32 columns of rows [gate, up]: as floats, or as a quantised record.
kernel void gate_rows(global const float *both, global float *out, global int *quantized, int planes, int columns)
{
    int i = get_global_id(0) * BLOCK, room = columns - i;
    long at = get_global_id(1) * (long)columns + i;
    global const float *gate = both + get_global_id(1) * 2L * columns + i, *up = gate + columns;
    float16 left = GATED(load_upto(gate, room), load_upto(up, room));
    float16 right = GATED(load_upto(gate + 16, room - 16), load_upto(up + 16, room - 16));
    if (quantized) {
        quantize_block(left, right, planes, quantized + at / BLOCK * RECORD_INTS(planes));
        return;
    }
    store_upto(out + at, room, left);
    store_upto(out + at + 16, room - 16, right);
}
#endif

// x × weight / rms(x) as records of activations; x itself where there is no weight. Of the rows at `indices`, if given.
// A form is the number of int8 planes; 0 keeps floats, padded to a multiple of 8.
kernel void normalize_rows(
    global const float *x, global const float *weight, global int *out, global const long *indices, int features,
    float eps, int form)
{
    int token = get_global_id(1), first = get_global_id(0), step = get_global_size(0);
    x += (indices ? indices[token] : token) * features;
    float factor = weight ? inverse_rms(x, features, eps) : 1.0f;
    if (form == 0) {
        int padded = (features + 7) / 8 * 8;
        for (int i = first; i < padded; i += step) {
            float value = i < features ? x[i] : 0.0f;
            out[token * (long)padded + i] = as_int(weight && i < features ? value * factor * weight[i] : value);
        }
        return;
    }
    int records = features / BLOCK;
    for (int i = first; i < records; i += step) {
        float16 left = vload16(2 * i, x), right = vload16(2 * i + 1, x);
        if (weight) {
            left = left * factor * vload16(2 * i, weight);
            right = right * factor * vload16(2 * i + 1, weight);
        }
        quantize_block(left, right, form, out + (token * (long)records + i) * RECORD_INTS(form));
    }
}

// residual += y × weight / rms(y)
kernel void add_normalized(
    global float *residual, global const float *y, global const float *weight, int features, float eps)
{
    int step = get_global_size(0) * 16;
    residual += get_global_id(1) * (long)features;
    y += get_global_id(1) * (long)features;
    float factor = inverse_rms(y, features, eps);
    for (int i = get_global_id(0) * 16; i < features; i += step) {
        int room = features - i;
        float16 normed = load_upto(y + i, room) * factor * load_upto(weight + i, room);
        store_upto(residual + i, room, load_upto(residual + i, room) + normed);
    }
}
