// A gated unit (Shazeer, 2020) with SiLU. Knows nothing of tensors.
#pragma once

#include <algorithm>

#include "simd.h"
#include "team.h"

namespace radixrt {

struct Gate {
    const void* x;  // [num_rows, 2 * width]: gates, then what they are multiplied with; rows x_stride elements apart
    void* y;        // [num_rows, width], rows y_stride elements apart
    int64_t num_rows, width, x_stride, y_stride;
    int64_t threads;

    int64_t work() const { return num_rows * width; }
};

// x / (1 + e^-x), through 2^-|x| since exp2 takes no large exponents.
inline f32x16 silu(f32x16 x) {
    const f32x16 size = (f32x16)((u32x16)x & 0x7FFFFFFFu);
    const f32x16 decay = exp2(size * -1.44269504f);
    return x * ((x < 0.0f ? decay : splat(1.0f)) * reciprocal(decay + 1.0f));
}

// y = silu(gate) * up, both operations rounded to an Element as a model's own code does.
template <class Element>
void gate(const Gate& gate, Worker& worker) {
    const int64_t width = gate.width;
    worker.share(gate.num_rows, part_of(4 * width), [&](int64_t row) {
        const Element* x = (const Element*)gate.x + row * gate.x_stride;
        Element* y = (Element*)gate.y + row * gate.y_stride;
        for (int64_t i = 0; i < width; i += LANES) {
            const int64_t count = std::min<int64_t>(LANES, width - i);
            const f32x16 open = rounded<Element>(silu(load_some(x + i, count)));
            store_some(y + i, open * load_some(x + width + i, count), count);
        }
    });
}

}  // namespace radixrt
