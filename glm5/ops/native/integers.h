// Products of rows that are rounded to int8 with weights in 8 or 4 bits. Sums are exact 32-bit integers; a result is
// their product with the scales of row and channel, in fp32.
#pragma once

#include "vectors.h"
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include <immintrin.h>
#endif

static const i64 WIDE = 64;    // bytes of a register
static const i64 PAIRED = 128; // 4-bit values whose low halves share registers: value j with value j + 64

static inline i64 up64(i64 n) { return (n + WIDE - 1) / WIDE * WIDE; }

// One row of int8 numbers, [Kp] past K filled with zeros, and its scale: x = q * scale, the largest magnitude is 127.
template <class T>
static float round_row(const T* x, int8_t* q, i64 K, i64 Kp) {
    float most = 0.0f;
    for (i64 i = 0; i < K; i++) {
        float size = std::fabs(load(x + i));
        most = size > most || size != size ? size : most;
    }
    // A division, not a product with 1 / 127: the quantisers in Python have the same bits.
    float scale = std::max(most / 127.0f, 1e-30f);
    if (!(most < INFINITY)) scale = NAN;
    for (i64 i = 0; i < K; i++) {
        float value = std::nearbyint(load(x + i) / scale);
        q[i] = value > -127.0f ? (value < 127.0f ? int8_t(value) : 127) : -127;
    }
    std::fill(q + K, q + Kp, 0);
    return scale;
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
// sums [R][C] of R rows of x (int8 + 128 as bytes) with C rows of w over K bytes.
template <int R, int C>
static inline void dots_bytes(const uint8_t* x, i64 x_stride, const int8_t* w, i64 w_stride, i64 K, int sums[R][C]) {
    __m512i acc[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) acc[r][c] = _mm512_setzero_si512();
    for (i64 k = 0; k < K; k += WIDE) {
        __mmask64 mask = K - k >= WIDE ? ~__mmask64(0) : (__mmask64(1) << (K - k)) - 1;
        __m512i b[C];
        for (int c = 0; c < C; c++) b[c] = _mm512_maskz_loadu_epi8(mask, w + c * w_stride + k);
        for (int r = 0; r < R; r++) {
            __m512i a = _mm512_loadu_si512(x + r * x_stride + k);
            for (int c = 0; c < C; c++) acc[r][c] = _mm512_dpbusd_epi32(acc[r][c], a, b[c]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) sums[r][c] = _mm512_reduce_add_epi32(acc[r][c]);
}

// The same for 4-bit w, whose values + 8 are bytes of two: over `count` values, a multiple of PAIRED; x is int8.
template <int R, int C>
static inline void dots_nibbles(const int8_t* x, i64 x_stride, const uint8_t* w, i64 w_stride, i64 count,
                                int sums[R][C]) {
    __m512i acc[R][C], low = _mm512_set1_epi8(15);
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) acc[r][c] = _mm512_setzero_si512();
    for (i64 k = 0; k < count; k += PAIRED)
        for (int c = 0; c < C; c++) {
            __m512i both = _mm512_loadu_si512(w + c * w_stride + k / 2);
            __m512i first = _mm512_and_si512(both, low), second = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
            for (int r = 0; r < R; r++) {
                acc[r][c] = _mm512_dpbusd_epi32(acc[r][c], first, _mm512_loadu_si512(x + r * x_stride + k));
                acc[r][c] = _mm512_dpbusd_epi32(acc[r][c], second, _mm512_loadu_si512(x + r * x_stride + k + WIDE));
            }
        }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) sums[r][c] = _mm512_reduce_add_epi32(acc[r][c]);
}
#else
template <int R, int C>
static inline void dots_bytes(const uint8_t* x, i64 x_stride, const int8_t* w, i64 w_stride, i64 K, int sums[R][C]) {
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) {
            int sum = 0;
            for (i64 k = 0; k < K; k++) sum += int(x[r * x_stride + k]) * int(w[c * w_stride + k]);
            sums[r][c] = sum;
        }
}

template <int R, int C>
static inline void dots_nibbles(const int8_t* x, i64 x_stride, const uint8_t* w, i64 w_stride, i64 count,
                                int sums[R][C]) {
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) {
            int sum = 0;
            for (i64 k = 0; k < count; k += PAIRED)
                for (i64 j = 0; j < WIDE; j++) {
                    int both = w[c * w_stride + k / 2 + j];
                    sum += (both & 15) * int(x[r * x_stride + k + j]);
                    sum += (both >> 4) * int(x[r * x_stride + k + WIDE + j]);
                }
            sums[r][c] = sum;
        }
}
#endif

// Rounded rows of one product. For 8-bit weights the numbers + 128 as bytes; for 4-bit ones the numbers, and the sums of
// each group.
struct RoundedRows {
    i64 Kp, groups;
    std::vector<int8_t> q;
    std::vector<uint8_t> bytes;
    std::vector<int> sums;
    std::vector<float> scales;

    template <class T>
    RoundedRows(const T* x, i64 M, i64 K, i64 groups, i64 bits)
        : Kp(up64(K)), groups(groups), q(M * Kp), bytes(bits == 8 ? M * Kp : 0), sums(bits == 4 ? M * groups : 0),
          scales(M) {
        const i64 width = K / groups;
#pragma omp parallel for schedule(static) if (M * K > SHARED)
        for (i64 m = 0; m < M; m++) {
            int8_t* row = &q[m * Kp];
            scales[m] = round_row(x + m * K, row, K, Kp);
            if (bits == 8)
                for (i64 i = 0; i < Kp; i++) bytes[m * Kp + i] = uint8_t(int(row[i]) + 128);
            else
                for (i64 i = 0; i < K; i++) sums[m * groups + i / width] += row[i];
        }
    }
};

// Weights of E experts (1: a plain matrix) [E, N, K]: int8, or 4-bit values in pairs [E, N, K / 2]; scales [E, N, G];
// sums [E, N] of the int8 values (4-bit: none). Only 4-bit weights have more than one group.
struct IntegerWeights {
    const void* values;
    const float* scales;
    const int* sums;
    i64 N, K, groups, bits;
};

template <int R, int C, class T>
static inline void integer_tile(const RoundedRows& x, i64 m, const IntegerWeights& w, i64 row, T* out, i64 n) {
    int sums[R][C];
    float totals[R][C] = {};
    const i64 width = w.K / w.groups;
    for (i64 g = 0; g < w.groups; g++) {
        if (w.bits == 8)
            dots_bytes<R, C>(&x.bytes[m * x.Kp], x.Kp, (const int8_t*)w.values + row * w.K, w.K, w.K, sums);
        else
            dots_nibbles<R, C>(&x.q[m * x.Kp + g * width], x.Kp,
                               (const uint8_t*)w.values + (row * w.K + g * width) / 2, w.K / 2, width, sums);
        for (int r = 0; r < R; r++) {
            for (int c = 0; c < C; c++) {
                int shift = w.bits == 8 ? 128 * w.sums[row + c] : 8 * x.sums[(m + r) * x.groups + g];
                int exact = sums[r][c] - shift;
                totals[r][c] += float(exact) * w.scales[(row + c) * w.groups + g];
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(out + (m + r) * w.N + n + c, totals[r][c] * x.scales[m + r]);
}

// out [M, N] = x [M, K] times the weights transposed; rows bounds[e] to bounds[e + 1] with those of expert e.
template <class T>
static void integer_product(const T* x, const void* values, const float* scales, const int* sums, const i64* bounds,
                            T* out, i64 M, i64 N, i64 K, i64 E, i64 groups, i64 bits) {
    RoundedRows rows(x, M, K, groups, bits);
    IntegerWeights w{values, scales, sums, N, K, groups, bits};
    const i64 blocks = (N + 15) / 16;
#pragma omp parallel for schedule(dynamic, 4) if (M * N * K > SHARED)
    for (i64 task = 0; task < E * blocks; task++) {
        i64 e = task / blocks, first = task % blocks * 16, last = std::min(N, first + 16);
        i64 begin = bounds[e], end = bounds[e + 1];
        for (i64 m = begin; m < end;) {
            i64 n = first;
            if (end - m >= 4) {
                for (; n + 4 <= last; n += 4) integer_tile<4, 4>(rows, m, w, e * N + n, out, n);
                for (; n < last; n++) integer_tile<4, 1>(rows, m, w, e * N + n, out, n);
                m += 4;
            } else {
                for (; n + 4 <= last; n += 4) integer_tile<1, 4>(rows, m, w, e * N + n, out, n);
                for (; n < last; n++) integer_tile<1, 1>(rows, m, w, e * N + n, out, n);
                m += 1;
            }
        }
    }
}
