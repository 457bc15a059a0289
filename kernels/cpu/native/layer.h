// A decoder layer of the Llama family: y = x + out(attend(rotate(qkv(norm(x))))), then y + down(gate(gate_up(norm(y)))).
// Knows nothing of tensors or of which model it is.
//
// It is one parallel region and one call: a layer's weights push everything else out of the second cache, and what
// Python does between ten calls then takes as long as reading them.
#pragma once

#include "attention.h"
#include "gate.h"
#include "norm.h"
#include "rotation.h"
#include "tiled_product.h"

namespace radixrt {

// As Product has them.
struct Matrix {
    const void *panels, *bias;
};

// What stays from step to step.
struct Layer {
    Matrix qkv, out, gate_up, down;
    const void *first_norm, *second_norm;  // [width]
    int64_t width, num_heads, num_kv_heads, dim;
    int64_t inner;   // outputs of the gate
    int64_t window;  // as Attention has it
    float scale, first_eps, second_eps;
};

// What a step brings.
struct LayerRows {
    const void* x;          // [num_rows, width]
    void* y;                // [num_rows, width], elsewhere
    const void *cos, *sin;  // as Rotation has them
    void *k_cache, *v_cache;
    int64_t num_rows, threads;
};

template <class Element>
void run(Step& step, const Layer& layer, const LayerRows& call) {
    const int64_t rows = call.num_rows, width = layer.width, inner = layer.inner, threads = call.threads;
    const int64_t dim = layer.dim, q_width = layer.num_heads * dim, kv_width = layer.num_kv_heads * dim;
    const int64_t heads_width = q_width + 2 * kv_width, turned_heads = layer.num_heads + layer.num_kv_heads;
    const int64_t x_stride = spread<Element>(width), out_stride = spread<Element>(q_width);
    const int64_t gated_stride = spread<Element>(inner);
    LayerMemory& memory = step.memory;
    auto* normed = memory.normed.get<Element>(rows * x_stride);
    auto* heads = memory.heads.get<Element>(rows * heads_width);
    auto* attended = memory.attended.get<Element>(rows * out_stride);
    auto* opened = memory.opened.get<Element>(rows * 2 * inner);
    auto* gated = memory.gated.get<Element>(rows * gated_stride);

    const auto product = [&](const Element* x, int64_t stride, int64_t num_inputs, const Matrix& matrix, void* y,
                             int64_t num_outputs, const void* add) {
        return Product{x, matrix.panels, matrix.bias, add, y, rows, num_inputs, num_outputs, stride, threads};
    };
    const Norm first = {call.x, layer.first_norm, normed, rows, width, width, x_stride, threads, layer.first_eps};
    const Product qkv = product(normed, x_stride, width, layer.qkv, heads, heads_width, nullptr);
    const Rotation rotation = {heads, call.cos, call.sin, rows, turned_heads, dim, heads_width, threads};
    const Attention attention = {{heads, heads_width, dim},
                                 {heads + q_width, heads_width, dim},
                                 {heads + q_width + kv_width, heads_width, dim},
                                 {attended, out_stride, dim},
                                 call.k_cache, call.v_cache, layer.num_heads, layer.num_kv_heads, dim,
                                 layer.window, layer.scale, 0, (int32_t)threads};
    const Product out = product(attended, out_stride, q_width, layer.out, call.y, width, call.x);
    const Norm second = {call.y, layer.second_norm, normed, rows, width, width, x_stride, threads, layer.second_eps};
    const Product gate_up = product(normed, x_stride, width, layer.gate_up, opened, 2 * inner, nullptr);
    const Gate gating = {opened, gated, rows, inner, 2 * inner, gated_stride, threads};
    const Product down = product(gated, gated_stride, inner, layer.down, call.y, width, call.y);

    int64_t num_bytes = 0, work = 0;
    for (const Product& each : {qkv, out, gate_up, down}) {
        num_bytes = std::max(num_bytes, copy_bytes<Element>(each));
        work += each.work();
    }
    char* copy = memory.copy.get<char>(num_bytes);
    const LayerTasks& tasks = step.tasks(attention.key());
    float* partials = memory.partials.get<float>(merge_floats(attention, tasks));
    together(std::max(worth(threads, work), tasks.threads), [&](Worker& worker) {
        normalise<Element>(first, worker);
        multiply<Element>(qkv, copy, worker);
        rotate<Element>(rotation, worker);
        attend<Vectors<Element>>(step, attention, tasks, partials, worker);
        multiply<Element>(out, copy, worker);
        normalise<Element>(second, worker);
        multiply<Element>(gate_up, copy, worker);
        gate<Element>(gating, worker);
        multiply<Element>(down, copy, worker);
    });
}

}  // namespace radixrt
