// Sparse attention over selected latent rows, forward and backward.
#pragma once

#include "vectors.h"

// Four heads against four rows over a padded width: out[h * stride + r] = scale * heads[h] . rows[r].
static inline void dots4x4(const float* heads, const float* rows, i64 line, i64 width, float scale, float* out,
                           i64 stride) {
    v16 acc[16] = {};
#if defined(__AVX2__) && !defined(__AVX512F__)
    // Eight lanes of two rows at a time: their sums fit into registers.
    for (i64 part = 0; part < 16; part += 8)
        for (int r = 0; r < 4; r += 2) {
            v8 sum[4][2] = {};
            const float *first = rows + r * line + part, *second = first + line;
            for (i64 i = 0; i < width; i += 16) {
                v8 one = half(first + i), two = half(second + i);
#pragma GCC unroll 4
                for (int h = 0; h < 4; h++) {
                    v8 x = half(heads + h * line + part + i);
                    sum[h][0] += x * one;
                    sum[h][1] += x * two;
                }
            }
#pragma GCC unroll 4
            for (int h = 0; h < 4; h++)
#pragma GCC unroll 2
                for (int k = 0; k < 2; k++) half((float*)&acc[4 * h + r + k] + part) = sum[h][k];
        }
#else
    for (i64 i = 0; i < width; i += 16) {
        v16 r0 = at(rows + i), r1 = at(rows + line + i), r2 = at(rows + 2 * line + i), r3 = at(rows + 3 * line + i);
#pragma GCC unroll 4
        for (int h = 0; h < 4; h++) {
            v16 x = at(heads + h * line + i);
            acc[4 * h] += x * r0;
            acc[4 * h + 1] += x * r1;
            acc[4 * h + 2] += x * r2;
            acc[4 * h + 3] += x * r3;
        }
    }
#endif
    v16 sums = hsum16(acc) * scale;
    float flat[16];
    memcpy(flat, &sums, 64);
    for (int h = 0; h < 4; h++) memcpy(out + h * stride, flat + 4 * h, 16);
}

// out[h] = sum over n rows of p[h * stride + j] * rows[j], for heads in groups of four.
#ifdef __AVX512F__
// 4 heads by `CHUNKS` * 16 values held in registers.
template <int CHUNKS>
static inline void mix_block(const float* p, i64 stride, const float* rows, i64 line, i64 n, float* out) {
    v16 acc[4][CHUNKS] = {};
    for (i64 j = 0; j < n; j++) {
        const float* row = rows + j * line;
#pragma GCC unroll 4
        for (int h = 0; h < 4; h++) {
            float f = p[h * stride + j];
#pragma GCC unroll 4
            for (int c = 0; c < CHUNKS; c++) acc[h][c] += f * at(row + 16 * c);
        }
    }
    for (int h = 0; h < 4; h++)
        for (int c = 0; c < CHUNKS; c++) at(out + h * line + 16 * c) = acc[h][c];
}

static inline void mix(const float* p, i64 stride, const float* rows, i64 line, i64 n, float* out, i64 heads,
                       i64 width) {
    for (i64 h = 0; h < heads; h += 4)
        for (i64 i = 0; i < width; i += 64) {
            const float *ph = p + h * stride, *from = rows + i;
            float* to = out + h * line + i;
            switch (std::min<i64>(4, (width - i) / 16)) {
                case 1: mix_block<1>(ph, stride, from, line, n, to); break;
                case 2: mix_block<2>(ph, stride, from, line, n, to); break;
                case 3: mix_block<3>(ph, stride, from, line, n, to); break;
                default: mix_block<4>(ph, stride, from, line, n, to);
            }
        }
}
#else
static inline void mix(const float* p, i64 stride, const float* rows, i64 line, i64 n, float* out, i64 heads,
                       i64 width) {
    for (i64 h = 0; h < heads; h += 4)
        for (i64 i = 0; i < width; i += 16) {
            v8 acc[4][2] = {};
            for (i64 j = 0; j < n; j++) {
                v8 low = half(rows + j * line + i), high = half(rows + j * line + i + 8);
#pragma GCC unroll 4
                for (int k = 0; k < 4; k++) {
                    float f = p[(h + k) * stride + j];
                    acc[k][0] += f * low;
                    acc[k][1] += f * high;
                }
            }
            for (int k = 0; k < 4; k++)
                half(out + (h + k) * line + i) = acc[k][0], half(out + (h + k) * line + i + 8) = acc[k][1];
        }
}
#endif

// The largest of n numbers, a multiple of 16.
static inline float largest(const float* p, i64 n) {
    Floats most = *(const Floats*)p;
    for (i64 i = LANES; i < n; i += LANES) {
        Floats x = *(const Floats*)(p + i);
        most = x > most ? x : most;
    }
    float top = most[0];
    for (i64 i = 1; i < LANES; i++) top = most[i] > top ? most[i] : top;
    return top;
}

// Softmax over p[0..n) in place (padded to 16 with zeros).
static void softmax_row(float* p, i64 n) {
    i64 padded = up16(n);
    for (i64 i = n; i < padded; i++) p[i] = -INFINITY;
    float top = largest(p, padded);
    v16 sum = {};
    for (i64 i = 0; i < padded; i += 16) {
        at(p + i) = exp16(at(p + i) - top);
        sum += at(p + i);
    }
    v16 inverse = splat(1.0f / hsum(sum));
    for (i64 i = 0; i < padded; i += 16) at(p + i) *= inverse;
}

static inline i64 filled(const i64* index, i64 K) {
    while (K > 0 && index[K - 1] < 0) K--;
    return K;
}

// Selected rows, widened, up to a multiple of four; those behind the last repeat row 0 and get no weight.
template <class T>
static inline void gather(const T* keys, const i64* index, i64 n, i64 width, i64 line, float* out) {
    for (i64 j = 0; j < (n + 3) / 4 * 4; j++) widen(keys + index[j < n ? j : 0] * width, out + j * line, width, line);
}

// The same from a sequence's pages. Rows of a long sequence are in no cache, so they are asked for some rows ahead.
template <class T>
static inline void gather(const Lines<T>& keys, i64 sequence, const i64* index, i64 n, i64 line, float* out) {
    const i64 ahead = 16, bytes = keys.bytes();
    for (i64 j = 0; j < (n + 3) / 4 * 4; j++) {
        if (j + ahead < n) {
            const char* next = keys.place(sequence, index[j + ahead]);
            for (i64 i = 0; i < bytes; i += 64) __builtin_prefetch(next + i);
            __builtin_prefetch(next + bytes - 1);  // a row need not begin where a line of cache does
        }
        keys.read(sequence, index[j < n ? j : 0], out + j * line, line);
    }
}

template <class T>
static void attend(const T* q, const Lines<T>& latents, const i64* indices, T* out, float* target, i64 B, i64 Q, i64 N,
                   i64 W, i64 C, i64 K, float scale) {
    i64 Wp = up16(W), Kp = up16(K), Np = (N + 3) / 4 * 4;
#pragma omp parallel if (B * Q > 1 && B * Q * N * K * (W + C) > SHARED)
    {
        Zeros qf(Np * Wp), picked(Kp * Wp), p(Np * Kp), acc(Np * Wp);
#pragma omp for schedule(dynamic, 8)
        for (i64 r = 0; r < B * Q; r++) {
            const i64* index = indices + r * K;
            i64 n = filled(index, K);
            for (i64 h = 0; h < N; h++) widen(q + (r * N + h) * W, &qf[h * Wp], W, Wp);
            gather(latents, latents.sequence(r), index, n, Wp, picked.data());
            for (i64 j = 0; j < n; j += 4)
                for (i64 h = 0; h < Np; h += 4)
                    dots4x4(&qf[h * Wp], &picked[j * Wp], Wp, Wp, scale, &p[h * Kp + j], Kp);
            for (i64 h = 0; h < N; h++) softmax_row(&p[h * Kp], n);
            mix(p.data(), Kp, picked.data(), Wp, n, acc.data(), N, up16(C));
            for (i64 h = 0; h < N; h++)
                for (i64 i = 0; i < C; i += 16) store16(out + (r * N + h) * C + i, at(&acc[h * Wp + i]), C - i);
            if (target)
                for (i64 j = 0; j < K; j++) {
                    float sum = 0.0f;
                    if (j < n)
                        for (i64 h = 0; h < N; h++) sum += p[h * Kp + j];
                    target[r * K + j] = sum;
                }
        }
    }
}

// Partial sums of the latents' gradient: few long rows are cut into a fixed number of parts, so that the result does
// not depend on the number of threads.
static i64 parts_of(i64 B) { return B >= 4 ? 1 : 4; }

template <class T>
static void attend_backward(const T* q, const T* latents, const i64* indices, const T* grad, T* grad_q,
                            float* grad_latents, i64 B, i64 Q, i64 S, i64 N, i64 W, i64 C, i64 K, float scale) {
    i64 Wp = up16(W), Cp = up16(C), Kp = up16(K), Np = (N + 3) / 4 * 4, parts = parts_of(B);
    Zeros sums(B * parts * S * Wp);
#pragma omp parallel
    {
        Zeros qf(Np * Wp), gf(Np * Wp), picked(Kp * Wp), p(Np * Kp), dp(Np * Kp), acc(Np * Wp);
#pragma omp for schedule(dynamic, 1)
        for (i64 item = 0; item < B * parts; item++) {
            i64 b = item / parts, part = item % parts;
            const T* keys = latents + b * S * W;
            float* sum = &sums[item * S * Wp];
            for (i64 t = Q * part / parts; t < Q * (part + 1) / parts; t++) {
                i64 r = b * Q + t;
                const i64* index = indices + r * K;
                i64 n = filled(index, K);
                for (i64 h = 0; h < N; h++) {
                    widen(q + (r * N + h) * W, &qf[h * Wp], W, Wp);
                    widen(grad + (r * N + h) * C, &gf[h * Wp], C, Wp);
                }
                gather(keys, index, n, W, Wp, picked.data());
                for (i64 j = 0; j < n; j += 4)
                    for (i64 h = 0; h < Np; h += 4) {
                        const float* four = &picked[j * Wp];
                        dots4x4(&qf[h * Wp], four, Wp, Wp, scale, &p[h * Kp + j], Kp);
                        dots4x4(&gf[h * Wp], four, Wp, Cp, 1.0f, &dp[h * Kp + j], Kp);  // gf ends with zeros
                    }
                for (i64 h = 0; h < N; h++) {
                    float* ph = &p[h * Kp];
                    float* dh = &dp[h * Kp];
                    softmax_row(ph, n);
                    for (i64 j = n; j < up16(n); j++) dh[j] = 0.0f;
                    float mean = dot(ph, dh, up16(n));
                    for (i64 j = 0; j < up16(n); j++) dh[j] = ph[j] * (dh[j] - mean) * scale;
                }
                mix(dp.data(), Kp, picked.data(), Wp, n, acc.data(), N, Wp);
                for (i64 j = 0; j < n; j += 4) {
                    // Slots behind the last one have zero weight, so adding them to row 0 changes nothing.
                    float* to[4];
                    for (i64 s = 0; s < 4; s++) to[s] = sum + index[j + s < n ? j + s : 0] * Wp;
                    for (i64 i = 0; i < Wp; i += 16) {
                        v16 x[4] = {};
                        for (i64 h = 0; h < N; h++) {
                            v16 qh = at(&qf[h * Wp + i]), gh = at(&gf[h * Wp + i]);
                            const float *ds = &dp[h * Kp + j], *ph = &p[h * Kp + j];
#pragma GCC unroll 4
                            for (int s = 0; s < 4; s++) x[s] += ds[s] * qh + ph[s] * gh;
                        }
                        for (int s = 0; s < 4; s++) at(to[s] + i) += x[s];
                    }
                }
                for (i64 h = 0; h < N; h++)
                    for (i64 i = 0; i < W; i += 16) store16(grad_q + (r * N + h) * W + i, at(&acc[h * Wp + i]), W - i);
            }
        }
#pragma omp for schedule(static)
        for (i64 line = 0; line < B * S; line++) {
            i64 b = line / S, s = line % S;
            for (i64 i = 0; i < W; i++) {
                float total = 0.0f;
                for (i64 part = 0; part < parts; part++) total += sums[((b * parts + part) * S + s) * Wp + i];
                grad_latents[line * W + i] = total;
            }
        }
    }
}
