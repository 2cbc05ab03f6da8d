// CPU kernels behind glm5.ops. Plain C++ without torch headers, so that it compiles in seconds on first use.
//
// Every kernel computes one row (token, query) by itself and in a fixed order: its result does not depend on which other
// rows share the batch (but see `Halves` for numbers below 2^-126). Arithmetic is fp32; bf16 exists in memory only. Layouts
// are contiguous unless a stride is named.

#include "product.h"
#include "softmax.h"
#include "step.h"

// The interface: every function for fp32 and bf16.

#define BOTH(name, params, call)                             \
    extern "C" void glm5_##name##_f32 params { typedef float T; call; } \
    extern "C" void glm5_##name##_bf16 params { typedef bf16 T; call; }
#define P(x) ((T*)x)
#define CP(x) ((const T*)x)

BOTH(select,
     (const void* q, const void* keys, const i64* rows, const i64* table, i64 per_row, i64 shift, i64 size,
      const float* w, const i64* start, const i64* end, i64* out, i64 B, i64 Q, i64 J, i64 d, i64 K, i64 packed, float scale),
     (select(CP(q), Lines<T>{CP(keys), rows, table, per_row, shift, size, Q, d, packed ? d : 0}, w, start, end, out, B * Q, J, d, K,
             scale)))
BOTH(selected,
     (const void* q, const void* keys, const float* w, const i64* indices, float* out, i64 B, i64 Q, i64 S, i64 J,
      i64 d, i64 K, float scale),
     selected(CP(q), CP(keys), w, indices, out, B, Q, S, J, d, K, scale))
BOTH(selected_backward,
     (const void* q, const void* keys, const float* w, const i64* indices, const float* grad, void* grad_q,
      float* grad_keys, float* grad_w, i64 B, i64 Q, i64 S, i64 J, i64 d, i64 K, float scale),
     selected_backward(CP(q), CP(keys), w, indices, grad, P(grad_q), grad_keys, grad_w, B, Q, S, J, d, K, scale))
BOTH(attend,
     (const void* q, const void* latents, const i64* rows, const i64* table, i64 per_row, i64 shift, i64 size,
      const i64* indices, void* out, float* target, i64 B, i64 Q, i64 N, i64 W, i64 C, i64 K, i64 packed, float scale),
     (attend(CP(q), Lines<T>{CP(latents), rows, table, per_row, shift, size, Q, W, packed ? C : 0}, indices, P(out), target, B, Q, N, W,
             C, K, scale)))
BOTH(attend_backward,
     (const void* q, const void* latents, const i64* indices, const void* grad, void* grad_q, float* grad_latents,
      i64 B, i64 Q, i64 S, i64 N, i64 W, i64 C, i64 K, float scale),
     attend_backward(CP(q), CP(latents), indices, CP(grad), P(grad_q), grad_latents, B, Q, S, N, W, C, K, scale))
BOTH(range_softmax,
     (void* scores, const i64* start, const i64* end, float* lse, i64 G, i64 heads, i64 t, i64 n, i64 length, i64 first,
      i64 low, float scale),
     range_softmax(P(scores), start, end, lse, G, heads, t, n, length, first, low, scale))
BOTH(range_softmax_backward,
     (void* scores, void* grad, const i64* start, const i64* end, const float* lse, i64 G, i64 heads, i64 t, i64 n,
      i64 length, i64 first, i64 low, float scale),
     range_softmax_backward(P(scores), P(grad), start, end, lse, G, heads, t, n, length, first, low, scale))
BOTH(rope,
     (const void* x, void* out, const float* cos, const float* sin, i64 M, i64 H, i64 D, i64 row_stride,
      i64 head_stride, i64 offset, i64 R, float sign),
     rope(CP(x), P(out), cos, sin, M, H, D, row_stride, head_stride, offset, R, sign))
BOTH(rms_norm,
     (const void* x, const void* weight, void* out, float* inverse, i64 M, i64 D, i64 stride, float eps),
     rms_norm(CP(x), CP(weight), P(out), inverse, M, D, stride, eps))
BOTH(rms_norm_backward,
     (const void* x, const void* weight, const void* grad, const float* inverse, void* grad_x, float* grad_weight,
      i64 M, i64 D, i64 stride),
     rms_norm_backward(CP(x), CP(weight), CP(grad), inverse, P(grad_x), grad_weight, M, D, stride))
BOTH(swiglu, (const void* x, void* out, i64 M, i64 I), swiglu(CP(x), P(out), M, I))
BOTH(swiglu_backward, (const void* x, const void* grad, void* out, i64 M, i64 I),
     swiglu_backward(CP(x), CP(grad), P(out), M, I))
BOTH(product,
     (const void* a, const void* b, void* out, const i64* bounds, i64 groups, i64 M, i64 N, i64 K, i64 a_group, i64 a_step,
      i64 a_along, i64 b_group, i64 b_step, i64 b_along, i64 threads),
     product(CP(a), CP(b), P(out), bounds, groups, M, N, K, a_group, a_step, a_along, b_group, b_step, b_along, threads))
BOTH(thin_linear, (const void* x, const void* w, void* out, i64 M, i64 N, i64 K, i64 threads),
     thin_linear(CP(x), CP(w), P(out), M, N, K, threads))
BOTH(thin_wide_linear, (const void* x, const void* w, float* out, i64 M, i64 N, i64 K, i64 threads),
     thin_linear(CP(x), CP(w), out, M, N, K, threads))
BOTH(thin_mlp, (const void* x, const void* gate_up, const void* down, void* out, i64 M, i64 D, i64 I, i64 threads),
     (thin_feed_forward(CP(x), FeedForward<T>{nullptr, nullptr, {}, {}, {CP(gate_up), {}}, {CP(down), {}}, 0, 0, 0, I, 0, 0},
                        P(out), M, D, threads)))
BOTH(thin_moe,
     (const void* x, const void* gate, const float* bias, const void* gate_up, const void* down, const void* shared_up,
      const void* shared_down, void* out, i64 M, i64 D, i64 E, i64 top, i64 I, i64 shared, i64 normalise, float scaling,
      i64 threads),
     (thin_feed_forward(CP(x), FeedForward<T>{CP(gate), bias, {CP(gate_up), {}}, {CP(down), {}}, {CP(shared_up), {}},
                                              {CP(shared_down), {}}, E, top, I, shared, normalise, scaling},
                        P(out), M, D, threads)))
extern "C" int glm5_fused_blocks_f32(const FusedBlocks* call) { return fused_blocks<float>(*call); }
extern "C" int glm5_fused_blocks_bf16(const FusedBlocks* call) { return fused_blocks<bf16>(*call); }
extern "C" int glm5_decode_step_f32(const DecodeStep* call) { return decode_step<float>(*call); }
extern "C" int glm5_decode_step_bf16(const DecodeStep* call) { return decode_step<bf16>(*call); }
extern "C" void glm5_verify(const float* p, const float* q, const i64* drafts, const float* scale, const float* uniforms,
                            i64* accepted, i64* tokens, float* logprobs, i64 B, i64 count, i64 V, i64 threads) {
    verify(p, q, drafts, scale, uniforms, accepted, tokens, logprobs, B, count, V, threads);
}
BOTH(combine, (const void* y, const i64* slots, const float* weights, void* out, i64 M, i64 K, i64 D),
     combine(CP(y), slots, weights, P(out), M, K, D))
BOTH(combine_backward,
     (const void* y, const i64* slots, const float* weights, const void* grad, void* grad_y, float* grad_weights,
      i64 M, i64 K, i64 D),
     combine_backward(CP(y), slots, weights, CP(grad), P(grad_y), grad_weights, M, K, D))
BOTH(logsumexp, (const void* x, float* out, float* entropy, i64 M, i64 V, float scale),
     logsumexp(CP(x), out, entropy, M, V, scale))
BOTH(nll_backward,
     (void* x, const float* lse, const i64* targets, const float* grad, i64 M, i64 V, float scale),
     nll_backward(P(x), lse, targets, grad, M, V, scale))
BOTH(integer_product,
     (const void* x, const void* values, const float* scales, const int* sums, const i64* bounds, void* out, i64 M, i64 N,
      i64 K, i64 E, i64 groups, i64 bits, i64 threads),
     (integer_product(CP(x), IntegerMatrix{(const uint8_t*)values, scales, sums, bits, groups}, bounds, P(out), M, N, K, E,
                      threads)))
