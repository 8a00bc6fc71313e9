// Before every program of a CPU whose compiler is clang: OpenCL's functions as operators that are compiled where they
// stand. PoCL calls them in its library, and each call spills all vectors that registers hold. Such a call is wrong too
// where the library is compiled for AVX-512 and the program is not (a Zen 4 is a Zen 3 for LLVM 14): 16 floats are passed
// in memory, and read as if they were in a register. So nothing of the library's may take vectors.
#pragma OPENCL FP_CONTRACT OFF

#ifdef __clang__
#pragma clang diagnostic ignored "-Wmacro-redefined"
#define OVERLOAD static __attribute__((always_inline, overloadable))
#define inline static inline __attribute__((always_inline))

#define select(no, yes, condition) ((condition) ? (yes) : (no))
#define isnan(x) ((x) != (x))
#define max(x, y) ((x) > (y) ? (x) : (y))
#define min(x, y) ((x) < (y) ? (x) : (y))
#define fabs(x) as_float16(as_int16(x) & 0x7FFFFFFF)
#define convert_float16(x) __builtin_convertvector(x, float16)
#define convert_int16(x) __builtin_convertvector(x, int16)
#define convert_uint16(x) __builtin_convertvector(x, uint16)
#define convert_char16(x) __builtin_convertvector(x, char16)
#define convert_uchar16(x) __builtin_convertvector(x, uchar16)
#ifndef __SPIR__
#define prefetch(at, count) __builtin_prefetch((const void *)(ulong)(at), 0, 2)
#endif

#define VECTORS(type, space)                                         \
    OVERLOAD type##16 load_vector(long index, space const type *at)  \
    {                                                                \
        return *(space const packed_##type *)(at + 16 * index);      \
    }                                                                \
    OVERLOAD void store_vector(type##16 x, long index, space type *at) \
    {                                                                \
        *(space packed_##type *)(at + 16 * index) = x;               \
    }
typedef float16 __attribute__((aligned(4))) packed_float;
typedef int16 __attribute__((aligned(4))) packed_int;
typedef short16 __attribute__((aligned(2))) packed_short;
typedef ushort16 __attribute__((aligned(2))) packed_ushort;
typedef char16 __attribute__((aligned(1))) packed_char;
typedef uchar16 __attribute__((aligned(1))) packed_uchar;
VECTORS(float, global)
VECTORS(float, private)
VECTORS(int, global)
VECTORS(int, private)
VECTORS(short, global)
VECTORS(ushort, global)
VECTORS(char, global)
VECTORS(uchar, global)
#define vload16 load_vector
#define vstore16 store_vector

#define CLAMPED(type, bound)                                  \
    OVERLOAD type clamped(type x, bound low, bound high)      \
    {                                                         \
        x = x < low ? (type)low : x;                          \
        return x > high ? (type)high : x;                     \
    }
CLAMPED(float16, float)
CLAMPED(long, long)
#define clamp clamped

#ifdef __FMA__
#define FUSED(type)                               \
    OVERLOAD type fused(type x, type y, type z)   \
    {                                             \
        _Pragma("OPENCL FP_CONTRACT ON")          \
        return x * y + z;                         \
    }
FUSED(float)
FUSED(float16)
#define fma fused
#endif

#ifdef __AVX512F__
#define vload_half16(index, at) \
    __builtin_ia32_vcvtph2ps512_mask(load_vector(index, (global const short *)(at)), (float16)0.0f, -1, 4)
#elif defined(__F16C__)
#define vload_half16(index, at) widened(load_vector(index, (global const short *)(at)))
OVERLOAD float16 widened(short16 x)
{
    return (float16)(__builtin_ia32_vcvtph2ps256(x.lo), __builtin_ia32_vcvtph2ps256(x.hi));
}
#endif
#endif
