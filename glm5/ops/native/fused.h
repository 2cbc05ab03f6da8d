// Fused decoding: a handful of tokens through all blocks in one call, described by one checked structure.
#pragma once

#include "decode.h"

// A tensor's first element and its number of elements.
struct Array {
    const void* data;
    i64 count;
};

// `slot` is the layer's place in the pools, `inner` and `shared` the widths of feed-forward (or expert) and shared expert.
struct Layer {
    i64 slot, has_indexer, has_experts, inner, shared;
};

// The arguments of `fused_blocks`. glm5/ops/fused_blocks.py has the same fields in the same order.
struct FusedBlocks {
    i64 version, bytes, layers, arrays;
    const Layer* layer;
    const Array* array;  // the weights, layer by layer, in the order in which `read_layer` takes them; then router biases
    Array x, out, latents, index_keys, cos, sin, places, rows, table, start, end;
    Shape shape;
    i64 slots, experts, per_token, normalise, threads;  // slots: tokens that a layer's pool holds
    double eps, latent_eps, scale, scaling;
};

// Reasons to refuse a call: their texts are in glm5/ops/fused_blocks.py.
enum Refusal { OK, LAYOUT, SIZES, COUNTS, MISSING, RANGES, MEMORY };

const i64 VERSION = 2;

struct LayerWeights {
    const void* w[22];
};

// Takes arrays in their order and notices one of the wrong length.
struct Reader {
    const Array *next, *end;
    bool good = true;

    const void* take(i64 count) {
        if (!good || next == end || next->count != count || !next->data) {
            good = false;
            return nullptr;
        }
        return (next++)->data;
    }
};

// The weights of one layer: two norms, q_a, q_norm, q_b, kv_a, kv_norm, kv_b, o; indexer's wq, wk, k_norm weight and bias,
// weights_proj; (latents and index keys;) router, (its bias;) gate_up and down of the feed-forward or the
// experts; the same two of the shared expert.
static inline void read_layer(Reader& from, const FusedBlocks& c, const Layer& layer, LayerWeights& to) {
    const Shape& s = c.shape;
    i64 W = s.C + s.R, stack = layer.has_experts ? c.experts : 1, inner = layer.inner * s.D;
    i64 at = 0;
    for (i64 count : {s.D, s.D, s.L * s.D, s.L, s.N * (s.H + s.R) * s.L, W * s.D, s.C, s.N * (s.H + s.V) * s.C,
                      s.D * s.N * s.V})
        to.w[at++] = from.take(count);
    for (i64 count : {s.J * s.d * s.L, s.d * s.D, s.d, s.d, s.J * s.D})
        to.w[at++] = layer.has_indexer ? from.take(count) : nullptr;
    at += 2;
    to.w[at++] = layer.has_experts ? from.take(c.experts * s.D) : nullptr;
    at++;
    for (i64 count : {stack * 2 * inner, stack * inner}) to.w[at++] = from.take(count);
    for (i64 count : {2 * layer.shared * s.D, layer.shared * s.D})
        to.w[at++] = layer.has_experts && layer.shared ? from.take(count) : nullptr;
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
    if (c.threads < 1) return false;
    for (i64 i = 0; i < c.layers; i++) {
        const Layer& layer = c.layer[i];
        if (layer.inner < 1 || layer.inner > most || layer.shared < 0 || layer.shared > most) return false;
        if (layer.has_experts && (c.per_token < 1 || c.per_token > c.experts || c.experts > most)) return false;
    }
    return s.R % 2 == 0 && s.R <= s.d && (s.shift == 63 || (s.shift >= 0 && s.shift < 40 && s.size == i64(1) << s.shift));
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
    i64 M = s.M, latents = c.slots * (s.C + s.R), keys = c.slots * s.d;
    if (!holds(c.x, M * s.D) || !holds(c.out, M * s.D) || !holds(c.cos, M * (s.R / 2)) || !holds(c.sin, M * (s.R / 2)))
        return COUNTS;
    for (const Array* array : {&c.places, &c.rows, &c.start, &c.end})
        if (!holds(*array, M)) return COUNTS;
    if (!c.table.data || c.table.count % s.per_row || !c.latents.data || !c.index_keys.data) return COUNTS;
    Reader from{c.array, c.array + c.arrays};
    for (i64 i = 0; i < c.layers; i++) {
        const Layer& layer = c.layer[i];
        read_layer(from, c, layer, blocks[i]);
        if (layer.slot < 0 || (layer.slot + 1) * latents > c.latents.count || (layer.slot + 1) * keys > c.index_keys.count)
            return COUNTS;
        blocks[i].w[14] = (const T*)c.latents.data + layer.slot * latents;
        blocks[i].w[15] = (const T*)c.index_keys.data + layer.slot * keys;
    }
    for (i64 i = 0; i < c.layers; i++) blocks[i].w[17] = c.layer[i].has_experts ? from.take(c.experts) : nullptr;
    if (!from.good || from.next != from.end) return COUNTS;
    if (!c.layer[0].has_indexer) return MISSING;
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
        const T* const* w = (const T* const*)blocks[block].w;
        const Layer& layer = c.layer[block];
        norm(w[0]);
        Attention<T> attention{w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11], w[12], w[13], (T*)w[14],
                               (T*)w[15]};
        few_attend(team, normed.get(), attention, places, s, indices.get(), float(c.latent_eps), float(c.scale), add);
        norm(w[1]);
        FeedForward<T> f{};
        if (layer.has_experts)
            f = {w[16], (const float*)w[17], w[18], w[19], w[20], w[21], c.experts, c.per_token, layer.inner, layer.shared,
                 c.normalise, float(c.scaling)};
        else
            f.shared_up = w[18], f.shared_down = w[19], f.S = layer.inner;
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
