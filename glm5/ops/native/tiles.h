// Products of few rows with a large matrix, sixteen of its rows at a time: fetching weights is what takes time.
//
// Every dot product is one sum along the row, whatever the number of rows: bits do not depend on the batch, unless
// `Halves` (below) takes numbers below 2^-126.
#pragma once

#include "integers.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define PAIRED_BF16
#endif

// How the rows that are multiplied are held, how many of their elements are multiplied at a time, and what holds those if
// each row of weights meets XS of them.
template <class T>
struct Operand {
    typedef float E;
    template <int XS>
    using Reg = v16;
    static constexpr i64 LANES = 16;
};
template <class R, class T>
static ALWAYS_INLINE R reg(const T* p) { return load16(p); }
template <class R, class T>
static ALWAYS_INLINE R reg(const T* p, i64 n) { return load16(p, n); }
static ALWAYS_INLINE v16 mac(v16 acc, v16 a, v16 b) { return acc + a * b; }

#ifdef PAIRED_BF16
// Thirty-two bf16. The processor multiplies pairs of them and adds both products to an fp32 sum, first that of the odd
// places.
struct Whole {
    __m512bh x;
    Whole() = default;
    explicit Whole(__m512i x) : x((__m512bh)x) {}
};
static ALWAYS_INLINE v16 mac(v16 acc, Whole a, Whole b) { return (v16)_mm512_dpbf16_ps((__m512)acc, a.x, b.x); }
// The same numbers as floats. Their products give the same sum, but for numbers below 2^-126 among factors, products and sums,
// which the processor takes as zero in pairs.
struct Halves {
    v16 even, odd;
    Halves() = default;
    explicit Halves(__m512i x)
        : even((v16)_mm512_slli_epi32(x, 16)), odd((v16)_mm512_and_si512(x, _mm512_set1_epi32(0xffff0000))) {}
};
static ALWAYS_INLINE v16 mac(v16 acc, Halves a, Halves b) { return (acc + a.odd * b.odd) + a.even * b.even; }

static ALWAYS_INLINE __m512i raw(const bf16* p, i64 n) {
    return _mm512_maskz_loadu_epi16(n >= 32 ? ~__mmask32(0) : (__mmask32(1) << n) - 1, p);
}
template <>
struct Operand<bf16> {
    typedef bf16 E;
#ifdef SLOW_PAIRS  // an instruction for pairs takes as long as four for floats, which are made once for XS products
    template <int XS>
    using Reg = typename std::conditional<XS == 1, Whole, Halves>::type;
#else
    template <int XS>
    using Reg = Whole;
#endif
    static constexpr i64 LANES = 32;
};
template <class R>
static ALWAYS_INLINE R reg(const bf16* p) { return R(_mm512_loadu_si512(p)); }
template <class R>
static ALWAYS_INLINE R reg(const bf16* p, i64 n) { return R(raw(p, n)); }
#endif

// A row that is multiplied is padded with zeros to this many elements.
template <class T>
static inline i64 padded(i64 n) {
    return (n + Operand<T>::LANES - 1) / Operand<T>::LANES * Operand<T>::LANES;
}

template <class T>
using Elements = Memory<typename Operand<T>::E>;

// Zeros where a row of `width` needs padding; otherwise unset.
template <class T>
static Elements<T> elements(i64 rows, i64 width) {
    typedef typename Operand<T>::E E;
    i64 count = rows * padded<T>(width);
    auto found = memory<E>(count);
    if (padded<T>(width) != width) memset(found.get(), 0, count * sizeof(E));
    return found;
}

// Rows to multiply: those of x [rows, width] if they can be read as they are, else a padded copy.
template <class T>
struct Input {
    typedef typename Operand<T>::E E;
    Elements<T> own;
    std::vector<const E*> rows;
    IntegerRows integers;  // the same rounded, once a matrix asks for it

    Input(const T* x, i64 count, i64 width) : rows(count) {
        i64 line = padded<T>(width);
        if (std::is_same<E, T>::value && line == width) {
            for (i64 m = 0; m < count; m++) rows[m] = (const E*)x + m * width;
            return;
        }
        own = elements<T>(count, width);
        for (i64 m = 0; m < count; m++) {
            rows[m] = &own[m * line];
            for (i64 i = 0; i < width; i += 16) store16(&own[m * line + i], load16(x + m * width + i, width - i), width - i);
        }
    }
};

// A matrix [N, K], or a stack of them, to multiply with.
template <class T>
struct Weight {
    const T* plain;
    IntegerMatrix integers;  // instead, unless its `values` are null

    bool rounds() const { return integers.values; }
    // From row n on; a multiple of 16 for integers.
    Weight from(i64 n, i64 K) const {
        return rounds() ? Weight{nullptr, integers.from(n, K)} : Weight{plain + n * K, {}};
    }
    // Matrix e of a stack.
    Weight of(i64 e, i64 N, i64 K) const { return from(e * (rounds() ? up16(N) : N), K); }
};

// Four rows of w times XS rows x, lane by lane: acc[4 * m + r] is row r times x[m]. Meanwhile memory
// from `next` on is asked for.
#ifdef __AVX512F__
template <class T, int XS>
static ALWAYS_INLINE void dots(const T* const* w, const typename Operand<T>::E* const* x, i64 K, const char* next, v16* acc) {
    const T *w0 = w[0], *w1 = w[1], *w2 = w[2], *w3 = w[3];
    const typename Operand<T>::E* xs[XS];
    typedef typename Operand<T>::template Reg<XS> R;
    v16 sum[4 * XS] = {};
    for (int m = 0; m < XS; m++) xs[m] = x[m];
    i64 i = 0;
#define STEP(...)                                                                                       \
    auto a = reg<R>(w0 + i __VA_ARGS__), b = reg<R>(w1 + i __VA_ARGS__);                                \
    auto c = reg<R>(w2 + i __VA_ARGS__), d = reg<R>(w3 + i __VA_ARGS__);                                \
    _Pragma("GCC unroll 4") for (int m = 0; m < XS; m++) {                                              \
        auto xi = reg<R>(xs[m] + i);                                                                    \
        sum[4 * m] = mac(sum[4 * m], a, xi), sum[4 * m + 1] = mac(sum[4 * m + 1], b, xi);               \
        sum[4 * m + 2] = mac(sum[4 * m + 2], c, xi), sum[4 * m + 3] = mac(sum[4 * m + 3], d, xi);       \
    }
    const i64 line = 4 * Operand<T>::LANES * sizeof(T);
    for (; i + Operand<T>::LANES <= K; i += Operand<T>::LANES) {
        if (next) {
            for (i64 at = 0; at < line; at += 64) __builtin_prefetch(next + at, 0, 2);
            next += line;
        }
        STEP()
    }
    if (i < K) {
        const i64 n = K - i;
        STEP(, n)
    }
#undef STEP
    for (int r = 0; r < 4 * XS; r++) acc[r] = sum[r];
}
#else
// So few rows of w at a time that the sums stay in registers, which hold eight numbers.
template <class T, int XS>
static ALWAYS_INLINE void dots(const T* const* w, const float* const* x, i64 K, const char* next, v16* acc) {
    constexpr int G = XS == 1 ? 4 : XS == 2 ? 2 : 1;
    for (int r = 0; r < 4; r += G) {
        v8 sum[G][XS][2] = {};
        auto add = [&](const T* line, int g, i64 i) __attribute__((always_inline)) {
            v8 low = half(line), high = half(line + 8);
#pragma GCC unroll 4
            for (int m = 0; m < XS; m++) {
                sum[g][m][0] += low * half(x[m] + i);
                sum[g][m][1] += high * half(x[m] + i + 8);
            }
        };
        i64 i = 0;
        for (; i + 16 <= K; i += 16) {
            if (next) {
                for (i64 at = 0; at < i64(G * 16 * sizeof(T)); at += 64) __builtin_prefetch(next + at, 0, 2);
                next += G * 16 * sizeof(T);
            }
#pragma GCC unroll 4
            for (int g = 0; g < G; g++) add(w[r + g] + i, g, i);
        }
        for (int g = 0; g < G && i < K; g++) {
            T rest[16] = {};
            memcpy(rest, w[r + g] + i, (K - i) * sizeof(T));
            add(rest, g, i);
        }
        for (int m = 0; m < XS; m++)
            for (int g = 0; g < G; g++) memcpy(&acc[4 * m + r + g], sum[g][m], 64);
    }
}
#endif

// y [XS, 16] = XS rows x times sixteen rows of w.
template <class T, int XS>
static ALWAYS_INLINE void rows16(const T* const* w, const typename Operand<T>::E* const* x, i64 K, const char* next, float* y) {
    v16 acc[XS][16];
    for (int r = 0; r < 16; r += 4) {
        v16 four[4 * XS];
        dots<T, XS>(w + r, x, K, next + r * K * sizeof(T), four);
        for (int m = 0; m < XS; m++)
            for (int i = 0; i < 4; i++) acc[m][r + i] = four[4 * m + i];
    }
    for (int m = 0; m < XS; m++) at(y + 16 * m) = hsum16(acc[m]);
}

// y [rows, 16] = rows x times up to 16 rows of w, each K long. From four rows on, a row of w is read once for four. Rows
// of w from `count` on repeat the last one.
template <class T>
static void tile16(const T* w, i64 count, i64 K, const typename Operand<T>::E* const* x, i64 rows, float* y) {
    const T* line[16];
    for (i64 r = 0; r < 16; r++) line[r] = w + std::min(r, count - 1) * K;
    const char* next = (const char*)(w + 16 * K);
    if (rows == 1) return rows16<T, 1>(line, x, K, next, y);
    if (rows == 2) return rows16<T, 2>(line, x, K, next, y);
    if (rows == 3) return rows16<T, 3>(line, x, K, next, y);
    for (i64 r = 0; r < 16; r += 4)
        for (i64 m = 0; m < rows; m += 4) {
            i64 from = std::min(m, rows - 4);  // the last four may overlap those before
            v16 acc[16];
            if (m)
                dots<T, 4>(line + r, x + from, K, nullptr, acc);
            else
                dots<T, 4>(line + r, x + from, K, next + r * K * sizeof(T), acc);
            v16 sums = hsum16(acc);
            for (i64 h = 0; h < 4; h++) memcpy(y + 16 * (from + h) + r, (const float*)&sums + 4 * h, 16);
        }
}

const i64 ROWS = 64;  // rows of a tile: what a thread holds of results fits on its stack

// y [rows, 16] = rows x, or the same as integers, times up to 16 rows of w from row n on. With integers, n is a multiple of
// 16, and y has 16 results.
template <class T>
static void tile16(const Weight<T>& w, i64 n, i64 count, i64 K, const typename Operand<T>::E* const* x, const IntegerRow* rounded,
                   i64 rows, float* y) {
    if (!w.rounds()) return tile16(w.plain + n * K, count, K, x, rows, y);
    integer_rows<1>(rounded, rows, w.integers.from(n, K), K, true, [&](i64 m, i64, v16 out) { at(y + 16 * m) = out; });
}

// The rows of x as integers, if one of these matrices needs them.
template <class T, size_t S>
static void round_for(const Team& team, const Weight<T> (&weights)[S], Input<T>& x, i64 K) {
    for (const Weight<T>& weight : weights)
        if (weight.rounds() && x.integers.rows.empty())
            x.integers.round(team, [&](i64 m) { return x.rows[m]; }, x.rows.size(), K);
}

template <class T>
struct Matrix {
    Weight<T> w;
    i64 N;
};

// x [M, K] times the transposes of several matrices [N, K]: sink(which, m, n, y, count) takes y, up to 16 elements of row
// m from column n on. Matrices without columns are left out.
template <class T, size_t S, class F>
static void products(const Team& team, Input<T>& x, i64 K, const Matrix<T> (&matrices)[S], const F& sink) {
    i64 tiles = 0, M = x.rows.size();
    for (const Matrix<T>& matrix : matrices) {
        tiles += (matrix.N + 15) / 16;
        if (matrix.N) round_for(team, {matrix.w}, x, K);
    }
    team.each(tiles, 16 * M * K, [&](i64 tile) {
        int which = 0;
        for (; tile >= (matrices[which].N + 15) / 16; which++) tile -= (matrices[which].N + 15) / 16;
        i64 n = 16 * tile, count = std::min<i64>(16, matrices[which].N - n);
        float y[16 * ROWS];
        for (i64 m0 = 0; m0 < M; m0 += ROWS) {
            i64 rows = std::min(ROWS, M - m0);
            tile16(matrices[which].w, n, count, K, &x.rows[m0], x.integers.rows.data() + m0, rows, y);
            for (i64 m = 0; m < rows; m++) sink(which, m0 + m, n, at(y + 16 * m), count);
        }
    });
}
