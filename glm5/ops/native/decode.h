// Forms for a handful of tokens, up to a whole decoding step of one layer: fetching weights is what takes time.
#pragma once

#include "attention.h"
#include "elementwise.h"
#include "indexer.h"

// Sixteen dot products: lane r = w[r * stride ...] . x over K elements (rows past `count` give 0). Meanwhile the sixteen
// rows behind are asked for: fetching is what takes time.
template <class T>
static inline v16 dots16(const T* w, i64 stride, i64 count, const float* x, i64 K) {
    v16 acc[16] = {};
    if (count == 16 && K % 16 == 0) {
        const char* next = (const char*)(w + 16 * stride);
        for (i64 i = 0; i < K; i += 16) {
            v16 xi = at(x + i);
            for (i64 line = 0; line < i64(256 * sizeof(T)); line += 64) __builtin_prefetch(next + line);
            next += 256 * sizeof(T);
#pragma GCC unroll 16
            for (int r = 0; r < 16; r++) acc[r] += xi * load16(w + r * stride + i);
        }
    } else {
        for (i64 r = 0; r < count; r++)
            for (i64 i = 0; i < K; i += 16) acc[r] += at(x + i) * load16(w + r * stride + i, K - i);
    }
    return hsum16(acc);
}

// y [rows, 16] = x [rows, Kp] times up to 16 rows of w, each K long. From four rows on, w is widened once for all of them,
// into `scratch` [16, Kp].
template <class T>
static inline void tile16(const T* w, i64 count, i64 K, const float* x, i64 rows, float* scratch, float* y) {
    i64 Kp = up16(K);
    if (rows < 4) {
        for (i64 m = 0; m < rows; m++) at(y + 16 * m) = dots16(w, K, count, x + m * Kp, K);
        return;
    }
    for (i64 r = 0; r < 16; r++) {
        if (r < count)
            widen(w + r * K, scratch + r * Kp, K, Kp);
        else
            std::fill_n(scratch + r * Kp, Kp, 0.0f);
    }
    for (i64 m = 0; m < rows; m += 4) {
        i64 from = std::min(m, rows - 4);  // the last four may overlap those before
        for (i64 r = 0; r < 16; r += 4) dots4x4(x + from * Kp, scratch + r * Kp, Kp, Kp, 1.0f, y + 16 * from + r, 16);
    }
}

// out [M, N] = x [M, K] w [N, K]^T for a handful of rows, where fetching w is what takes time.
template <class T, class O>
static void thin_linear(const T* x, const T* w, O* out, i64 M, i64 N, i64 K) {
    i64 Kp = up16(K);
    auto wide = floats(M * Kp);
    for (i64 m = 0; m < M; m++) widen(x + m * K, &wide[m * Kp], K, Kp);
#pragma omp parallel if ((M + 3) / 4 * N * K > SHARED)
    {
        auto scratch = floats(16 * Kp), y = floats(16 * M);
#pragma omp for schedule(static)
        for (i64 n = 0; n < N; n += 16) {
            i64 count = std::min<i64>(16, N - n);
            tile16(w + n * K, count, K, wide.get(), M, scratch.get(), y.get());
            for (i64 m = 0; m < M; m++) store16(out + m * N + n, at(&y[16 * m]), count);
        }
    }
}

// Routed experts for a handful of tokens: out[m] = sum_k weights[m, k] * down[e] (silu(gate[e] x) * (up[e] x)). Weights
// are fetched once for all tokens of an expert, 16 rows at a time.
template <class T>
static void thin_experts(const T* x, const T* gate_up, const T* down, const i64* experts, const float* weights, T* out,
                         i64 M, i64 top, i64 D, i64 I) {
    i64 Dp = up16(D), Ip = up16(I), slots = M * top;
    std::vector<i64> order(slots), first;  // slots by expert, and where each expert's begin
    for (i64 s = 0; s < slots; s++) order[s] = s;
    std::stable_sort(order.begin(), order.end(), [&](i64 a, i64 b) { return experts[a] < experts[b]; });
    i64 most = 0;
    for (i64 s = 0; s < slots; s++)
        if (!s || experts[order[s]] != experts[order[s - 1]]) first.push_back(s);
    first.push_back(slots);
    i64 groups = first.size() - 1, ups = Ip / 16, downs = Dp / 16;
    for (i64 g = 0; g < groups; g++) most = std::max(most, first[g + 1] - first[g]);
    // Rows in the order of `order`: those of one expert lie side by side.
    auto wide = floats(slots * Dp), parts = floats(slots * Dp), inner = floats(slots * Ip);
#pragma omp parallel if (slots * 3 * D * I > SHARED)
    {
        auto scratch = floats(16 * std::max(Dp, Ip)), y = floats(16 * most), z = floats(16 * most);
#pragma omp for schedule(static)
        for (i64 s = 0; s < slots; s++) widen(x + order[s] / top * D, &wide[s * Dp], D, Dp);
#pragma omp for schedule(static)
        for (i64 item = 0; item < groups * ups; item++) {
            i64 group = item / ups, i = item % ups * 16, count = std::min<i64>(16, I - i);
            i64 begin = first[group], rows = first[group + 1] - begin;
            const T* gate = gate_up + (experts[order[begin]] * 2 * I + i) * D;
            tile16(gate, count, D, &wide[begin * Dp], rows, scratch.get(), y.get());
            tile16(gate + I * D, count, D, &wide[begin * Dp], rows, scratch.get(), z.get());
            for (i64 r = 0; r < rows; r++) {
                v16 g = at(&y[16 * r]), u = at(&z[16 * r]);
                at(&inner[(begin + r) * Ip + i]) = weights[order[begin + r]] * g / (1.0f + exp16(-g)) * u;
            }
        }
#pragma omp for schedule(static)
        for (i64 item = 0; item < groups * downs; item++) {
            i64 group = item / downs, d = item % downs * 16, count = std::min<i64>(16, D - d);
            i64 begin = first[group], rows = first[group + 1] - begin;
            tile16(down + (experts[order[begin]] * D + d) * I, count, I, &inner[begin * Ip], rows, scratch.get(), y.get());
            for (i64 r = 0; r < rows; r++) at(&parts[order[begin + r] * Dp + d]) = at(&y[16 * r]);
        }
#pragma omp for schedule(static)
        for (i64 item = 0; item < M * downs; item++) {
            i64 m = item / downs, d = item % downs * 16;
            v16 sum = {};
            for (i64 k = 0; k < top; k++) sum += at(&parts[(m * top + k) * Dp + d]);
            store16(out + m * D + d, sum, D - d);
        }
    }
}

// Queries in latent space, q [M, N, H + R] -> out [M, N, C + R]: the first H values times W_UK [H, C] of their head, the
// others rotated. W_UK of head n is rows n * step .. n * step + H of w.
template <class T>
static void thin_absorb(const T* q, const T* w, const float* cos, const float* sin, T* out, i64 M, i64 N, i64 H, i64 R,
                        i64 C, i64 step) {
#pragma omp parallel for schedule(static) if (M * N * H * C > SHARED)
    for (i64 n = 0; n < N; n++)
        for (i64 m = 0; m < M; m++) {
            const T *from = q + (m * N + n) * (H + R), *up = w + n * step * C;
            T* to = out + (m * N + n) * (C + R);
            for (i64 c = 0; c < C; c += 16) {
                v16 sum = {};
                for (i64 i = 0; i < H; i++) sum += load(from + i) * load16(up + i * C + c, C - c);
                store16(to + c, sum, C - c);
            }
            for (i64 i = 0; i < R / 2; i++) {
                float a = load(from + H + 2 * i), b = load(from + H + 2 * i + 1);
                float x = cos[m * (R / 2) + i], y = sin[m * (R / 2) + i];
                store(to + C + 2 * i, a * x - b * y);
                store(to + C + 2 * i + 1, a * y + b * x);
            }
        }
}

// Latent outputs [M, N, C] -> values [M, N, V]; W_UV of head n is rows n * step .. n * step + V of w [.., C].
template <class T>
static void thin_values(const T* x, const T* w, T* out, i64 M, i64 N, i64 C, i64 V, i64 step) {
    i64 Cp = up16(C);
    auto wide = floats(M * N * Cp);
    for (i64 r = 0; r < M * N; r++) widen(x + r * C, &wide[r * Cp], C, Cp);
#pragma omp parallel for schedule(static) if (M * N * V * C > SHARED)
    for (i64 n = 0; n < N; n++)
        for (i64 v = 0; v < V; v += 16)
            for (i64 m = 0; m < M; m++) {
                i64 count = std::min<i64>(16, V - v);
                v16 y = dots16(w + (n * step + v) * C, C, count, &wide[(m * N + n) * Cp], C);
                store16(out + (m * N + n) * V + v, y, count);
            }
}

// Router: logits [M, E] -> the `top` experts with the highest sigmoid + bias (ties to the lower number), ascending, and
// their sigmoids, divided by their sum if `normalise`, times `scaling`.
static void route(const float* logits, const float* bias, i64* experts, float* weights, i64 M, i64 E, i64 top,
                  i64 normalise, float scaling) {
    std::vector<float> biased(E), score(up16(E));
    std::vector<int32_t> order(up16(E));
    for (i64 m = 0; m < M; m++) {
        for (i64 e = 0; e < E; e += 16) at(&score[e]) = 1.0f / (1.0f + exp16(-load16(logits + m * E + e, E - e)));
        for (i64 e = 0; e < E; e++) biased[e] = score[e] + bias[e];
        i64* to = experts + m * top;
        topk_row(biased.data(), E, top, 0, to, order.data());
        float sum = 1e-20f;
        for (i64 k = 0; k < top; k++) sum += score[to[k]];
        for (i64 k = 0; k < top; k++) weights[m * top + k] = score[to[k]] * scaling / (normalise ? sum : 1.0f);
    }
}

template <class T>
static void thin_mlp(const T* x, const T* gate_up, const T* down, T* out, i64 M, i64 D, i64 I) {
    std::vector<i64> chosen(M, 0);
    std::vector<float> weights(M, 1.0f);
    thin_experts(x, gate_up, down, chosen.data(), weights.data(), out, M, 1, D, I);
}

// Router, routed experts and shared expert of a handful of tokens.
template <class T>
static void thin_moe(const T* x, const T* gate, const float* bias, const T* gate_up, const T* down, const T* shared_up,
                     const T* shared_down, T* out, i64 M, i64 D, i64 E, i64 top, i64 I, i64 shared, i64 normalise,
                     float scaling) {
    i64 Dp = up16(D);
    auto wide = floats(M * Dp), scratch = floats(16 * Dp), y = floats(16 * M), logits = floats(M * up16(E));
    std::vector<float> weights(M * top);
    std::vector<i64> chosen(M * top);
    std::vector<T> extra(M * D);
    for (i64 m = 0; m < M; m++) widen(x + m * D, &wide[m * Dp], D, Dp);
    for (i64 e = 0; e < E; e += 16) {
        tile16(gate + e * D, std::min<i64>(16, E - e), D, wide.get(), M, scratch.get(), y.get());
        for (i64 m = 0; m < M; m++) store16(&logits[m * E + e], at(&y[16 * m]), std::min<i64>(16, E - e));
    }
    route(logits.get(), bias, chosen.data(), weights.data(), M, E, top, normalise, scaling);
    thin_experts(x, gate_up, down, chosen.data(), weights.data(), out, M, top, D, I);
    if (!shared) return;
    thin_mlp(x, shared_up, shared_down, extra.data(), M, D, shared);
    for (i64 i = 0; i < M * D; i++) store(out + i, load(out + i) + load(&extra[i]));
}

template <class T>
static void layer_norm(const T* x, const T* weight, const T* bias, T* out, i64 D, float eps) {
    float mean = 0.0f, square = 0.0f;
    for (i64 i = 0; i < D; i++) mean += load(x + i);
    mean /= float(D);
    for (i64 i = 0; i < D; i++) square += (load(x + i) - mean) * (load(x + i) - mean);
    float r = 1.0f / std::sqrt(square / float(D) + eps);
    for (i64 i = 0; i < D; i++) store(out + i, (load(x + i) - mean) * r * load(weight + i) + load(bias + i));
}

// Where a batch of new tokens stands in the cache: see `Lines`; `slots` [M] is where each leaves its own latent, and its
// keys lie in start .. end - 1.
struct Places {
    const float *cos, *sin;
    const i64 *slots, *rows, *table, *start, *end;
};

// Sizes of MLA with DSA: tokens, hidden, query rank, heads, nope, rope, latent, value, indexer heads and width, selected
// slots; then the page table's.
struct Shape {
    i64 M, D, L, N, H, R, C, V, J, d, K, per_row, shift, size;
};

// One layer's attention in absorbed form: the same steps as MLA.forward, writing latents and index keys into their slots
// of the cache and reading the selected rows from there. `weights` names q_a, q_norm, q_b, kv_a, kv_norm, kv_b, o, then
// the indexer's wq, wk, k_norm weight and bias, weights_proj, then latents and index keys of the layer. Without an indexer
// (wq null), `indices` are an input, else an output.
template <class T>
static void thin_mla(const T* x, const T* const* weights, const Places& at_, const Shape& s, i64* indices, T* out, float eps,
                     float scale) {
    const T *q_a = weights[0], *q_norm = weights[1], *q_b = weights[2], *kv_a = weights[3], *kv_norm = weights[4],
            *kv_b = weights[5], *o = weights[6], *wq = weights[7], *wk = weights[8], *k_weight = weights[9],
            *k_bias = weights[10], *w_proj = weights[11];
    T *latents = (T*)weights[12], *index_keys = (T*)weights[13];
    const float *cos = at_.cos, *sin = at_.sin;
    i64 M = s.M, D = s.D, L = s.L, N = s.N, H = s.H, R = s.R, C = s.C, V = s.V, J = s.J, d = s.d, W = C + R;
    std::vector<T> low(M * L), latent_q(M * L), q(M * N * (H + R)), kv(M * W), absorbed(M * N * W), mixed(M * N * C),
        values(M * N * V);
    thin_linear(x, q_a, low.data(), M, L, D);
    rms_norm(low.data(), q_norm, latent_q.data(), (float*)nullptr, M, L, L, eps);
    thin_linear(latent_q.data(), q_b, q.data(), M, N * (H + R), L);
    thin_linear(x, kv_a, kv.data(), M, W, D);
    for (i64 m = 0; m < M; m++) {
        T* to = latents + at_.slots[m] * W;
        const float *c = cos + m * (R / 2), *turn = sin + m * (R / 2);
        rms_norm(&kv[m * W], kv_norm, to, (float*)nullptr, i64(1), C, W, eps);
        rope(&kv[m * W + C], to + C, c, turn, 1, 1, R, 0, 0, 0, R, 1.0f);
    }
    if (wq) {
        std::vector<T> plain(M * J * d), turned(M * J * d), key(M * d), normed(d), w(M * J);
        std::vector<float> head_weights(M * J);
        thin_linear(latent_q.data(), wq, plain.data(), M, J * d, L);
        rope(plain.data(), turned.data(), cos, sin, M, J, d, J * d, d, 0, R, 1.0f);
        thin_linear(x, wk, key.data(), M, d, D);
        thin_linear(x, w_proj, w.data(), M, J, D);
        for (i64 i = 0; i < M * J; i++) head_weights[i] = load(&w[i]) / std::sqrt(float(J));
        for (i64 m = 0; m < M; m++) {
            layer_norm(&key[m * d], k_weight, k_bias, normed.data(), d, 1e-6f);
            T* to = index_keys + at_.slots[m] * d;
            rope(normed.data(), to, cos + m * (R / 2), sin + m * (R / 2), 1, 1, d, 0, 0, 0, R, 1.0f);
        }
        Lines<T> keys{index_keys, at_.rows, at_.table, s.per_row, s.shift, s.size, 1, d};
        select(turned.data(), keys, head_weights.data(), at_.start, at_.end, indices, M, J, d, s.K,
               1.0f / std::sqrt(float(d)));
    }
    thin_absorb(q.data(), kv_b, cos, sin, absorbed.data(), M, N, H, R, C, H + V);
    Lines<T> lines{latents, at_.rows, at_.table, s.per_row, s.shift, s.size, 1, W};
    attend(absorbed.data(), lines, indices, mixed.data(), (float*)nullptr, M, i64(1), N, W, C, s.K, scale);
    thin_values(mixed.data(), kv_b + H * C, values.data(), M, N, C, V, H + V);
    thin_linear(values.data(), o, out, M, D, N * V);
}
