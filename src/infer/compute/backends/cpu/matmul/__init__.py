"""A packed weight times activations, as compiled commands, and the vector instructions of each instruction set.

A row of Q4_K × a token's activations, file by file in `backends/cpu`:

    projections                        appends the commands: activations, product, what happens to each result
    activations                        x → activation records: normalised, quantised, in panels of 16 tokens
    layouts, weights/pack_kernels      at load: blocks of a file → groups of 16 rows. `layouts` draws a record
    matmul/matmul                      a thread takes units of rows, and multiplies each with every panel
    matmul/panels, isa                 a panel is cut into tiles of the instruction set's shapes
    matmul/vector_tiles                a tile, which it draws: the loop over records, and its sums
    matmul/pair_tiles                  a tile of BF16 weights × BF16 activations
    weights/unpacking, low_codes       a packed record → 8 vectors of 4 inputs × 16 rows, with scales and minima
    arithmetic, activation_record      the exact sum of integer products, by each instruction set
    prefetch, weight_streams           what is read ahead
    simd                               vectors of 16 lanes in Numba and LLVM
"""
