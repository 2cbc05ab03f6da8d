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

    // Rows of a cache, plain or packed.
    Array cache(i64 rows, i64 values, i64 rest, bool packed) {
        Array plain = weights(rows * (values + rest));
        if (!packed) return plain;
        i64 line = packed_bytes<T>(values, rest);
        Array found = zeros<char>(rows * line);
        for (i64 r = 0; r < rows; r++)
            pack_row((const T*)plain.data + r * (values + rest), values, rest, (char*)found.data + r * line);
        return found;
    }

    static Stored plain(const Array& a) { return {a.data, a.count, nullptr, nullptr, 0, 0}; }

    // E matrices [N, K]: plain, or integers of random bytes with `bits` 8 or 4 (if K allows).
    Stored matrix(i64 E, i64 N, i64 K, int bits) {
        if (bits == 0 || (bits == 4 && K % 8)) return plain(weights(E * N * K));
        i64 Np = up16(N), line = IntegerMatrix::line(K, bits), groups = 1;
        if (bits == 4 && K % 128 == 0 && pick(0, 1)) groups = K / 128;
        held.emplace_back(E * Np / 16 * line);
        int8_t* values = (int8_t*)held.back().data();
        i64 count = held.back().size();
        for (i64 i = 0; i < count; i++) values[i] = int8_t(source());
        Array scales = numbers<float>(E * Np * groups, +[] { return float(pick(1, 100)) / (100.0f * 127.0f * 8); });
        if (bits == 4) return {values, count, (const float*)scales.data, nullptr, bits, groups};
        Array sums = zeros<int>(E * Np);
        for (i64 row = 0; row < E * Np; row++)
            for (i64 k = 0; k < (K + 3) / 4 * 4; k++)
                ((int*)sums.data)[row] += values[row / 16 * line + k / 4 * 64 + row % 16 * 4 + k % 4];
        return {values, count, (const float*)scales.data, (const int*)sums.data, bits, groups};
    }

    int run() {
        DecodeStep c{};
        FusedBlocks& b = c.blocks;
        const i64 page = 64;
        i64 M = pick(0, 3) ? pick(1, 7) : pick(0, 1) ? pick(60, 140) : pick(250, 300);
        i64 D = pick(1, 70), L = pick(1, 40), N = pick(1, 6), H = pick(1, 20);
        i64 R = 2 * pick(1, 9), C = pick(1, 70), V = pick(1, 40), d = R + pick(0, 40), vocab = pick(1, 90);
        i64 J = pick(0, 2) ? pick(1, 9) : 16 * pick(1, 3);
        i64 E = pick(1, 9), top = pick(1, E), pages = pick(1, 4), longest = pick(2, pages * page - 8), mtp = pick(0, 1);
        i64 sequences = pick(1, 5) + M, total = sequences * pages + 1, drafts = mtp ? pick(0, 4) : 0;
        b.version = VERSION, b.bytes = sizeof(DecodeStep), b.layers = pick(1, 3);
        b.shape = {M, D, L, N, H, R, C, V, J, d, pick(1, longest), pages, 6, page, pick(0, 2) == 0};
        b.slots = total * page, b.experts = E, b.per_token = top, b.normalise = pick(0, 1), b.threads = pick(1, 4);
        b.eps = b.latent_eps = 1e-5, b.scale = 0.2, b.scaling = 1.5;
        std::vector<Layer> layers;
        i64 indexers = 0;
        std::vector<Stored> arrays, biases;
        int bits = int(pick(0, 2)) * 4;
        bool mixed = !pick(0, 3);
        auto form = [&] { return mixed ? int(pick(0, 2)) * 4 : bits; };
        if (pick(0, 1)) D = pick(0, 2) ? 8 * pick(1, 20) : 128 * pick(1, 3), L = 8 * pick(1, 6), V = 8 * pick(1, 5);
        b.shape.D = D, b.shape.L = L, b.shape.V = V;
        for (i64 l = 0; l < b.layers; l++) {
            Layer layer{l, l == 0 || pick(0, 1) ? indexers++ : -1, pick(0, 1), pick(1, 40), pick(0, 40)};
            if (bits || mixed) layer.inner = 16 * pick(1, 9), layer.shared = 16 * pick(0, 4);
            i64 stack = layer.has_experts ? E : 1;
            layers.push_back(layer);
            arrays.push_back(plain(weights(D))), arrays.push_back(plain(weights(D)));
            arrays.push_back(matrix(1, L, D, form())), arrays.push_back(plain(weights(L)));
            arrays.push_back(matrix(1, N * (H + R), L, form())), arrays.push_back(matrix(1, C + R, D, form()));
            arrays.push_back(plain(weights(C))), arrays.push_back(plain(weights(N * (H + V) * C)));
            arrays.push_back(matrix(1, D, N * V, form()));
            if (layer.has_indexer()) {
                arrays.push_back(matrix(1, J * d, L, form()));
                for (i64 n : {d * D, d, d, J * D}) arrays.push_back(plain(weights(n)));
            }
            if (layer.has_experts) arrays.push_back(plain(weights(E * D))), biases.push_back(plain(zeros<float>(E)));
            arrays.push_back(matrix(stack, 2 * layer.inner, D, form()));
            arrays.push_back(matrix(stack, D, layer.inner, form()));
            if (layer.has_experts && layer.shared)
                arrays.push_back(matrix(1, 2 * layer.shared, D, form())), arrays.push_back(matrix(1, D, layer.shared, form()));
        }
        arrays.insert(arrays.end(), biases.begin(), biases.end());
        b.layer = layers.data(), b.array = arrays.data(), b.arrays = arrays.size();
        b.latents = cache(b.layers * b.slots, C, R, b.shape.packed), b.index_keys = cache(indexers * b.slots, d, 0, b.shape.packed);
        Array table = zeros<i64>(sequences * pages), columns = zeros<i64>(4 * M);
        for (i64 i = 0; i < sequences * pages; i++) ((i64*)table.data)[i] = i + 1;
        for (i64 m = 0; m < M; m++) {
            i64 *at = (i64*)columns.data + m, row = m % sequences, position = std::min<i64>(mtp + m / sequences, longest);
            at[0] = pick(0, vocab - 1), at[M] = row, at[2 * M] = position;
            at[3 * M] = (1 + row * pages + position / page) * page + position % page;
        }
        b.table = table, c.columns = columns, c.vocab = vocab, c.first_key = mtp, c.drafts = drafts;
        c.embed = weights(vocab * D), c.norm = weights(D), c.head = matrix(1, vocab, D, form());
        if (mtp) c.enorm = weights(D), c.hnorm = weights(D), c.join = matrix(1, D, 2 * D, form()), c.before = weights(M * D);
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
