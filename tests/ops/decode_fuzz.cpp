// Decoding steps of random shapes in buffers of exactly their size, for a build with -fsanitize=address,undefined.
#include <cstdio>
#include <list>
#include <random>

#include "step.h"

static std::mt19937_64 source;
static i64 pick(i64 low, i64 high) { return low + i64(source() % uint64_t(high - low + 1)); }

template <class T>
struct Case {
    std::list<std::vector<char>> held;

    template <class U>
    Array numbers(i64 count, U (*make)()) {
        held.emplace_back(count * sizeof(U));
        U* data = (U*)held.back().data();
        for (i64 i = 0; i < count; i++) data[i] = make();
        return {data, count};
    }
    Array weights(i64 count) {
        return numbers<T>(count, +[] {
            T value;
            store(&value, float(pick(-1000, 1000)) / 4000.0f);
            return value;
        });
    }
    template <class U>
    Array zeros(i64 count) {
        return numbers<U>(count, +[] { return U{}; });
    }

    int run() {
        DecodeStep c{};
        FusedBlocks& b = c.blocks;
        const i64 page = 64;
        i64 M = pick(0, 3) ? pick(1, 7) : pick(60, 140), D = pick(1, 70), L = pick(1, 40), N = pick(1, 6), H = pick(1, 20);
        i64 R = 2 * pick(1, 9), C = pick(1, 70), V = pick(1, 40), J = pick(1, 9), d = R + pick(0, 40), vocab = pick(1, 90);
        i64 E = pick(1, 9), top = pick(1, E), pages = pick(1, 4), longest = pick(2, pages * page - 8), mtp = pick(0, 1);
        i64 sequences = pick(1, 5), total = sequences * pages + 1, drafts = mtp ? pick(0, 4) : 0;
        b.version = VERSION, b.bytes = sizeof(DecodeStep), b.layers = pick(1, 3);
        b.shape = {M, D, L, N, H, R, C, V, J, d, pick(1, longest), pages, 6, page};
        b.slots = total * page, b.experts = E, b.per_token = top, b.normalise = pick(0, 1), b.threads = pick(1, 4);
        b.eps = b.latent_eps = 1e-5, b.scale = 0.2, b.scaling = 1.5;
        std::vector<Layer> layers;
        std::vector<Array> arrays, biases;
        for (i64 l = 0; l < b.layers; l++) {
            Layer layer{l, l == 0 || pick(0, 1), pick(0, 1), pick(1, 40), pick(0, 40)};
            i64 stack = layer.has_experts ? E : 1;
            layers.push_back(layer);
            for (i64 n : {D, D, L * D, L, N * (H + R) * L, (C + R) * D, C, N * (H + V) * C, D * N * V})
                arrays.push_back(weights(n));
            if (layer.has_indexer)
                for (i64 n : {J * d * L, d * D, d, d, J * D}) arrays.push_back(weights(n));
            if (layer.has_experts) arrays.push_back(weights(E * D)), biases.push_back(zeros<float>(E));
            arrays.push_back(weights(stack * 2 * layer.inner * D));
            arrays.push_back(weights(stack * layer.inner * D));
            if (layer.has_experts && layer.shared)
                for (i64 n : {2 * layer.shared * D, layer.shared * D}) arrays.push_back(weights(n));
        }
        arrays.insert(arrays.end(), biases.begin(), biases.end());
        b.layer = layers.data(), b.array = arrays.data(), b.arrays = arrays.size();
        b.latents = weights(b.layers * b.slots * (C + R)), b.index_keys = weights(b.layers * b.slots * d);
        Array table = zeros<i64>(sequences * pages), columns = zeros<i64>(4 * M);
        for (i64 i = 0; i < sequences * pages; i++) ((i64*)table.data)[i] = i + 1;
        for (i64 m = 0; m < M; m++) {
            i64 *at = (i64*)columns.data + m, row = pick(0, sequences - 1), position = pick(mtp, longest);
            at[0] = pick(0, vocab - 1), at[M] = row, at[2 * M] = position;
            at[3 * M] = (1 + row * pages + position / page) * page + position % page;
        }
        b.table = table, c.columns = columns, c.vocab = vocab, c.first_key = mtp, c.drafts = drafts;
        c.embed = weights(vocab * D), c.norm = weights(D), c.head = weights(vocab * D);
        if (mtp) c.enorm = weights(D), c.hnorm = weights(D), c.join = weights(2 * D * D), c.before = weights(M * D);
        c.cos = zeros<float>((longest + 5) * (R / 2)), c.sin = zeros<float>((longest + 5) * (R / 2));
        c.hidden = weights(M * D);
        i64 rows = M * std::max<i64>(1, drafts);
        if (drafts || pick(0, 1)) {
            c.logits = zeros<float>(rows * vocab), c.best = zeros<i64>(rows), c.chances = zeros<float>(rows);
            if (pick(0, 1)) {
                c.scale = numbers<float>(M, +[] { return float(pick(0, 2)) / 2.0f; });
                c.uniforms = numbers<float>(rows, +[] { return float(pick(0, 999)) / 1000.0f; });
            }
        }
        int refusal = decode_step<T>(c);
        for (i64 i = 0; c.best.data && i < rows; i++) {
            float chance = ((const float*)c.chances.data)[i];
            if (((const i64*)c.best.data)[i] >= vocab || !(chance <= 1e-4f)) return 100;
        }
        if (drafts && refusal == OK && !c.scale.data) {  // the drafts, verified against their own logits, are all accepted
            std::vector<i64> ids(M * drafts), accepted(M), tokens(M * (drafts + 1));
            std::vector<float> logits, scale(M, 0.0f), uniforms(M * (2 * drafts + 1), 0.5f), chances(M * (drafts + 1));
            const float* q = (const float*)c.logits.data;
            for (i64 m = 0; m < M; m++)
                for (i64 k = 0; k <= drafts; k++) {
                    if (k < drafts) ids[m * drafts + k] = ((const i64*)c.best.data)[k * M + m];
                    const float* from = q + (std::min(k, drafts - 1) * M + m) * vocab;
                    logits.insert(logits.end(), from, from + vocab);
                }
            for (float factor : {0.0f, 1.0f}) {
                std::fill(scale.begin(), scale.end(), factor);
                verify(logits.data(), q, ids.data(), scale.data(), uniforms.data(), accepted.data(), tokens.data(),
                       chances.data(), M, drafts, vocab, b.threads);
                for (i64 kept : accepted)
                    if (kept != drafts) return 101;
            }
        }
        return refusal;
    }
};

int main(int, char** arguments) {
    for (i64 round = 0; round < atoi(arguments[1]); round++) {
        source.seed(round);
        int bad = round % 2 ? Case<float>().run() : Case<bf16>().run();
        if (bad) return printf("case %ld: %d\n", long(round), bad), 1;
    }
    return puts("well"), 0;
}
