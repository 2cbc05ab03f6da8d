// Every family of kernels but decoding (see decode_fuzz.cpp) on random shapes in buffers of exactly their size, for a build
// with -fsanitize=address,undefined. Selection is also compared: its keys must not depend on what shares the call.
#include <cstdio>
#include <random>
#include <string>

#include "product.h"
#include "softmax.h"
#include "step.h"

static std::mt19937_64 source;
static i64 pick(i64 low, i64 high) { return low + i64(source() % uint64_t(high - low + 1)); }
static float normal() { return std::normal_distribution<float>()(source); }

template <class T>
using Vec = std::vector<T>;

template <class T>
static Vec<T> numbers(i64 n, float scale = 1.0f) {
    Vec<T> found(n);
    for (T& x : found) store(&x, normal() * scale);
    return found;
}

// Sequences of keys [count, width]: one after the other, or in pages of a pool, plain or packed.
template <class T>
struct Keys {
    Vec<T> plain;
    Vec<char> bytes;
    Vec<i64> table, rows;
    Lines<T> lines;

    Keys(i64 sequences, i64 length, i64 queries, i64 width, i64 packed, bool paged, const Vec<T>& values) {
        i64 pages = (length + 63) / 64, slots = paged ? (sequences * pages + 1) * 64 : sequences * length;
        if (paged) {
            for (i64 i = 0; i < sequences * pages; i++) table.push_back(i + 1);
            std::shuffle(table.begin(), table.end(), source);
            for (i64 r = 0; r < sequences * queries; r++) rows.push_back(r / queries);
        }
        lines = {nullptr, paged ? rows.data() : nullptr, paged ? table.data() : nullptr, pages, paged ? 6 : 63,
                 paged ? 64 : length, queries, width, packed};
        plain.resize(packed ? 0 : slots * width), bytes.resize(packed ? slots * lines.bytes() : 0);
        lines.data = packed ? (const T*)bytes.data() : plain.data();
        for (i64 own = 0; own < sequences; own++)
            for (i64 s = 0; s < length; s++) {
                const T* from = &values[(own * length + s) * width];
                if (packed)
                    pack_row(from, packed, width - packed, (char*)lines.place(own, s));
                else
                    std::copy_n(from, width, (T*)lines.at(own, s));
            }
    }
};

template <class T>
static int select_case() {
    i64 J = pick(1, 9), d = pick(0, 1) ? 16 * pick(1, 5) : pick(1, 70), B = pick(1, 3), Q = pick(0, 2) ? pick(1, 90) : pick(90, 200);
    i64 S = pick(0, 1) ? pick(1, 300) : pick(300, 900), K = pick(0, 1) ? pick(1, 20) : pick(1, S), kind = pick(0, 7);
    bool paged = pick(0, 1);
    float scale = kind == 1 ? 1e-25f : kind == 2 ? 1e17f : 1.0f;
    Vec<T> q = numbers<T>(B * Q * J * d, scale), k = numbers<T>(B * S * d, kind == 3 ? 1e-30f : scale);
    Vec<float> w = numbers<float>(B * Q * J, kind == 4 ? 1e20f : 1.0f);
    if (kind == 5)  // ties everywhere
        for (auto* x : {&q, &k})
            for (T& y : *x) store(&y, float(pick(-1, 1)));
    if (kind == 6)
        for (i64 i = 0; i < 20; i++) {
            store(&q[pick(0, q.size() - 1)], pick(0, 1) ? NAN : INFINITY), store(&k[pick(0, k.size() - 1)], pick(0, 1) ? NAN : -INFINITY);
        }
    if (kind == 7)  // queries along one direction: the bound is as loose as it gets
        for (size_t i = d; i < q.size(); i++) store(&q[i], load(&q[i % d]) * (1.0f + 0.01f * normal()));
    Keys<T> keys(B, S, Q, d, pick(0, 2) ? 0 : d, paged, k);
    Vec<i64> start(B * Q), end(B * Q), out(B * Q * K), alone(K), rows(1);
    for (i64 r = 0; r < B * Q; r++) start[r] = pick(0, 3) ? 0 : pick(0, S - 1), end[r] = pick(0, 1) ? S : pick(start[r], S);
    select(q.data(), keys.lines, w.data(), start.data(), end.data(), out.data(), B * Q, J, d, K, 0.3f);
    for (i64 r = 0; r < B * Q; r += pick(1, 9)) {
        Lines<T> own = keys.lines;
        rows[0] = r / Q;
        if (paged) own.rows = rows.data();
        if (!paged) own.data = (const T*)((const char*)own.data + r / Q * S * own.bytes());
        select(&q[r * J * d], own, &w[r * J], &start[r], &end[r], alone.data(), 1, J, d, K, 0.3f);
        if (!std::equal(alone.begin(), alone.end(), &out[r * K])) return 1 + int(kind);
    }
    return 0;
}

template <class T>
static int attend_case() {
    i64 N = pick(1, 6), R = pick(0, 20), C = pick(1, 70), W = C + R, B = pick(1, 3), Q = pick(1, 20), S = pick(1, 200);
    i64 K = pick(1, 90);
    Vec<T> q = numbers<T>(B * Q * N * W), k = numbers<T>(B * S * W), out(B * Q * N * C), grad = numbers<T>(B * Q * N * C), grad_q(q.size());
    Vec<i64> indices(B * Q * K, -1);
    for (i64 r = 0; r < B * Q; r++)
        for (i64 i = 0, n = pick(0, K); i < n; i++) indices[r * K + i] = pick(0, S - 1);
    Vec<float> target(B * Q * K), grad_k(k.size());
    bool packed = !pick(0, 2);
    Keys<T> keys(B, S, Q, W, packed ? C : 0, pick(0, 1), k);
    attend(q.data(), keys.lines, indices.data(), out.data(), pick(0, 1) ? target.data() : nullptr, B, Q, N, W, C, K, 0.2f);
    attend_backward(q.data(), k.data(), indices.data(), grad.data(), grad_q.data(), grad_k.data(), B, Q, S, N, W, C, K, 0.2f);
    i64 J = N, d = W;
    Vec<float> w = numbers<float>(B * Q * J), scores(B * Q * K), grad_w(w.size());
    selected(q.data(), k.data(), w.data(), indices.data(), scores.data(), B, Q, S, J, d, K, 0.3f);
    selected_backward(q.data(), k.data(), w.data(), indices.data(), scores.data(), grad_q.data(), grad_k.data(), grad_w.data(), B, Q, S,
                      J, d, K, 0.3f);
    return 0;
}

template <class T>
static int row_case() {
    i64 M = pick(1, 40), D = pick(1, 90), H = pick(1, 4), R = 2 * pick(1, 8), offset = pick(0, 9), width = offset + R + pick(0, 5);
    Vec<T> x = numbers<T>(M * D), weight = numbers<T>(D), out(M * D), grad = numbers<T>(M * D);
    Vec<float> inverse(M), grad_weight(D);
    rms_norm(x.data(), weight.data(), out.data(), inverse.data(), M, D, D, 1e-5f);
    rms_norm_backward(x.data(), weight.data(), grad.data(), inverse.data(), out.data(), grad_weight.data(), M, D, D);
    Vec<T> pair = numbers<T>(M * 2 * D), both(M * 2 * D);
    swiglu(pair.data(), out.data(), M, D);
    swiglu_backward(pair.data(), grad.data(), both.data(), M, D);
    Vec<T> y = numbers<T>(M * H * width), z(y.size());
    Vec<float> cos = numbers<float>(M * R / 2), sin = numbers<float>(M * R / 2);
    rope(y.data(), z.data(), cos.data(), sin.data(), M, H, width, H * width, width, offset, R, 1.0f);
    i64 B = pick(1, 2), heads = pick(1, 3), G = B * heads, t = pick(1, 12), n = pick(1, 70), length = t + pick(0, 5);
    i64 first = pick(0, length - t), low = pick(0, 3);
    Vec<T> scores = numbers<T>(G * t * n), d = numbers<T>(G * t * n);
    Vec<i64> start(B * length), end(B * length);
    for (i64 i = 0; i < B * length; i++) start[i] = pick(-3, low + n + 9), end[i] = pick(-3, low + 2 * n);
    Vec<float> lse(2 * G * length);
    range_softmax(scores.data(), start.data(), end.data(), lse.data(), G, heads, t, n, length, first, low, 0.5f);
    range_softmax_backward(scores.data(), d.data(), start.data(), end.data(), lse.data(), G, heads, t, n, length, first, low, 0.5f);
    i64 V = pick(1, 90);
    Vec<T> logits = numbers<T>(M * V);
    Vec<float> sums(M), entropy(M), up = numbers<float>(M);
    Vec<i64> targets(M);
    for (i64& target : targets) target = pick(0, V - 1);
    logsumexp(logits.data(), sums.data(), pick(0, 1) ? entropy.data() : nullptr, M, V, 0.7f);
    nll_backward(logits.data(), sums.data(), targets.data(), up.data(), M, V, 0.7f);
    i64 top = pick(1, 5);
    Vec<T> rows = numbers<T>(M * top * D), sum(M * D), grad_rows(rows.size());
    Vec<i64> slots(M * top);
    for (i64 i = 0; i < M * top; i++) slots[i] = i;
    std::shuffle(slots.begin(), slots.end(), source);
    Vec<float> weights = numbers<float>(M * top), grad_weights(M * top);
    combine(rows.data(), slots.data(), weights.data(), sum.data(), M, top, D);
    combine_backward(rows.data(), slots.data(), weights.data(), grad.data(), grad_rows.data(), grad_weights.data(), M, top, D);
    return 0;
}

template <class T>
static int product_case() {
    i64 M = pick(1, 80), N = pick(1, 90), K = pick(1, 140), threads = pick(1, 3);
    Vec<T> x = numbers<T>(M * K), w = numbers<T>(N * K), out(M * N), again(M * K), back = numbers<T>(K * N), both = numbers<T>(2 * N * K);
    Vec<float> wide(M * N);
    thin_linear(x.data(), w.data(), out.data(), M, N, K, threads);
    thin_linear(x.data(), w.data(), wide.data(), M, N, K, threads);
    FeedForward<T> f{};
    f.shared_up = {both.data(), {}}, f.shared_down = {back.data(), {}}, f.S = N;
    thin_feed_forward(x.data(), f, again.data(), M, K, threads);
    i64 bits = pick(0, 1) ? 8 : 4, E = pick(1, 4);
    Vec<i64> bounds(E + 1, M);
    bounds[0] = 0;
    for (i64 e = 1; e < E; e++) bounds[e] = pick(bounds[e - 1], M);
    i64 deep = pick(0, 3) ? K : pick(500, 1100), form = pick(0, 7), own = form & 4 ? 1 : E;
    Vec<T> rows = numbers<T>(own * M * deep), columns = numbers<T>(E * N * deep), product_of(own * M * N);
    product(rows.data(), columns.data(), product_of.data(), form & 4 ? bounds.data() : nullptr, E, M, N, deep, M * deep,
            form & 1 ? 1 : deep, form & 1 ? M : 1, N * deep, form & 2 ? 1 : deep, form & 2 ? N : 1, threads);
    if (bits == 4) K = pick(0, 1) ? 128 * pick(1, 2) : 8 * pick(1, 12);
    i64 groups = bits == 4 && K % 128 == 0 && pick(0, 1) ? K / 128 : 1;
    x = numbers<T>(M * K);
    Vec<uint8_t> values(E * up16(N) / 16 * IntegerMatrix::line(K, bits));
    for (uint8_t& v : values) v = uint8_t(source());
    Vec<float> scales(E * up16(N) * groups, 0.01f);
    Vec<int> sums(E * up16(N));
    integer_product(x.data(), IntegerMatrix{values.data(), scales.data(), bits == 8 ? sums.data() : nullptr, bits, groups}, bounds.data(),
                    out.data(), M, N, K, E, threads);
    return 0;
}

int main(int, char** arguments) {
    struct Family {
        const char* name;
        int (*fp32)();
        int (*narrow)();
    };
    for (Family family : {Family{"select", select_case<float>, select_case<bf16>}, Family{"attend", attend_case<float>, attend_case<bf16>},
                          Family{"rows", row_case<float>, row_case<bf16>}, Family{"products", product_case<float>, product_case<bf16>}})
        for (i64 round = 0; round < atoi(arguments[1]); round++) {
            source.seed(round);
            int bad = round % 2 ? family.fp32() : family.narrow();
            if (bad) return printf("%s, case %ld: %d\n", family.name, long(round), bad), 1;
        }
    return puts("well"), 0;
}
