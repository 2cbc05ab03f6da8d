// Products of rows that are rounded to int8 with weights in 8 or 4 bits. Sums are exact 32-bit integers; a result is
// their product with the scales of row and channel, in fp32. Bits do not depend on the other rows of a batch.
#pragma once

#include "pool.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define VNNI
#endif

static const i64 GROUP = 128;  // columns whose sum `IntegerRow` has: scales of 4-bit weights are for multiples of them or all

// A row rounded to int8 [K], padded with zeros to a multiple of `GROUP`: x = scale * q. `bytes` are q + 128, `sums` those
// of q in each group of columns.
struct IntegerRow {
    const int8_t* q;
    const uint8_t* bytes;
    const int* sums;
    float scale;
};

// A matrix [N, K] in integers, 16 rows at a time as they are multiplied: of each, 4 columns lie side by side in 64 bytes
// [K / 4, 16, 4]. With 4 bits, 8 columns: the first four in the low halves of the bytes, as values + 8. N and K are padded
// with zeros to multiples of 16 and 4 (4 bits: K is a multiple of 8). scales [N / 16, groups, 16]; sums [N] of int8
// values. glm5/ops/integers.py makes them.
struct IntegerMatrix {
    const uint8_t* values;
    const float* scales;
    const int* sums;
    i64 bits, groups;

    static i64 line(i64 K, i64 bits) { return bits == 8 ? (K + 3) / 4 * 64 : K * 8; }  // bytes of 16 rows
    // The matrix from row n on, a multiple of 16.
    IntegerMatrix from(i64 n, i64 K) const {
        return {values + n / 16 * line(K, bits), scales + n * groups, sums ? sums + n : nullptr, bits, groups};
    }
};

// One row x [K] of elements E to int8.
template <class E>
static float round_row(const E* x, i64 K, i64 Kp, int8_t* q, uint8_t* bytes, int* sums) {
    v16 most = {};
    for (i64 i = 0; i < K; i += 16) {
        v16 size = (v16)((i16v)load16(x + i, K - i) & 0x7fffffff);
        most = size > most || size != size ? size : most;
    }
    float top = 0.0f;
    for (int i = 0; i < 16; i++) top = most[i] > top || most[i] != most[i] ? most[i] : top;
    // A division, not a product with 1 / 127: the quantisers in Python have the same bits.
    float scale = top < INFINITY ? std::max(top / 127.0f, 1e-30f) : NAN;
    typedef int8_t b16 __attribute__((vector_size(16), aligned(1), may_alias));
    i16v total = {};
    for (i64 i = 0; i < Kp; i += 16) {
        v16 value = i < K ? load16(x + i, K - i) / scale : v16{};
        i16v near = (i16v)(value + 12582912.0f) - 0x4b400000;  // adding 1.5 * 2^23 rounds to the nearest integer, even at half
        b16 few = __builtin_convertvector(near, b16);
        *(b16*)(q + i) = few, *(b16*)(bytes + i) = few ^ int8_t(-128);
        total += __builtin_convertvector(few, i16v);
        if ((i + 16) % GROUP) continue;
        int sum = 0;
        for (int k = 0; k < 16; k++) sum += total[k];
        sums[i / GROUP] = sum, total = i16v{};
    }
    return scale;
}

// Rounded copies of M rows [K].
class IntegerRows {
    Memory<int8_t> q_;
    Memory<uint8_t> bytes_;
    Memory<int> sums_;

  public:
    std::vector<IntegerRow> rows;

    // x(m) is the address of row m.
    template <class F>
    void round(const Team& team, const F& x, i64 M, i64 K) {
        i64 groups = (K + GROUP - 1) / GROUP, Kp = groups * GROUP;
        q_ = memory<int8_t>(M * Kp), bytes_ = memory<uint8_t>(M * Kp), sums_ = memory<int>(M * groups);
        rows.resize(M);
        team.each(M, 2 * K, [&](i64 m) {
            IntegerRow& row = rows[m];
            row = {&q_[m * Kp], &bytes_[m * Kp], &sums_[m * groups], 0.0f};
            row.scale = round_row(x(m), K, Kp, &q_[m * Kp], &bytes_[m * Kp], &sums_[m * groups]);
        });
    }
};

// Sums of products of integers, a lane for each of 16 / PARTS rows of w. multiply8 adds those of four columns of w from
// column k of x on, multiply4 those of eight. SHIFT is what was added to the numbers of x for multiply8.
#ifdef VNNI
typedef __m512i Sums;
const int PARTS = 1, SHIFT = 128, BLOCKS = 4;  // BLOCKS: of 16 rows of w, as many as there are registers for
static inline Sums no_sums() { return _mm512_setzero_si512(); }
static inline Sums fours(const void* x) {
    int32_t four;
    memcpy(&four, x, 4);
    return _mm512_set1_epi32(four);
}
static inline Sums line(const uint8_t* w) { return _mm512_loadu_si512(w); }
static ALWAYS_INLINE Sums multiply8(Sums acc, const IntegerRow& x, i64 k, Sums w) {
    return _mm512_dpbusd_epi32(acc, fours(x.bytes + k), w);
}
static ALWAYS_INLINE Sums multiply4(Sums acc, const IntegerRow& x, i64 k, Sums w) {
    Sums halves = _mm512_set1_epi8(15), low = _mm512_and_si512(w, halves);
    acc = _mm512_dpbusd_epi32(acc, low, fours(x.q + k));
    return _mm512_dpbusd_epi32(acc, _mm512_and_si512(_mm512_srli_epi16(w, 4), halves), fours(x.q + k + 4));
}
#elif defined(__AVX2__)
typedef __m256i Sums;
const int PARTS = 2, SHIFT = 0, BLOCKS = 1;
static inline Sums no_sums() { return _mm256_setzero_si256(); }
static inline Sums fours(const void* x) {
    int32_t four;
    memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
}
static inline Sums line(const uint8_t* w) { return _mm256_loadu_si256((const __m256i*)w); }
static inline Sums add_pairs(Sums acc, Sums pairs) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
static ALWAYS_INLINE Sums multiply8(Sums acc, const IntegerRow& x, i64 k, Sums w) {
    Sums signs = _mm256_sign_epi8(fours(x.q + k), w);  // a pair is at most 2 * 128 * 127, which 16 bits hold
    return add_pairs(acc, _mm256_maddubs_epi16(_mm256_abs_epi8(w), signs));
}
static ALWAYS_INLINE Sums multiply4(Sums acc, const IntegerRow& x, i64 k, Sums w) {
    Sums halves = _mm256_set1_epi8(15), low = _mm256_and_si256(w, halves);
    Sums high = _mm256_and_si256(_mm256_srli_epi16(w, 4), halves);
    return add_pairs(acc, _mm256_add_epi16(_mm256_maddubs_epi16(low, fours(x.q + k)),
                                           _mm256_maddubs_epi16(high, fours(x.q + k + 4))));
}
#else
typedef int32_t Sums __attribute__((vector_size(16), aligned(4), may_alias));
const int PARTS = 4, SHIFT = 0, BLOCKS = 1;
static inline Sums no_sums() { return Sums{}; }
static inline Sums line(const uint8_t* w) { return *(const Sums*)w; }
static ALWAYS_INLINE Sums multiply8(Sums acc, const IntegerRow& x, i64 k, Sums w) {
    for (int i = 0; i < 4; i++) acc += ((w << (24 - 8 * i)) >> 24) * x.q[k + i];
    return acc;
}
static ALWAYS_INLINE Sums multiply4(Sums acc, const IntegerRow& x, i64 k, Sums w) {
    for (int i = 0; i < 4; i++) acc += (w >> 8 * i & 15) * x.q[k + i] + (w >> (8 * i + 4) & 15) * x.q[k + 4 + i];
    return acc;
}
#endif

// found [R][B]: sums over columns first .. last - 1 of R rows and B blocks of 16 rows of w that lie `step` bytes apart.
// Few results are summed in several chains, because a product waits for the one before it. Memory from `next` on is asked
// for meanwhile.
template <int BITS, int R, int B>
static ALWAYS_INLINE void integer_dots(const IntegerRow* x, const uint8_t* w, i64 step, i64 first, i64 last, const char* next,
                                       i16v (&found)[R][B]) {
    constexpr int WIDE = BITS == 8 ? 4 : 8, REGISTERS = R * B * PARTS, P = B * PARTS;
    constexpr int CHAINS = REGISTERS >= 4 ? 1 : REGISTERS >= 2 ? 2 : 4;
    Sums acc[CHAINS][R][P];
    for (int c = 0; c < CHAINS; c++)
        for (int r = 0; r < R; r++)
            for (int p = 0; p < P; p++) acc[c][r][p] = no_sums();
    auto add = [&](i64 k, Sums(&to)[R][P]) __attribute__((always_inline)) {
        const uint8_t* at = w + k / WIDE * 64;
        if (next) __builtin_prefetch(next + k / WIDE * 64, 0, 2);
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) {
            Sums part = line(at + p / PARTS * step + p % PARTS * (64 / PARTS));
#pragma GCC unroll 4
            for (int r = 0; r < R; r++)
                to[r][p] = BITS == 8 ? multiply8(to[r][p], x[r], k, part) : multiply4(to[r][p], x[r], k, part);
        }
    };
    i64 k = first;
    for (; k + CHAINS * WIDE <= last; k += CHAINS * WIDE)
#pragma GCC unroll 4
        for (int c = 0; c < CHAINS; c++) add(k + c * WIDE, acc[c]);
    for (; k < last; k += WIDE) add(k, acc[0]);
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) {
            memcpy(&found[r][b], &acc[0][r][b * PARTS], 64);
            for (int c = 1; c < CHAINS; c++) {
                i16v more;
                memcpy(&more, &acc[c][r][b * PARTS], 64);
                found[r][b] += more;
            }
        }
}

// y [R][B] of sixteen results each: R rows times B blocks of 16 rows of w.
template <int R, int B>
static ALWAYS_INLINE void integer_tile(const IntegerRow* x, const IntegerMatrix& w, i64 K, bool more, v16 (&y)[R][B]) {
    i64 step = IntegerMatrix::line(K, w.bits), width = K / w.groups;
    const char* next = more ? (const char*)w.values + B * step : nullptr;
    i16v sums[R][B];
    if (w.bits == 8) {
        integer_dots<8, R, B>(x, w.values, step, 0, K, next, sums);
        for (int r = 0; r < R; r++)
            for (int b = 0; b < B; b++) {
                i16v shift = SHIFT ? *(const i16v*)(w.sums + 16 * b) * SHIFT : i16v{};
                y[r][b] = __builtin_convertvector(sums[r][b] - shift, v16) * at(w.scales + 16 * b) * x[r].scale;
            }
        return;
    }
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) y[r][b] = v16{};
    for (i64 g = 0; g < w.groups; g++) {
        integer_dots<4, R, B>(x, w.values, step, g * width, (g + 1) * width, next, sums);
        for (int r = 0; r < R; r++) {
            int shift = 0;
            for (i64 i = g * width / GROUP; i < ((g + 1) * width + GROUP - 1) / GROUP; i++) shift += 8 * x[r].sums[i];
            for (int b = 0; b < B; b++)
                y[r][b] += __builtin_convertvector(sums[r][b] - shift, v16) * at(w.scales + (b * w.groups + g) * 16);
        }
    }
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) y[r][b] *= x[r].scale;
}

// sink(m, b, y): y are the results of row m for block b of sixteen rows of w; `more` blocks follow those in memory.
template <int B, class F>
static ALWAYS_INLINE void integer_rows(const IntegerRow* x, i64 rows, const IntegerMatrix& w, i64 K, bool more, const F& sink) {
    auto tile = [&](auto size, i64 m) __attribute__((always_inline)) {
        constexpr int R = decltype(size)::value;
        v16 y[R][B];
        integer_tile<R, B>(x + m, w, K, more && m == 0, y);
        for (int r = 0; r < R; r++)
            for (int b = 0; b < B; b++) sink(m + r, b, y[r][b]);
    };
    i64 m = 0;
    for (; m + 4 <= rows; m += 4) tile(std::integral_constant<int, 4>(), m);
    if (rows - m == 3) tile(std::integral_constant<int, 3>(), m);
    if (rows - m == 2) tile(std::integral_constant<int, 2>(), m);
    if (rows - m == 1) tile(std::integral_constant<int, 1>(), m);
}

// out [M, N] = x [M, K] times the transposes of weights [E, N, K]; rows bounds[e] to bounds[e + 1] with those of expert e.
template <class T>
static void integer_product(const T* x, const IntegerMatrix& weights, const i64* bounds, T* out, i64 M, i64 N, i64 K, i64 E,
                            i64 threads) {
    Team team(threads);
    IntegerRows rounded;
    rounded.round(team, [&](i64 m) { return x + m * K; }, M, K);
    const i64 blocks = (N + 63) / 64;
    team.each(E * blocks, 64 * K * M / E, [&](i64 item) {
        i64 e = item / blocks, n = item % blocks * 64, begin = bounds[e], rows = bounds[e + 1] - begin;
        if (!rows) return;
        IntegerMatrix w = weights.from(e * up16(N) + n, K);
        auto put = [&](i64 m, i64 b, v16 y) {
            i64 at = n + 16 * b;
            store16(out + (begin + m) * N + at, y, std::min<i64>(16, N - at));
        };
        const IntegerRow* own = &rounded.rows[begin];
        if (BLOCKS == 4 && n + 48 < N)
            integer_rows<BLOCKS>(own, rows, w, K, false, put);
        else
            for (i64 b = 0; n + 16 * b < N; b++)
                integer_rows<1>(own, rows, w.from(16 * b, K), K, false, [&](i64 m, i64, v16 y) { put(m, b, y); });
    });
}
