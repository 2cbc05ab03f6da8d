// Lightning indexer: scores of all keys in tiles, the top k of every query, and scores of chosen keys with gradients.
#pragma once

#include "attention.h"

const int TILE = 64;

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

// `count` keys [count, d] -> tile [d][64], missing keys as zeros.
template <class T>
static inline void transpose_tile(const T* keys, i64 count, i64 d, float* tile) {
    for (i64 s = 0; s < TILE; s += 16)
        for (i64 i = 0; i < d; i += 16) {
            v16 x[16];
            i64 width = std::min<i64>(16, d - i);
            for (i64 r = 0; r < 16; r++) x[r] = s + r < count ? load16(keys + (s + r) * d + i, width) : v16{};
            transpose16(x);
            for (i64 c = 0; c < width; c++) at(tile + (i + c) * TILE + s) = x[c];
        }
}

// Scores of one query against one transposed tile of 64 keys [d][64]: sum_j w[j] * relu(q[j] . key).
#ifdef __AVX512F__
static inline void tile_scores(const float* q, const float* w, const float* tile, i64 J, i64 d, float* out) {
    v16 total[4] = {};
    i64 j = 0;
    for (; j + 4 <= J; j += 4) {
        v16 acc[4][4] = {};
        for (i64 i = 0; i < d; i++) {
            const float* t = tile + i * TILE;
            v16 t0 = at(t), t1 = at(t + 16), t2 = at(t + 32), t3 = at(t + 48);
#pragma GCC unroll 4
            for (int h = 0; h < 4; h++) {
                v16 x = splat(q[(j + h) * d + i]);
                acc[h][0] += x * t0;
                acc[h][1] += x * t1;
                acc[h][2] += x * t2;
                acc[h][3] += x * t3;
            }
        }
#pragma GCC unroll 4
        for (int h = 0; h < 4; h++)
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) total[c] += splat(w[j + h]) * (acc[h][c] < 0.0f ? v16{} : acc[h][c]);
    }
    for (; j < J; j++)
        for (int c = 0; c < 4; c++) {
            v16 acc = {};
            for (i64 i = 0; i < d; i++) acc += splat(q[j * d + i]) * at(tile + i * TILE + 16 * c);
            total[c] += splat(w[j]) * (acc < 0.0f ? v16{} : acc);
        }
    for (int c = 0; c < 4; c++) at(out + 16 * c) = total[c];
}
#else
// `HEADS` heads against 32 keys.
template <int HEADS>
static inline void half_scores(const float* q, const float* w, const float* tile, i64 d, v8* total) {
    v8 acc[HEADS][4] = {};
    for (i64 i = 0; i < d; i++) {
        const float* t = tile + i * TILE;
        v8 t0 = half(t), t1 = half(t + 8), t2 = half(t + 16), t3 = half(t + 24);
#pragma GCC unroll 2
        for (int h = 0; h < HEADS; h++) {
            v8 x = v8{} + q[h * d + i];
            acc[h][0] += x * t0;
            acc[h][1] += x * t1;
            acc[h][2] += x * t2;
            acc[h][3] += x * t3;
        }
    }
#pragma GCC unroll 2
    for (int h = 0; h < HEADS; h++)
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) total[c] += w[h] * (acc[h][c] < 0.0f ? v8{} : acc[h][c]);
}

static inline void tile_scores(const float* q, const float* w, const float* tile, i64 J, i64 d, float* out) {
    for (i64 s = 0; s < TILE; s += 32) {
        v8 total[4] = {};
        i64 j = 0;
        for (; j + 2 <= J; j += 2) half_scores<2>(q + j * d, w + j, tile + s, d, total);
        if (j < J) half_scores<1>(q + j * d, w + j, tile + s, d, total);
        for (int c = 0; c < 4; c++) half(out + s + 8 * c) = total[c];
    }
}
#endif

// The k-th largest of n > k integers, bit by bit from the highest. Each bit halves those that may be it, so all passes
// together read about twice n. Writes behind the first n of `order`, which has room for twice n and 32 more.
static int32_t kth_largest(int32_t* order, i64 n, i64 k) {
    int32_t threshold = INT32_MIN;
    int32_t *rest = order + up16(n), *from = order;  // `rest` has those between threshold and threshold + 2^(bit + 1)
    for (int bit = 31; bit >= 0; bit--) {
        int32_t candidate = int32_t(uint32_t(threshold) + (1u << bit));
        i64 total = 0, i = 0;
#ifdef __AVX512F__
        const __m512i c = _mm512_set1_epi32(candidate);
        for (; i + 16 <= n; i += 16)
            total += __builtin_popcount(_mm512_cmpge_epi32_mask(_mm512_loadu_si512(from + i), c));
#endif
        for (; i < n; i++) total += from[i] >= candidate;
        bool raise = total >= k;
        if (raise)
            threshold = candidate;
        else
            k -= total;
        i64 kept = 0;
        i = 0;
#ifdef __AVX512F__
        for (; i + 16 <= n; i += 16) {
            __m512i x = _mm512_loadu_si512(from + i);
            __mmask16 keep = _mm512_cmpge_epi32_mask(x, c) ^ (raise ? 0 : 0xffff);
            _mm512_storeu_si512(rest + kept, _mm512_maskz_compress_epi32(keep, x));
            kept += __builtin_popcount(keep);
        }
#endif
        for (; i < n; i++) {
            int32_t x = from[i];
            rest[kept] = x;
            kept += (x >= candidate) == raise;
        }
        from = rest, n = kept;
    }
    return threshold;
}

// Positions of the k largest of n > k scores, ascending; ties go to the lower position; NaN is a tie with -infinity.
// `order` has room for twice n and 32 more.
static void topk_row(const float* scores, i64 n, i64 k, i64 first, i64* out, int32_t* order) {
    for (i64 i = 0; i < n; i++) {
        float x = scores[i];
        int32_t u;
        x = x + 0.0f;  // -0 becomes +0
        memcpy(&u, &x, 4);
        u = u ^ ((u >> 31) & 0x7fffffff);
        order[i] = x == x ? u : int32_t(0x807fffff);  // that of -infinity
    }
    int32_t threshold = kth_largest(order, n, k);
    i64 above = 0;
    for (i64 i = 0; i < n; i++) above += order[i] > threshold;
    i64 ties = k - above, filled = 0;
    for (i64 i = 0; i < n && filled < k; i++) {
        bool tie = order[i] == threshold;
        bool take = order[i] > threshold || (tie && ties > 0);
        out[filled] = first + i;
        filled += take;
        ties -= tie && take;
    }
}

// Neighbouring queries of one sequence that share the tiles of its keys.
struct Block {
    i64 first, last, sequence;
};

template <class T>
static std::vector<Block> blocks_of(const Lines<T>& keys, i64 queries, i64 most) {
    std::vector<Block> blocks;
    for (i64 r = 0; r < queries; r++) {
        i64 own = keys.sequence(r);
        if (!blocks.empty() && blocks.back().sequence == own && r - blocks.back().first < most)
            blocks.back().last = r + 1;
        else
            blocks.push_back({r, r + 1, own});
    }
    return blocks;
}

template <class T>
static void select(const T* q, const Lines<T>& keys, const float* w, const i64* start, const i64* end, i64* out,
                   i64 queries, i64 J, i64 d, i64 K, float scale) {
    const i64 QB = 32;
    i64 S = 1, lines = 1;
    for (i64 i = 0; i < queries; i++) S = std::max(S, end[i]);
    i64 tiles = (S + TILE - 1) / TILE, width = tiles * TILE;
    std::vector<Block> blocks = blocks_of(keys, queries, QB);
    i64 tasks = blocks.size();
    for (const Block& block : blocks) lines = std::max(lines, block.last - block.first);
    i64 group = std::max<i64>(1, std::min<i64>(tasks, (i64(1) << 22) / (lines * width)));
    // Few queries against many keys (decode): the key tiles are what threads share.
    i64 parts = tasks < 8 ? std::min<i64>(tiles, 8) : 1;
    auto scores = floats(group * lines * width);
    for (i64 g = 0; g < tasks; g += group) {
        i64 here = std::min(group, tasks - g);
#pragma omp parallel if (queries * S * J * d > SHARED)
        {
            auto tile = floats(d * TILE), qf = floats(lines * J * d), wf = floats(lines * J);
            std::unique_ptr<int32_t[]> order(new int32_t[2 * width + 32]);
#pragma omp for schedule(dynamic, 1)
            for (i64 item = 0; item < here * parts; item++) {
                i64 task = g + item / parts, part = item % parts;
                Block block = blocks[task];
                i64 low = width, high = 0;
                for (i64 r = block.first; r < block.last; r++) {
                    i64 line = r - block.first;
                    if (end[r] - start[r] <= K) continue;
                    low = std::min(low, start[r]);
                    high = std::max(high, end[r]);
                    for (i64 i = 0; i < J * d; i++) qf[line * J * d + i] = load(q + r * J * d + i);
                    for (i64 j = 0; j < J; j++) wf[line * J + j] = w[r * J + j] * scale;
                }
                if (low >= high) continue;
                i64 first = low / TILE, last = (high + TILE - 1) / TILE;
                i64 from = first + (last - first) * part / parts, to = first + (last - first) * (part + 1) / parts;
                for (i64 tl = from; tl < to; tl++) {
                    i64 s0 = tl * TILE, count = std::min<i64>(TILE, high - s0);
                    transpose_tile(keys.at(block.sequence, s0), count, d, tile.get());
                    for (i64 r = block.first; r < block.last; r++) {
                        i64 line = r - block.first;
                        if (end[r] - start[r] <= K || end[r] <= s0 || start[r] >= s0 + TILE) continue;
                        tile_scores(&qf[line * J * d], &wf[line * J], tile.get(), J, d,
                                    &scores[((task - g) * lines + line) * width + s0]);
                    }
                }
            }
#pragma omp for schedule(dynamic, 16)
            for (i64 item = 0; item < here * lines; item++) {
                Block block = blocks[g + item / lines];
                i64 r = block.first + item % lines;
                if (r >= block.last) continue;
                i64 n = end[r] - start[r];
                i64* to = out + r * K;
                if (n <= K)
                    for (i64 i = 0; i < n; i++) to[i] = start[r] + i;
                else
                    topk_row(&scores[item * width + start[r]], n, K, start[r], to, order.get());
                for (i64 i = std::min(n, K); i < K; i++) to[i] = -1;
            }
        }
    }
}

// Scores of chosen keys: out[r, k] = sum_j w[r, j] * relu(q[r, j] . key * scale); empty slots give 0.
template <class T>
static void selected(const T* q, const T* keys, const float* w, const i64* indices, float* out, i64 B, i64 Q, i64 S,
                     i64 J, i64 d, i64 K, float scale) {
    i64 dp = up16(d), Kp = up16(K), Jp = (J + 3) / 4 * 4;
#pragma omp parallel
    {
        std::vector<float> qf(Jp * dp), picked(Kp * dp), dots(Jp * Kp);
#pragma omp for schedule(dynamic, 8)
        for (i64 r = 0; r < B * Q; r++) {
            const i64* index = indices + r * K;
            i64 n = filled(index, K);
            for (i64 j = 0; j < J; j++) widen(q + (r * J + j) * d, &qf[j * dp], d, dp);
            gather(keys + r / Q * S * d, index, n, d, dp, picked.data());
            for (i64 k = 0; k < n; k += 4)
                for (i64 j = 0; j < Jp; j += 4) dots4x4(&qf[j * dp], &picked[k * dp], dp, dp, scale, &dots[j * Kp + k], Kp);
            for (i64 k = 0; k < K; k += 16) {
                v16 sum = {};
                for (i64 j = 0; j < J; j++) {
                    v16 x = at(&dots[j * Kp + k]);
                    sum += w[r * J + j] * (x < 0.0f ? v16{} : x);
                }
                for (i64 i = 0; i < 16 && k + i < K; i++) out[r * K + k + i] = k + i < n ? sum[i] : 0.0f;
            }
        }
    }
}

template <class T>
static void selected_backward(const T* q, const T* keys, const float* w, const i64* indices, const float* grad,
                              T* grad_q, float* grad_keys, float* grad_w, i64 B, i64 Q, i64 S, i64 J, i64 d, i64 K,
                              float scale) {
    i64 dp = up16(d), Kp = up16(K), Jp = (J + 3) / 4 * 4, parts = parts_of(B);
    std::vector<float> sums(B * parts * S * dp, 0.0f);
#pragma omp parallel
    {
        std::vector<float> qf(Jp * dp), picked(Kp * dp), dots(Jp * Kp), acc(Jp * dp), g(Kp);
#pragma omp for schedule(dynamic, 1)
        for (i64 item = 0; item < B * parts; item++) {
            i64 b = item / parts, part = item % parts;
            float* sum = &sums[item * S * dp];
            for (i64 t = Q * part / parts; t < Q * (part + 1) / parts; t++) {
                i64 r = b * Q + t;
                const i64* index = indices + r * K;
                i64 n = filled(index, K);
                for (i64 k = 0; k < Kp; k++) g[k] = k < n ? grad[r * K + k] : 0.0f;
                for (i64 j = 0; j < J; j++) widen(q + (r * J + j) * d, &qf[j * dp], d, dp);
                gather(keys + b * S * d, index, n, d, dp, picked.data());
                for (i64 k = 0; k < n; k += 4)
                    for (i64 j = 0; j < Jp; j += 4)
                        dots4x4(&qf[j * dp], &picked[k * dp], dp, dp, scale, &dots[j * Kp + k], Kp);
                for (i64 j = 0; j < J; j++) {  // dots become their own gradients
                    v16 along = {}, weight = splat(w[r * J + j] * scale);
                    for (i64 k = 0; k < up16(n); k += 16) {
                        v16 x = at(&dots[j * Kp + k]), gk = at(&g[k]);
                        along += x > 0.0f ? gk * x : v16{};
                        at(&dots[j * Kp + k]) = x > 0.0f ? gk * weight : v16{};
                    }
                    grad_w[r * J + j] = hsum(along);
                }
                mix(dots.data(), Kp, picked.data(), dp, n, acc.data(), J, dp);
                for (i64 j = 0; j < J; j++)
                    for (i64 i = 0; i < d; i += 16) store16(grad_q + (r * J + j) * d + i, at(&acc[j * dp + i]), d - i);
                for (i64 k = 0; k < n; k += 4) {
                    float* to[4];  // slots behind the last one have no gradient: adding them to row 0 changes nothing
                    for (i64 s = 0; s < 4; s++) to[s] = sum + index[k + s < n ? k + s : 0] * dp;
                    for (i64 i = 0; i < dp; i += 16) {
                        v16 x[4] = {};
                        for (i64 j = 0; j < J; j++) {
                            v16 qj = at(&qf[j * dp + i]);
                            const float* dj = &dots[j * Kp + k];
#pragma GCC unroll 4
                            for (int s = 0; s < 4; s++) x[s] += dj[s] * qj;
                        }
                        for (int s = 0; s < 4; s++) at(to[s] + i) += x[s];
                    }
                }
            }
        }
#pragma omp for schedule(static)
        for (i64 line = 0; line < B * S; line++)
            for (i64 i = 0; i < d; i++) {
                float total = 0.0f;
                for (i64 part = 0; part < parts; part++)
                    total += sums[((line / S * parts + part) * S + line % S) * dp + i];
                grad_keys[line * d + i] = total;
            }
    }
}
