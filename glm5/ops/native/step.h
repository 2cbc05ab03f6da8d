// A whole decoding step in one call: embedding, blocks, final norm, output matrix and the likeliest tokens; for the MTP
// layer also a chain of drafts.
#pragma once

#include "draws.h"
#include "fused.h"

// The arguments of `decode_step`. glm5/ops/decode_step.py has the same fields in the same order. x, out, cos, sin, places,
// rows, start and end of `blocks` are left to this call.
struct DecodeStep {
    FusedBlocks blocks;
    Array embed, norm;         // [vocab, D], [D]
    Array enorm, hnorm;        // of the MTP layer's two inputs: [D], [D]; nothing for the trunk
    Stored head, join;         // [vocab, D]; of the MTP layer: [D, 2 D]
    Array cos, sin;            // of all positions [positions, R / 2]
    Array columns;             // int64 [4, M]: token ids, rows of the page table, positions, slots in the pools
    Array before;              // of the MTP layer: the trunk's states [M, D]
    Array hidden;              // result [M, D], after the norm
    Array logits;              // result fp32 [M, vocab] of every draft; nothing: no tokens
    Array best, chances;       // results, int64 and fp32 [M] of every draft: the token, and its log-probability
    Array scale, uniforms;     // fp32 [M] and [M] of every draft: tokens are drawn by them; nothing: the likeliest tokens
    i64 vocab, first_key, drafts;
};

// A pass over M tokens whose inputs are checked one by one.
template <class T>
struct Step {
    const DecodeStep& c;
    const Team& team;
    std::vector<LayerWeights> layers;
    std::vector<i64> start, end;
    std::vector<float> cos, sin;
    Memory<T> x;

    Step(const DecodeStep& call, const Team& workers)
        : c(call), team(workers), layers(c.blocks.layers), start(c.blocks.shape.M), end(start),
          cos(start.size() * (c.blocks.shape.R / 2)), sin(cos), x(memory<T>(start.size() * c.blocks.shape.D)) {}

    // Blocks and norm: columns [4, M], and for the MTP layer `before` [M, D] -> hidden [M, D].
    Refusal pass(const i64* columns, const T* before, T* hidden) {
        FusedBlocks blocks = c.blocks;
        const Shape& s = blocks.shape;
        i64 M = s.M, D = s.D, half = s.R / 2, known = c.cos.count / half;
        const i64 *ids = columns, *positions = columns + 2 * M;
        for (i64 m = 0; m < M; m++) {
            i64 at = positions[m];
            if (ids[m] < 0 || ids[m] >= c.vocab || at < 0 || at >= known) return RANGES;
            start[m] = c.first_key, end[m] = at + 1;
            std::copy_n((const float*)c.cos.data + at * half, half, &cos[m * half]);
            std::copy_n((const float*)c.sin.data + at * half, half, &sin[m * half]);
        }
        blocks.rows = {columns + M, M}, blocks.places = {columns + 3 * M, M};
        blocks.start = {start.data(), M}, blocks.end = {end.data(), M};
        blocks.cos = {cos.data(), M * half}, blocks.sin = {sin.data(), M * half};
        blocks.x = blocks.out = {x.get(), M * D};
        Refusal refusal = check<T>(blocks, layers);
        if (refusal != OK) return refusal;
        const T* embed = (const T*)c.embed.data;
        if (c.join.data)
            join(ids, before);
        else
            for (i64 m = 0; m < M; m++) std::copy_n(embed + ids[m] * D, D, &x[m * D]);
        run_blocks<T>(team, blocks, layers);
        team.each(M, 4 * D, [&](i64 m) {
            norm_row(&x[m * D], (const T*)c.norm.data, hidden + m * D, D, float(blocks.eps));
        });
        return OK;
    }

    // The MTP layer's input: the token's embedding and the state before it, each after its norm, through one matrix. All of
    // `before` is read before `hidden`, which may be the same memory, is written.
    void join(const i64* ids, const T* before) {
        i64 M = c.blocks.shape.M, D = c.blocks.shape.D;
        float eps = float(c.blocks.eps);
        auto both = memory<T>(2 * M * D);
        for (i64 m = 0; m < M; m++) {
            norm_row((const T*)c.embed.data + ids[m] * D, (const T*)c.enorm.data, &both[2 * m * D], D, eps);
            norm_row(before + m * D, (const T*)c.hnorm.data, &both[(2 * m + 1) * D], D, eps);
        }
        Input<T> in(both.get(), M, 2 * D);
        products<T>(team, in, 2 * D, {{weight<T>(c.join), D}},
                    [&](int, i64 m, i64 n, v16 y, i64 count) { store16(&x[m * D + n], y, count); });
    }

    // The tokens after M hidden states, as draft number `draft`.
    void tokens(const T* hidden, i64 draft) {
        i64 M = c.blocks.shape.M, D = c.blocks.shape.D, V = c.vocab;
        float* logits = (float*)c.logits.data + draft * M * V;
        Input<T> in(hidden, M, D);
        products<T>(team, in, D, {{weight<T>(c.head), V}},
                    [&](int, i64 m, i64 n, v16 y, i64 count) { store16(logits + m * V + n, y, count); });
        const float *scale = (const float*)c.scale.data, *uniforms = (const float*)c.uniforms.data + draft * M;
        i64* best = (i64*)c.best.data + draft * M;
        float* chances = (float*)c.chances.data + draft * M;
        team.each(M, 16 * V, [&](i64 m) {
            float factor = scale && scale[m] > 0.0f ? scale[m] : 1.0f;
            const float* x = logits + m * V;
            Softmax all(x, V, factor);
            best[m] = scale && scale[m] > 0.0f ? drawn(x, V, all, uniforms[m]) : all.best;
            chances[m] = all.logprob(x[best[m]]);
        });
    }

    // Drafts of M requests. `before` predicts the first one; each later one comes from the MTP layer at the position of the
    // draft before it, and positions in `columns` are those of the first.
    Refusal chain() {
        i64 M = c.blocks.shape.M, D = c.blocks.shape.D;
        const Shape& s = c.blocks.shape;
        const i64* table = (const i64*)c.blocks.table.data;
        std::vector<i64> columns((const i64*)c.columns.data, (const i64*)c.columns.data + 4 * M);
        T* hidden = (T*)c.hidden.data;
        std::copy_n((const T*)c.before.data, M * D, hidden);
        tokens(hidden, 0);
        for (i64 draft = 1; draft < c.drafts; draft++) {
            for (i64 m = 0; m < M; m++) {
                i64 row = columns[M + m], at = columns[2 * M + m] + (draft > 1);
                columns[m] = ((const i64*)c.best.data)[(draft - 1) * M + m];
                if (row < 0 || row >= c.blocks.table.count / s.per_row || at < 0 || at >> s.shift >= s.per_row) return RANGES;
                columns[2 * M + m] = at;
                columns[3 * M + m] = table[row * s.per_row + (at >> s.shift)] * s.size + (s.shift == 63 ? at : at & (s.size - 1));
            }
            Refusal refusal = pass(columns.data(), hidden, hidden);
            if (refusal != OK) return refusal;
            tokens(hidden, draft);
        }
        return OK;
    }
};

template <class T>
static Refusal check_step(const DecodeStep& c) {
    const Shape& s = c.blocks.shape;
    const i64 most = 1 << 20;
    if (c.blocks.version != VERSION || c.blocks.bytes != i64(sizeof(DecodeStep))) return LAYOUT;
    if (c.vocab < 1 || c.vocab > (i64(1) << 24) || c.drafts < 0 || c.drafts > 64 || c.first_key < 0) return SIZES;
    if (!c.blocks.layer || !c.blocks.array || c.blocks.layers < 1 || c.blocks.layers > most || !sane(c.blocks)) return SIZES;
    i64 M = s.M, D = s.D, all = M * std::max<i64>(1, c.drafts);
    if (!holds(c.embed, c.vocab * D) || !holds(c.norm, D) || !holds(c.hidden, M * D) || !holds(c.columns, 4 * M)) return COUNTS;
    if (!c.cos.data || !c.sin.data || c.cos.count != c.sin.count || c.cos.count % (s.R / 2)) return COUNTS;
    if (c.join.data && !(holds(c.join, 1, D, 2 * D) && holds(c.enorm, D) && holds(c.hnorm, D) && holds(c.before, M * D)))
        return COUNTS;
    if (c.drafts && (!c.join.data || !c.logits.data)) return COUNTS;
    if (c.logits.data && !(holds(c.head, 1, c.vocab, D) && holds(c.logits, all * c.vocab) && holds(c.best, all) &&
                           holds(c.chances, all)))
        return COUNTS;
    if (c.scale.data && !(c.logits.data && holds(c.scale, M) && holds(c.uniforms, all))) return COUNTS;
    return OK;
}

template <class T>
static int decode_step(const DecodeStep& c) try {
    Refusal refusal = check_step<T>(c);
    if (refusal != OK) return refusal;
    Team team(c.blocks.threads);
    Step<T> step(c, team);
    if (c.drafts) return step.chain();
    refusal = step.pass((const i64*)c.columns.data, (const T*)c.before.data, (T*)c.hidden.data);
    if (refusal == OK && c.logits.data) step.tokens((const T*)c.hidden.data, 0);
    return refusal;
} catch (const std::bad_alloc&) {
    return MEMORY;
}
