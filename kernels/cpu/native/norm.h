// Rows divided by their root mean square (Zhang and Sennrich, NeurIPS 2019). Knows nothing of tensors.
//
// A row's squares are summed in 32 chains of fused multiply-adds, which are then added in one order: its bits depend on
// that row alone.
#pragma once

#include <algorithm>
#include <cmath>

#include "simd.h"
#include "team.h"

namespace radixrt {

struct Norm {
    const void* x;       // [num_rows, width], rows x_stride elements apart
    const void* weight;  // [width]
    void* y;             // [num_rows, width], rows y_stride elements apart
    int64_t num_rows, width, x_stride, y_stride;
    int64_t threads;
    float eps;

    int64_t work() const { return num_rows * width; }
};

// y = x / sqrt(mean(x^2) + eps) * weight, in float32 until it is stored.
template <class Element>
void normalise(const Norm& norm, Worker& worker) {
    worker.share(norm.num_rows, part_of(norm.width), [&](int64_t row) {
        const Element *x = (const Element*)norm.x + row * norm.x_stride, *weight = (const Element*)norm.weight;
        Element* y = (Element*)norm.y + row * norm.y_stride;
        const auto at = [&](int64_t i) { return load_some(x + i, norm.width - i); };
        f32x16 squares[2] = {};
        int64_t done = 0;
        for (; done + 2 * LANES <= norm.width; done += 2 * LANES)
            UNROLL for (int j = 0; j < 2; ++j) squares[j] = fma(at(done + j * LANES), at(done + j * LANES), squares[j]);
        for (; done < norm.width; done += LANES) squares[0] = fma(at(done), at(done), squares[0]);
        const float sum = across(squares[0] + squares[1], [](auto a, auto b) { return a + b; });
        const float scale = 1.0f / std::sqrt(sum / (float)norm.width + norm.eps);
        for (int64_t i = 0; i < norm.width; i += LANES) {
            const int64_t count = std::min<int64_t>(LANES, norm.width - i);
            store_some(y + i, load_some(x + i, count) * scale * load_some(weight + i, count), count);
        }
    });
}

}  // namespace radixrt
