// Fused decoding: a handful of tokens through all blocks in one call, described by one checked structure.
#pragma once

#include "decode.h"

// A tensor's first element and its number of elements.
struct Array {
    const void* data;
    i64 count;
};

// A weight: elements of the call's type, or integers (see `IntegerMatrix`) if `bits` are 8 or 4; then `count` is that of
// bytes, and `groups` the scales of a row.
struct Stored {
    const void* data;
    i64 count;
    const float* scales;
    const int* sums;
    i64 bits, groups;
};

// `slot` is the layer's place in the pool of latents, `index_slot` in that of index keys, or -1 without an indexer; `inner`
// and `shared` are the widths of feed-forward (or expert) and shared expert.
struct Layer {
    i64 slot, index_slot, has_experts, inner, shared;

    bool has_indexer() const { return index_slot >= 0; }
};

// The arguments of `fused_blocks`. glm5/ops/fused_blocks.py has the same fields in the same order.
struct FusedBlocks {
    i64 version, bytes, layers, arrays;
    const Layer* layer;
    const Stored* array;  // the weights, layer by layer, in the order in which `read_layer` takes them; then router biases
    Array x, out, latents, index_keys, cos, sin, places, rows, table, start, end;
    Shape shape;
    i64 slots, experts, per_token, normalise, threads;  // slots: tokens that a layer's pool holds
    double eps, latent_eps, scale, scaling;
};

// Reasons to refuse a call: their texts are in glm5/ops/fused_blocks.py.
enum Refusal { OK, LAYOUT, SIZES, COUNTS, MISSING, RANGES, MEMORY };

const i64 VERSION = 5;

struct LayerWeights {
    Stored w[20];
    void* pools[2];  // latents and index keys
};

template <class T>
static Weight<T> weight(const Stored& s) {
    if (!s.bits) return {(const T*)s.data, {}};
    return {nullptr, {(const uint8_t*)s.data, s.scales, s.sums, s.bits, s.groups}};
}

// Whether these are E matrices [N, K], perhaps of integers. N is that of one half for `halves` 2.
static inline bool holds(const Stored& s, i64 E, i64 N, i64 K, i64 halves = 1) {
    if (!s.bits) return s.data && s.count == E * halves * N * K;
    i64 rows = E * up16(halves * N);
    bool eight = s.bits == 8 && s.sums && s.groups == 1;
    bool four = s.bits == 4 && s.groups > 0 && K % 8 == 0 && (s.groups == 1 || K % (GROUP * s.groups) == 0);
    return (eight || four) && K <= 1 << 17 && s.data && s.scales && (halves == 1 || N % 16 == 0) &&
           s.count == rows / 16 * IntegerMatrix::line(K, s.bits);
}

// Takes arrays in their order and notices one of the wrong length.
struct Reader {
    const Stored *next, *end;
    bool good = true;

    Stored take(i64 count) { return take(next != end && !next->bits && next->data && next->count == count); }
    Stored take(i64 E, i64 N, i64 K, i64 halves = 1) { return take(next != end && holds(*next, E, N, K, halves)); }

  private:
    Stored take(bool fits) {
        good = good && fits;
        return good ? *next++ : Stored{};
    }
};

// The weights of one layer: two norms, q_a, q_norm, q_b, kv_a, kv_norm, kv_b, o; indexer's wq, wk, k_norm weight and bias,
// weights_proj; router, (its bias;) gate_up and down of the feed-forward or the experts; the same two of the shared expert.
static inline void read_layer(Reader& from, const FusedBlocks& c, const Layer& layer, LayerWeights& to) {
    const Shape& s = c.shape;
    i64 W = s.C + s.R, stack = layer.has_experts ? c.experts : 1;
    Stored none{}, *w = to.w;
    w[0] = from.take(s.D), w[1] = from.take(s.D);
    w[2] = from.take(1, s.L, s.D), w[3] = from.take(s.L), w[4] = from.take(1, s.N * (s.H + s.R), s.L);
    w[5] = from.take(1, W, s.D), w[6] = from.take(s.C), w[7] = from.take(s.N * (s.H + s.V) * s.C);
    w[8] = from.take(1, s.D, s.N * s.V);
    bool index = layer.has_indexer(), experts = layer.has_experts, shared = experts && layer.shared;
    w[9] = index ? from.take(1, s.J * s.d, s.L) : none;
    w[10] = index ? from.take(s.d * s.D) : none;
    w[11] = index ? from.take(s.d) : none, w[12] = index ? from.take(s.d) : none;
    w[13] = index ? from.take(s.J * s.D) : none;
    w[14] = experts ? from.take(c.experts * s.D) : none;
    w[16] = from.take(stack, layer.inner, s.D, 2), w[17] = from.take(stack, s.D, layer.inner);
    w[18] = shared ? from.take(1, layer.shared, s.D, 2) : none, w[19] = shared ? from.take(1, s.D, layer.shared) : none;
}

static inline bool holds(const Array& array, i64 count) { return array.data && array.count == count; }

// Whether all sizes are in bounds within which no product of them overflows.
static inline bool sane(const FusedBlocks& c) {
    const Shape& s = c.shape;
    const i64 most = 1 << 20;
    for (i64 n : {s.M, s.D, s.L, s.N, s.H, s.R, s.C, s.V, s.J, s.d, s.K, c.layers})
        if (n < 1 || n > most) return false;
    for (i64 n : {s.per_row, s.size, c.slots})
        if (n < 1 || n > (i64(1) << 40)) return false;
    if (c.threads < 1 || s.packed < 0 || s.packed > 1) return false;
    for (i64 i = 0; i < c.layers; i++) {
        const Layer& layer = c.layer[i];
        if (layer.inner < 1 || layer.inner > most || layer.shared < 0 || layer.shared > most) return false;
        if (layer.has_experts && (c.per_token < 1 || c.per_token > c.experts || c.experts > most)) return false;
    }
    return s.R % 2 == 0 && s.R <= s.d && (s.shift == 63 || (s.shift >= 6 && s.shift < 40 && s.size == i64(1) << s.shift));
}

// Whether every slot, sequence, range of keys and page lies inside the pools and the page table.
static inline bool inside(const FusedBlocks& c) {
    const Shape& s = c.shape;
    const i64 *places = (const i64*)c.places.data, *rows = (const i64*)c.rows.data, *table = (const i64*)c.table.data;
    const i64 *start = (const i64*)c.start.data, *end = (const i64*)c.end.data;
    i64 sequences = c.table.count / s.per_row, capacity = s.size * (s.shift == 63 ? 1 : s.per_row);
    for (i64 m = 0; m < s.M; m++) {
        if (places[m] < 0 || places[m] >= c.slots || rows[m] < 0 || rows[m] >= sequences) return false;
        if (start[m] < 0 || end[m] > capacity) return false;
        for (i64 p = start[m] >> s.shift; start[m] < end[m] && p <= (end[m] - 1) >> s.shift; p++) {
            i64 page = table[rows[m] * s.per_row + p];
            if (page < 0 || page >= c.slots / s.size) return false;
        }
    }
    return true;
}

template <class T>
static Refusal check(const FusedBlocks& c, std::vector<LayerWeights>& blocks) {
    if (!c.layer || !c.array || !sane(c)) return SIZES;
    const Shape& s = c.shape;
    // A layer's part of the pools, in elements; packed: in bytes.
    i64 M = s.M, latents = c.slots * (s.packed ? packed_bytes<T>(s.C, s.R) : s.C + s.R);
    i64 keys = c.slots * (s.packed ? packed_bytes<T>(s.d, 0) : s.d), unit = s.packed ? 1 : sizeof(T);
    if (!holds(c.x, M * s.D) || !holds(c.out, M * s.D) || !holds(c.cos, M * (s.R / 2)) || !holds(c.sin, M * (s.R / 2)))
        return COUNTS;
    for (const Array* array : {&c.places, &c.rows, &c.start, &c.end})
        if (!holds(*array, M)) return COUNTS;
    if (!c.table.data || c.table.count % s.per_row || !c.latents.data || !c.index_keys.data) return COUNTS;
    Reader from{c.array, c.array + c.arrays};
    for (i64 i = 0; i < c.layers; i++) {
        const Layer& layer = c.layer[i];
        read_layer(from, c, layer, blocks[i]);
        if (layer.slot < 0 || layer.index_slot < -1 || (layer.slot + 1) * latents > c.latents.count ||
            (layer.index_slot + 1) * keys > c.index_keys.count)
            return COUNTS;
        blocks[i].pools[0] = (char*)c.latents.data + layer.slot * latents * unit;
        blocks[i].pools[1] = (char*)c.index_keys.data + std::max<i64>(layer.index_slot, 0) * keys * unit;
    }
    for (i64 i = 0; i < c.layers; i++) blocks[i].w[15] = c.layer[i].has_experts ? from.take(c.experts) : Stored{};
    if (!from.good || from.next != from.end) return COUNTS;
    if (!c.layer[0].has_indexer()) return MISSING;
    return inside(c) ? OK : RANGES;
}

// Pre-norm blocks one after the other over the residual stream: x [M, D] -> out [M, D]. Writes latents and index keys.
template <class T>
static void run_blocks(const Team& team, const FusedBlocks& c, const std::vector<LayerWeights>& blocks) {
    const Shape& s = c.shape;
    Places places{(const float*)c.cos.data, (const float*)c.sin.data, (const i64*)c.places.data, (const i64*)c.rows.data,
                  (const i64*)c.table.data, (const i64*)c.start.data, (const i64*)c.end.data};
    i64 M = s.M, D = s.D;
    T* x = (T*)c.out.data;
    if (x != c.x.data) std::copy_n((const T*)c.x.data, M * D, x);
    auto normed = memory<T>(M * D);
    auto indices = memory<i64>(M * s.K);
    auto norm = [&](const T* weight) {
        team.each(M, 4 * D, [&](i64 m) { norm_row(x + m * D, weight, &normed[m * D], D, float(c.eps)); });
    };
    auto add = [&](i64 m, i64 d, v16 y, i64 count) {
        T* to = x + m * D + d;
        store16(to, load16(to, count) + rounded16(y, x), count);
    };
    for (i64 block = 0; block < c.layers; block++) {
        const Layer& layer = c.layer[block];
        auto plain = [&](i64 i) { return (const T*)blocks[block].w[i].data; };
        auto matrix = [&](i64 i) { return weight<T>(blocks[block].w[i]); };
        norm(plain(0));
        Attention<T> attention{matrix(2), matrix(4), matrix(5), matrix(8), matrix(9), plain(3), plain(6), plain(7),
                               plain(10), plain(11), plain(12), plain(13), (T*)blocks[block].pools[0],
                               (T*)blocks[block].pools[1]};
        few_attend(team, normed.get(), attention, places, s, indices.get(), float(c.latent_eps), float(c.scale), add);
        norm(plain(1));
        FeedForward<T> f{};
        if (layer.has_experts)
            f = {plain(14), (const float*)blocks[block].w[15].data, matrix(16), matrix(17), matrix(18), matrix(19), c.experts,
                 c.per_token, layer.inner, layer.shared, c.normalise, float(c.scaling)};
        else
            f.shared_up = matrix(16), f.shared_down = matrix(17), f.S = layer.inner;
        feed_forward(team, normed.get(), f, M, D, add);
    }
}

template <class T>
static int fused_blocks(const FusedBlocks& c) try {
    std::vector<LayerWeights> blocks(std::min<i64>(std::max<i64>(c.layers, 0), 1 << 20));
    if (c.version != VERSION || c.bytes != i64(sizeof(FusedBlocks))) return LAYOUT;
    Refusal refusal = check<T>(c, blocks);
    if (refusal == OK) run_blocks<T>(Team(c.threads), c, blocks);
    return refusal;
} catch (const std::bad_alloc&) {
    return MEMORY;
}
