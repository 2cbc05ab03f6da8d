// One layer's attention for a handful of tokens, as in decoding.
#pragma once

#include "experts.h"

// out [M, N] = x [M, K] w [N, K]^T.
template <class T, class O>
static void thin_linear(const T* x, const T* w, O* out, i64 M, i64 N, i64 K, i64 threads) {
    Team team(threads);
    Input<T> in(x, M, K);
    products<T>(team, in, K, {{{w, {}}, N}}, [&](int, i64 m, i64 n, v16 y, i64 count) { store16(out + m * N + n, y, count); });
}

template <class T>
static void thin_feed_forward(const T* x, const FeedForward<T>& f, T* out, i64 M, i64 D, i64 threads) {
    feed_forward(Team(threads), x, f, M, D, [&](i64 m, i64 d, v16 y, i64 count) { store16(out + m * D + d, y, count); });
}

template <class T>
static void layer_norm(const T* x, const T* weight, const T* bias, T* out, i64 D, float eps) {
    v16 sum = {}, square = {};
    for (i64 i = 0; i < D; i += 16) sum += load16(x + i, D - i);
    float mean = hsum(sum) / float(D);
    for (i64 i = 0; i < D; i += 16) {
        v16 y = load16(x + i, D - i, mean) - mean;
        square += y * y;
    }
    float r = 1.0f / std::sqrt(hsum(square) / float(D) + eps);
    for (i64 i = 0; i < D; i += 16) {
        v16 y = (load16(x + i, D - i) - mean) * r;
        store16(out + i, y * load16(weight + i, D - i) + load16(bias + i, D - i), D - i);
    }
}

// Where a batch of new tokens stands in the cache: see `Lines`; `slots` [M] is where each leaves its own latent, and its
// keys lie in start .. end - 1. cos and sin [M, R / 2].
struct Places {
    const float *cos, *sin;
    const i64 *slots, *rows, *table, *start, *end;
};

// Sizes of MLA with DSA: tokens, hidden, query rank, heads, nope, rope, latent, value, indexer heads and width, selected
// slots; then the page table's, and whether the cache is in int8 (see `pack_row`: latents with their rotary part as it is).
struct Shape {
    i64 M, D, L, N, H, R, C, V, J, d, K, per_row, shift, size, packed;
};

#ifdef __AVX512F__
// For queries that share keys with few others a transposed tile of keys does not pay. Here the lanes are sixteen heads, and
// keys are read as they lie, but widened: to lines of a fixed length, so that their addresses are constants.
const i64 KEY_LINE = 128;
template <class T>
static bool heads_in_lanes(const Lines<T>& keys, i64 J) {
    return !std::is_same<T, float>::value && !keys.packed && J % 16 == 0 && keys.width <= KEY_LINE;
}

// q [J, d] -> tile [J / 16][d][16].
template <class T>
static inline void head_tile(const T* q, i64 J, i64 d, float* tile) {
    for (i64 j = 0; j < J; j += 16) transpose_rows([&](i64 r) { return q + (j + r) * d; }, 16, d, tile + j * d, 16);
}

// Scores of one query against keys [64, KEY_LINE]: sum_j w[j] * relu(q[j] . key).
static inline void head_scores(const float* tile, const float* w, const float* keys, i64 J, i64 d, float* out) {
    for (i64 s = 0; s < TILE; s += 16, keys += 16 * KEY_LINE) {
        v16 total[16] = {};
        for (i64 j = 0; j < J; j += 16) {
            v16 acc[16] = {};
            for (i64 i = 0; i < d; i++) {
                v16 x = at(tile + j * d + i * 16);
#pragma GCC unroll 16
                for (int r = 0; r < 16; r++) acc[r] += x * splat(keys[r * KEY_LINE + i]);
            }
#pragma GCC unroll 16
            for (int r = 0; r < 16; r++) total[r] += at(w + j) * (acc[r] < 0.0f ? v16{} : acc[r]);
        }
        at(out + s) = hsum16(total);
    }
}
#else
const i64 KEY_LINE = 0;
template <class T>
static bool heads_in_lanes(const Lines<T>&, i64) { return false; }
template <class T>
static inline void head_tile(const T*, i64, i64, float*) {}
static inline void head_scores(const float*, const float*, const float*, i64, i64, float*) {}
#endif

// `select` for a handful of queries q [M, J, d] with head weights w [M, J]: the tiles of a sequence's keys are shared out.
template <class T>
static void select_few(const Team& team, const T* q, const Lines<T>& keys, const float* w, const i64* start,
                       const i64* end, i64* out, i64 M, i64 J, i64 d, i64 K) {
    i64 S = 1;
    for (i64 m = 0; m < M; m++) {
        i64 n = end[m] - start[m];
        if (n > K) {
            S = std::max(S, end[m]);
            continue;
        }
        for (i64 i = 0; i < K; i++) out[m * K + i] = i < n ? start[m] + i : -1;
    }
    if (S == 1) return;
    const i64 together = 4;  // tiles of an item
    i64 parts = (S + TILE * together - 1) / (TILE * together), width = parts * together * TILE, line = 2 * width + 32;
    std::vector<Block> blocks = blocks_of(keys, M, 8);
    auto scores = floats(M * width);
    bool lanes = heads_in_lanes(keys, J);
    team.each(blocks.size() * parts, J * d * TILE * together, [&](i64 item) {
        Block block = blocks[item / parts];
        i64 first = item % parts * together * TILE, last = 0;
        for (i64 m = block.first; m < block.last; m++)
            if (end[m] - start[m] > K) last = std::max(last, end[m]);
        last = std::min(last, first + together * TILE);
        if (first >= last) return;
        auto tile = floats((lanes ? KEY_LINE : d + 16) * TILE), spare = floats(keys.packed ? up16(d) * TILE : 0);
        auto wide = floats((block.last - block.first) * J * d);
        for (i64 m = block.first; m < block.last; m++) {
            float* to = &wide[(m - block.first) * J * d];
            lanes ? head_tile(&q[m * J * d], J, d, to) : widen(&q[m * J * d], to, J * d, J * d);
        }
        for (i64 s = first; s < last; s += TILE) {
            i64 count = std::min<i64>(TILE, last - s);
            if (lanes)
                for (i64 r = 0; r < TILE; r++)
                    widen(keys.at(block.sequence, s) + std::min(r, count - 1) * d, &tile[r * KEY_LINE], d, d);
            else
                key_tile(keys, block.sequence, s, count, spare.get(), tile.get());
            for (i64 m = block.first; m < block.last; m++) {
                if (end[m] - start[m] <= K || end[m] <= s || start[m] >= s + TILE) continue;
                const float* own = &wide[(m - block.first) * J * d];
                (lanes ? head_scores : tile_scores)(own, w + m * J, tile.get(), J, d, &scores[m * width + s]);
            }
        }
    });
    std::unique_ptr<int32_t[]> orders(new int32_t[M * line]);
    team.each(M, S, [&](i64 m) {
        i64 n = end[m] - start[m];
        if (n > K) topk_row(&scores[m * width + start[m]], n, K, start[m], out + m * K, &orders[m * line]);
    });
}

// Attention of M queries in latent space q [M, Np, Wp] (fp32, padded with zeros) over selected rows, in parts of `PART`
// keys: of each part and head the weighted sum of its latents [Cp], their weights' sum, and the largest score.
const i64 PART = 64;
template <class T>
static void attend_parts(const Team& team, const float* q, const Lines<T>& lines, const i64* indices, float* found, i64 M,
                         i64 N, i64 C, i64 K, float scale) {
    i64 W = lines.width, Wp = up16(W), Cp = up16(C), Np = (N + 3) / 4 * 4, parts = (K + PART - 1) / PART, line = Cp + 16;
    team.each(M * parts, PART * N * (W + C), [&](i64 item) {
        i64 m = item / parts, first = item % parts * PART, n = 0;
        const i64* index = indices + m * K + first;
        while (n < std::min(PART, K - first) && index[n] >= 0) n++;
        float* to = found + item * N * line;
        if (!n) {
            for (i64 h = 0; h < N; h++) to[h * line + Cp] = 0.0f, to[h * line + Cp + 1] = -INFINITY;
            return;
        }
        auto memory = floats((PART + Np) * Wp);
        float *picked = memory.get(), *sums = picked + PART * Wp, p[4 * PART];
        gather(lines, lines.rows[m], index, n, Wp, picked);
        for (i64 h = 0; h < Np; h += 4) {
            for (i64 j = 0; j < n; j += 4) dots4x4(q + (m * Np + h) * Wp, picked + j * Wp, Wp, Wp, scale, p + j, PART);
            for (i64 r = 0; r < std::min<i64>(4, N - h); r++) {
                float* row = p + r * PART;
                for (i64 j = n; j < up16(n); j++) row[j] = -INFINITY;
                v16 most = at(row), sum = {};
                for (i64 j = 16; j < n; j += 16) most = at(row + j) > most ? at(row + j) : most;
                float top = most[0];
                for (int i = 1; i < 16; i++) top = most[i] > top ? most[i] : top;
                for (i64 j = 0; j < n; j += 16) sum += at(row + j) = exp16(at(row + j) - top);
                to[(h + r) * line + Cp] = hsum(sum), to[(h + r) * line + Cp + 1] = top;
            }
            mix(p, PART, picked, Wp, n, sums, 4, Cp);
            for (i64 r = 0; r < std::min<i64>(4, N - h); r++) std::copy_n(sums + r * Wp, Cp, to + (h + r) * line);
        }
    });
}

// The parts of `attend_parts` for one query and head as one row of latents.
template <class E>
static inline void join_parts(const float* found, i64 parts, i64 line, i64 step, i64 C, E* out) {
    i64 Cp = up16(C);
    float top = -INFINITY, sum = 0.0f;
    for (i64 p = 0; p < parts; p++) top = std::max(top, found[p * step + Cp + 1]);
    std::vector<float> factor(parts);
    for (i64 p = 0; p < parts; p++) {
        factor[p] = found[p * step + Cp] == 0.0f ? 0.0f : std::exp(found[p * step + Cp + 1] - top);
        sum += factor[p] * found[p * step + Cp];
    }
    for (i64 c = 0; c < C; c += 16) {
        v16 total = {};
        for (i64 p = 0; p < parts; p++)
            if (factor[p] != 0.0f) total += factor[p] * at(found + p * step + c);
        store16(out + c, sum == 0.0f ? v16{} : total / sum, C - c);
    }
}

// A query of one head [H + R] in latent space: its first H values times W_UK [H, C], the others rotated.
template <class T>
static inline void absorb(const T* q, const T* up, const float* cos, const float* sin, i64 H, i64 R, i64 C, float* out) {
    for (i64 c = 0; c < C; c += 64) {
        v16 sums[4] = {};
        i64 wide = C - c;
        for (i64 i = 0; i < H; i++) {
            v16 x = splat(load(q + i));
            const T* w = up + i * C + c;
            if (wide >= 64)
                for (int k = 0; k < 4; k++) sums[k] += x * load16(w + 16 * k);
            else
                for (i64 k = 0; 16 * k < wide; k++) sums[k] += x * load16(w + 16 * k, wide - 16 * k);
        }
        for (i64 k = 0; k < 4 && 16 * k < wide; k++) store16(out + c + 16 * k, sums[k], wide - 16 * k);
    }
    for (i64 i = 0; i < R / 2; i++) {
        float a = load(q + H + 2 * i), b = load(q + H + 2 * i + 1);
        out[C + 2 * i] = a * cos[i] - b * sin[i];
        out[C + 2 * i + 1] = a * sin[i] + b * cos[i];
    }
}

// Weights of one layer's attention, and its part of the cache.
template <class T>
struct Attention {
    Weight<T> q_a, q_b, kv_a, o, wq;
    const T *q_norm, *kv_norm, *kv_b, *wk, *k_weight, *k_bias, *w_proj;
    T *latents, *index_keys;
};

// One layer's attention in absorbed form over normed tokens x [M, D]: the same steps as MLA.forward. Writes latents and
// index keys into their slots of the cache and reads the selected rows from there. Without an indexer (wk null), `indices`
// [M, K] are an input, else an output. sink(m, d, y, count) takes the output.
template <class T, class F>
static void few_attend(const Team& team, const T* x, const Attention<T>& a, const Places& p, const Shape& s, i64* indices,
                       float eps, float scale, const F& sink) {
    i64 M = s.M, D = s.D, L = s.L, N = s.N, H = s.H, R = s.R, C = s.C, V = s.V, J = s.J, d = s.d, W = C + R;
    auto low = memory<T>(M * L), latent_q = memory<T>(M * L), kv = memory<T>(M * W), key = memory<T>(M * d),
         normed = memory<T>(M * d), q = memory<T>(M * N * (H + R)), plain = memory<T>(M * J * d),
         turned = memory<T>(M * J * d), values = memory<T>(M * N * V), ready = memory<T>(s.packed ? M * W : 0);
    auto w = floats(M * J);
    i64 JN = a.wk ? J : 0, dN = a.wk ? d : 0;
    const float share = 1.0f / std::sqrt(float(J)) / std::sqrt(float(d));
    Input<T> in(x, M, D);
    products<T>(team, in, D, {{a.q_a, L}, {a.kv_a, W}, {{a.wk, {}}, dN}, {{a.w_proj, {}}, JN}},
                [&](int which, i64 m, i64 n, v16 y, i64 count) {
        if (which == 3)
            store16(&w[m * J + n], rounded16(y, x) * share, count);
        else
            store16(which == 0 ? &low[m * L + n] : which == 1 ? &kv[m * W + n] : &key[m * d + n], y, count);
    });
    team.each(M, 4 * (L + W + dN), [&](i64 m) {
        const float *cos = p.cos + m * (R / 2), *sin = p.sin + m * (R / 2);
        norm_row(&low[m * L], a.q_norm, &latent_q[m * L], L, eps);
        T* to = s.packed ? &ready[m * W] : a.latents + p.slots[m] * W;
        norm_row(&kv[m * W], a.kv_norm, to, C, eps);
        turn_row(&kv[m * W + C], to + C, cos, sin, R, R);
        if (s.packed) pack_row(to, C, R, (char*)a.latents + p.slots[m] * packed_bytes<T>(C, R));
        if (!a.wk) return;
        layer_norm(&key[m * d], a.k_weight, a.k_bias, &normed[m * d], d, 1e-6f);
        to = s.packed ? &key[m * d] : a.index_keys + p.slots[m] * d;
        turn_row(&normed[m * d], to, cos, sin, d, R);
        if (s.packed) pack_row(to, d, 0, (char*)a.index_keys + p.slots[m] * packed_bytes<T>(d, 0));
    });
    Input<T> again(latent_q.get(), M, L);
    products<T>(team, again, L, {{a.q_b, N * (H + R)}, {a.wq, JN * d}}, [&](int which, i64 m, i64 n, v16 y, i64 count) {
        store16(which ? &plain[m * J * d + n] : &q[m * N * (H + R) + n], y, count);
    });
    if (a.wk) {
        team.each(M, J * d, [&](i64 m) {
            for (i64 j = 0; j < J; j++)
                turn_row(&plain[(m * J + j) * d], &turned[(m * J + j) * d], p.cos + m * (R / 2), p.sin + m * (R / 2), d, R);
        });
        Lines<T> keys{a.index_keys, p.rows, p.table, s.per_row, s.shift, s.size, 1, d, s.packed ? d : 0};
        select_few(team, turned.get(), keys, w.get(), p.start, p.end, indices, M, J, d, s.K);
    }
    i64 Wp = up16(W), Np = (N + 3) / 4 * 4, parts = (s.K + PART - 1) / PART, line = up16(C) + 16;
    std::unique_ptr<float[]> queries(new float[M * Np * Wp]());
    auto found = floats(M * parts * N * line);
    team.each(M * N, H * C, [&](i64 item) {
        i64 m = item / N, n = item % N;
        absorb(&q[item * (H + R)], a.kv_b + n * (H + V) * C, p.cos + m * (R / 2), p.sin + m * (R / 2), H, R, C,
               &queries[(m * Np + n) * Wp]);
    });
    Lines<T> lines{a.latents, p.rows, p.table, s.per_row, s.shift, s.size, 1, W, s.packed ? C : 0};
    attend_parts(team, queries.get(), lines, indices, found.get(), M, N, C, s.K, scale);
    team.each(N, M * C * (V + parts), [&](i64 n) {
        typedef typename Operand<T>::E E;
        auto mixed = elements<T>(M, C);
        std::vector<const E*> each(M);
        float y[16 * ROWS];
        for (i64 m = 0; m < M; m++) {
            each[m] = &mixed[m * padded<T>(C)];
            join_parts(&found[(m * parts * N + n) * line], parts, line, N * line, C, &mixed[m * padded<T>(C)]);
        }
        for (i64 v = 0; v < V; v += 16)
            for (i64 m0 = 0; m0 < M; m0 += ROWS) {
                i64 here = std::min(ROWS, M - m0), count = std::min<i64>(16, V - v);
                tile16(a.kv_b + (n * (H + V) + H + v) * C, count, C, &each[m0], here, y);
                for (i64 m = 0; m < here; m++) store16(&values[((m0 + m) * N + n) * V + v], at(y + 16 * m), count);
            }
    });
    Input<T> last(values.get(), M, N * V);
    products<T>(team, last, N * V, {{a.o, D}}, [&](int, i64 m, i64 n, v16 y, i64 count) { sink(m, n, y, count); });
}
