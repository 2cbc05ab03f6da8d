// Sixteen floats at a time: loading, storing and rounding fp32 and bf16, e^x, sums.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))

typedef int64_t i64;

// So many multiply-adds are worth other threads. Fewer are done before those have come, and on a busy machine one would
// wait for them until they get a core.
static const i64 SHARED = 1 << 18;
typedef float v16 __attribute__((vector_size(64), aligned(4), may_alias));
// Half as many, where sixteen take two registers: a loop that keeps more sums than there are registers writes them to
// memory in every round.
typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t i16v __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t u16v __attribute__((vector_size(64), aligned(4), may_alias));

// What one register holds. Comparisons of more lanes than that go through memory.
#ifdef __AVX512F__
typedef v16 Floats;
typedef i16v Ints;
#else
typedef v8 Floats;
typedef int32_t Ints __attribute__((vector_size(32), aligned(4), may_alias));
#endif
const i64 LANES = sizeof(Ints) / 4;

struct bf16 {
    uint16_t bits;
};

static inline float load(const float* p) { return *p; }
static inline float load(const bf16* p) {
    uint32_t wide = uint32_t(p->bits) << 16;
    float out;
    memcpy(&out, &wide, 4);
    return out;
}
static inline void store(float* p, float x) { *p = x; }
static inline void store(bf16* p, float x) {  // round to nearest even; NaN stays NaN
    uint32_t u;
    memcpy(&u, &x, 4);
    uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    p->bits = uint16_t((u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 0x40u : rounded);
}

typedef uint16_t h16 __attribute__((vector_size(32), aligned(2), may_alias));

static inline v16 splat(float x) { return x - v16{}; }  // x + 0 would cost an addition, because it changes -0
static inline v16 load16(const float* p) { return *(const v16*)p; }
static inline void store16(float* p, v16 x) { *(v16*)p = x; }
#if defined(__AVX2__) && !defined(__AVX512F__)
// Written out: the compiler makes many more instructions of a conversion of sixteen numbers in two registers.
static ALWAYS_INLINE v8 half(const bf16* p) {
    return (v8)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
}
static ALWAYS_INLINE v16 load16(const bf16* p) {
    v8 both[2] = {half(p), half(p + 8)};
    return *(const v16*)both;
}
static ALWAYS_INLINE void store16(bf16* p, v16 x) {
    typedef uint32_t u8v __attribute__((vector_size(32)));
    v8 both[2];
    memcpy(both, &x, 64);
    __m256i found[2];
    for (int i = 0; i < 2; i++) {
        u8v u = (u8v)both[i], near = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16, nan = (u >> 16) | 0x40u;
        found[i] = (__m256i)(both[i] == both[i] ? near : nan);
    }
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(_mm256_packus_epi32(found[0], found[1]), 0xd8));
}
#else
static inline v16 load16(const bf16* p) { return (v16)(__builtin_convertvector(*(const h16*)p, u16v) << 16); }
static inline void store16(bf16* p, v16 x) {
    u16v u = (u16v)x;
    u16v near = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16, nan = (u >> 16) | 0x40u;
    *(h16*)p = __builtin_convertvector(x == x ? near : nan, h16);
}
static inline v8 half(const bf16* p) {
    typedef uint16_t h8 __attribute__((vector_size(16), aligned(2), may_alias));
    typedef uint32_t u8v __attribute__((vector_size(32)));
    return (v8)(__builtin_convertvector(*(const h8*)p, u8v) << 16);
}
#endif
// The first n of 16 elements; the others read as `fill` and are not written.
template <class T>
static inline v16 load16(const T* p, i64 n, float fill = 0.0f) {
    if (n >= 16) return load16(p);
    float out[16];
    for (i64 i = 0; i < 16; i++) out[i] = i < n ? load(p + i) : fill;
    return *(const v16*)out;
}
template <class T>
static inline void store16(T* p, v16 x, i64 n) {
    if (n >= 16) return store16(p, x);
    for (i64 i = 0; i < n; i++) store(p + i, x[i]);
}
static inline v16 rounded16(v16 x, const float*) { return x; }
static inline v16 rounded16(v16 x, const bf16*) {
    bf16 t[16];
    store16(t, x);
    return load16(t);
}
static inline float hsum(v16 x) {
    float s[16];
    memcpy(s, &x, 64);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) s[i] += s[i + width];
    return s[0];
}
static inline v16& at(float* p) { return *(v16*)p; }
static inline const v16& at(const float* p) { return *(const v16*)p; }
static inline v8& half(float* p) { return *(v8*)p; }
static inline const v8& half(const float* p) { return *(const v8*)p; }
static inline i64 up16(i64 n) { return (n + 15) / 16 * 16; }

// Working memory that is written before it is read: zeroing it would take as long as a small product. It begins at a line
// of cache, because reading sixteen floats across two lines takes twice as long.
struct Release {
    void operator()(void* memory) const { free(memory); }
};
template <class T>
using Memory = std::unique_ptr<T[], Release>;
template <class T>
static inline Memory<T> memory(i64 n) {
    void* found = aligned_alloc(64, (std::max<i64>(1, n) * sizeof(T) + 63) / 64 * 64);
    if (!found) throw std::bad_alloc();
    return Memory<T>((T*)found);
}
static inline Memory<float> floats(i64 n) { return memory<float>(n); }
// A vector of zeros that begins at a line of cache.
template <class T>
struct Aligned {
    typedef T value_type;
    Aligned() = default;
    template <class U>
    Aligned(const Aligned<U>&) {}
    T* allocate(size_t n) { return memory<T>(n).release(); }
    void deallocate(T* p, size_t) { free(p); }
    bool operator==(const Aligned&) const { return true; }
    bool operator!=(const Aligned&) const { return false; }
};
typedef std::vector<float, Aligned<float>> Zeros;

// e^x as 2^n * polynomial on [-ln2/2, ln2/2], relative error below 2e-7; 0 below -87, infinity above 88, NaN of a
// NaN. V are lanes of floats, I as many of integers.
template <class V, class I>
static ALWAYS_INLINE V exp_lanes(V x) {
    V low = V{} - 87.0f, high = V{} + 88.0f;
    I tiny = x < low, fits = x <= high;
    x = x < low ? low : x;
    x = x > high ? high : x;
    V t = x * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to the nearest integer
    V n = t - 12582912.0f;
    V r = x - n * 0.693359375f + n * 2.12194440e-4f;
    V p = V{} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    I exponent = (I)t << 23;  // the integer sits in the low mantissa bits of t
    V out = (V)((I)p + exponent);
    return tiny ? V{} : fits ? out : x * INFINITY;
}
static inline v16 exp16(v16 x) {
    Floats parts[16 / LANES];
    memcpy(parts, &x, 64);
    for (int i = 0; i < 16 / LANES; i++) parts[i] = exp_lanes<Floats, Ints>(parts[i]);
    memcpy(&x, parts, 64);
    return x;
}

template <class T>
static inline void widen(const T* p, float* out, i64 n, i64 padded) {
    i64 i = 0;
    for (; i + 16 <= n; i += 16) at(out + i) = load16(p + i);
    for (; i < padded; i += 16) at(out + i) = load16(p + i, n - i);
}

static inline float dot(const float* a, const float* b, i64 padded) {
    v16 sum = {};
    for (i64 i = 0; i < padded; i += 16) sum += at(a + i) * at(b + i);
    return hsum(sum);
}

// Lane i of the result is the sum over the lanes of x[i].
#if defined(__AVX2__) && !defined(__AVX512F__)
static ALWAYS_INLINE __m256 hsum8(const v16* x) {
    __m256 y[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) y[i] = _mm256_loadu_ps((const float*)(x + i)) + _mm256_loadu_ps((const float*)(x + i) + 8);
    __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(y[0], y[1]), _mm256_hadd_ps(y[2], y[3]));
    __m256 high = _mm256_hadd_ps(_mm256_hadd_ps(y[4], y[5]), _mm256_hadd_ps(y[6], y[7]));
    return _mm256_permute2f128_ps(low, high, 0x20) + _mm256_permute2f128_ps(low, high, 0x31);
}
static ALWAYS_INLINE v16 hsum16(const v16* x) {
    float sums[16];
    _mm256_storeu_ps(sums, hsum8(x));
    _mm256_storeu_ps(sums + 8, hsum8(x + 8));
    return *(const v16*)sums;
}
#else
// 16 x 16 transposition in registers: four rounds of exchanging halves, quarters, pairs, single lanes.
static inline void transpose16(v16* x) {
    const i16v l8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
    const i16v l4 = {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27};
    const i16v l2 = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
    const i16v l1 = {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30};
#define EXCHANGE(step, low)                                         \
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) if (!(i & step)) { \
        v16 a = x[i], b = x[i + step];                              \
        x[i] = __builtin_shuffle(a, b, low);                        \
        x[i + step] = __builtin_shuffle(a, b, low + step);          \
    }
    EXCHANGE(8, l8) EXCHANGE(4, l4) EXCHANGE(2, l2) EXCHANGE(1, l1)
#undef EXCHANGE
}

#define HALVES(a, b, low, high) (__builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high))

static ALWAYS_INLINE v16 hsum16(const v16* x) {
    const i16v l8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
    const i16v l4 = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
    const i16v l2 = {0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29};
    const i16v l1 = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    v16 y[8], z[4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) y[i] = HALVES(x[2 * i], x[2 * i + 1], l8, l8 + 8);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) z[i] = HALVES(y[2 * i], y[2 * i + 1], l4, l4 + 4);
    v16 u = HALVES(z[0], z[1], l2, l2 + 2), v = HALVES(z[2], z[3], l2, l2 + 2);
    return HALVES(u, v, l1, l1 + 1);
}
#endif

// A row of a cache in int8: `values` integers, `rest` elements as they are, and the scale of the integers (fp32).
// glm5/ops/cache_rows.py has the same layout.
template <class T>
static inline i64 packed_bytes(i64 values, i64 rest) {
    return values + rest * i64(sizeof(T)) + 4;
}

// Such a row as numbers, `padded` of them with zeros.
template <class T>
static inline void unpack_row(const char* row, i64 values, i64 rest, float* out, i64 padded) {
    float scale;
    memcpy(&scale, row + values + rest * i64(sizeof(T)), 4);
    i64 i = 0;
    for (; i + 16 <= values; i += 16) {
#ifdef __AVX2__
        for (int half = 0; half < 2; half++) {
            __m256i wide = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(row + i + 8 * half)));
            _mm256_storeu_ps(out + i + 8 * half, _mm256_mul_ps(_mm256_cvtepi32_ps(wide), _mm256_set1_ps(scale)));
        }
#else
        for (i64 k = i; k < i + 16; k++) out[k] = float(int8_t(row[k])) * scale;
#endif
    }
    for (; i < values; i++) out[i] = float(int8_t(row[i])) * scale;
    for (i64 k = 0; k < rest; k++) {
        T one;
        memcpy(&one, row + values + k * i64(sizeof(T)), sizeof(T));
        out[values + k] = load(&one);
    }
    for (i = values + rest; i < padded; i++) out[i] = 0.0f;
}

// x [values + rest] as such a row. A row with NaN or infinity among its values becomes NaN.
template <class T>
static inline void pack_row(const T* x, i64 values, i64 rest, char* row) {
    float top = 0.0f;
    for (i64 i = 0; i < values; i++) {
        float size = std::fabs(load(x + i));
        top = size > top || size != size ? size : top;
    }
    float scale = top < INFINITY ? std::max(top / 127.0f, 1e-30f) : NAN;
    for (i64 i = 0; i < values; i++) row[i] = top < INFINITY ? int8_t(std::nearbyint(load(x + i) / scale)) : 0;
    memcpy(row + values, x + values, rest * sizeof(T));
    memcpy(row + values + rest * i64(sizeof(T)), &scale, 4);
}

// Rows of keys, `width` elements each. Query r of Q per batch entry reads its own sequence: without a table batch entry
// r / Q of data [B, size, width], with one the pages of sequence rows[r] (see glm5/ops/pages.py).
template <class T>
struct Lines {
    const T* data;
    const i64 *rows, *table;
    i64 per_row, shift, size, Q, width;
    i64 packed = 0;  // integers of a row in int8 (see `unpack_row`); 0: rows are plain

    i64 sequence(i64 r) const { return table ? rows[r] : r / Q; }
    i64 slot(i64 sequence, i64 s) const {
        i64 page = table ? table[sequence * per_row + (s >> shift)] : sequence;
        return page * size + (shift == 63 ? s : s & (size - 1));
    }
    i64 bytes() const { return packed ? packed_bytes<T>(packed, width - packed) : width * i64(sizeof(T)); }
    const char* place(i64 sequence, i64 s) const { return (const char*)data + slot(sequence, s) * bytes(); }
    // Token s of a sequence, if rows are plain. What follows it up to the end of its page (or of its batch entry) lies
    // behind it.
    const T* at(i64 sequence, i64 s) const { return data + slot(sequence, s) * width; }
    // Token s as numbers, `padded` of them with zeros.
    void read(i64 sequence, i64 s, float* out, i64 padded) const {
        if (packed)
            unpack_row<T>(place(sequence, s), packed, width - packed, out, padded);
        else
            widen(at(sequence, s), out, width, padded);
    }
};
