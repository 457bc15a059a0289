// Products of rows with a weight: y = x W^T + bias. Knows nothing of tensors or of how a weight came to be packed.
//
// Each output is one chain of float32 fused multiply-adds over the inputs in order, the first onto zero (or such chains
// over chunks of 32, see CHAINS); then the bias is added, and the sum rounded once. Blocks, panels and threads only
// choose which chains run side by side, so a row's bits depend on that row and the weight alone. Panels and blocks as
// in Goto and van de Geijn, TOMS 2008.
#pragma once

#include <algorithm>

#include "scratch.h"
#include "simd.h"
#include "team.h"

namespace radixrt {

// Measured with AVX-512 on a Xeon of the 4th generation.
constexpr int COLUMNS = 3;              // vectors of outputs in registers at a time,
constexpr int WIDTH = COLUMNS * LANES;  // the outputs of a panel
constexpr int HEIGHT = 8;         // rows in registers at a time: 8 * 3 sums, 3 vectors of weights and an input of 32
constexpr int DEPTH = 192;        // inputs that several blocks use of a panel while they are in the first cache (36 KB)
constexpr int WIDEN = 3 * HEIGHT; // rows from which on a panel is widened once instead of in each block
constexpr int SLAB = 512;         // rows at a time, so that the copy of their inputs stays small
constexpr int PART = 1 << 18;     // inputs of rows that a task takes at most, to find them in the second cache,
constexpr int PART_ROWS = 64;     // but at least so many rows, or weights would be read too often
constexpr int NEAR = 4096;        // bytes that a lone block fetches ahead: 2 to 8 % faster than 2,048 or 8,192

struct Product {
    const void* x;       // [num_rows, num_inputs], rows x_stride elements apart
    const void* weight;  // [panels, ceil(num_inputs / PAIR), WIDTH, PAIR], filled up with zeros
    const void* bias;    // [num_outputs], or null
    const void* add;     // [num_rows, num_outputs] to add to what was rounded, or null
    void* y;             // [num_rows, num_outputs]
    int64_t num_rows, num_inputs, num_outputs, x_stride;
    int64_t threads;

    int64_t work() const { return num_rows * num_inputs * num_outputs; }
};

// Inputs of rows, as a format multiplies them.
template <class Format>
struct Inputs {
    const typename Format::Weight* data;
    int64_t stride;
};

// What to fetch while a block works: `step` bytes further on with each vector of weights that it uses.
struct Fetch {
    const char* from;
    int64_t step;
};

// Add the products of R rows with `depth` inputs of a panel to their sums.
template <class Format, int R>
inline void accumulate(Inputs<Format> x, const typename Format::Element* panel, int64_t depth, Fetch fetch,
                       f32x16 (&sums)[R][COLUMNS]) {
    constexpr int P = Format::PAIR;
    for (int64_t k = 0; k < depth;) {
        const int64_t stop = Format::CHAINS == 1 ? depth : std::min(depth, k + CHUNK);
        f32x16 found[Format::CHAINS][R][COLUMNS] = {};
        if constexpr (Format::CHAINS == 1) std::memcpy(found, sums, sizeof sums);
        for (; k < stop; k += P, panel += WIDTH * P, fetch.from += COLUMNS * fetch.step) {
            typename Format::Cached weights[COLUMNS];
            UNROLL for (int c = 0; c < COLUMNS; ++c) {
                weights[c] = load<typename Format::Cached>(panel + c * LANES * P);
                __builtin_prefetch(fetch.from + c * fetch.step, 0, 2);
            }
            Format::dot(x.data + k, x.stride, weights, found);
        }
        UNROLL for (int r = 0; r < R; ++r)
            UNROLL for (int c = 0; c < COLUMNS; ++c)
                sums[r][c] = total<Format, R, COLUMNS>(sums[r][c], found, r, c);
    }
}

// Write up to LANES outputs of a row, from `column` on.
template <class Output>
inline void put(const Product& product, int64_t row, int64_t column, f32x16 sum) {
    const int64_t count = std::min<int64_t>(LANES, product.num_outputs - column);
    if (count <= 0) return;
    const int64_t at = row * product.num_outputs + column;
    if (product.bias) sum = sum + load_some((const Output*)product.bias + column, count);
    if (product.add) sum = rounded<Output>(sum) + load_some((const Output*)product.add + at, count);
    store_some((Output*)product.y + at, sum, count);
}

// Rows [row, row + R) with inputs [first, first + depth) of one panel. Sums stay in `kept` until the last inputs came.
template <class Output, int R, class Format>
void multiply_block(const Product& product, Inputs<Format> x, int64_t row, int64_t panel, int64_t first, int64_t depth,
                    const typename Format::Element* weights, Fetch fetch, float* kept) {
    f32x16 sums[R][COLUMNS] = {};
    if (first > 0)
        UNROLL for (int r = 0; r < R; ++r)
            UNROLL for (int c = 0; c < COLUMNS; ++c) sums[r][c] = load<f32x16>(kept + r * WIDTH + c * LANES);
    accumulate<Format, R>({x.data + row * x.stride + first, x.stride}, weights, depth, fetch, sums);
    const bool is_last = first + depth >= product.num_inputs;
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int c = 0; c < COLUMNS; ++c) {
            if (is_last) put<Output>(product, row + r, panel * WIDTH + c * LANES, sums[r][c]);
            else store(kept + r * WIDTH + c * LANES, sums[r][c]);
        }
}

inline void widen_panel(float* wide, const bfloat16* panel, int64_t depth) {
    for (int64_t k = 0; k < depth; k += 2, panel += 2 * WIDTH, wide += 2 * WIDTH)
        UNROLL for (int c = 0; c < COLUMNS; ++c) {
            const u32x16 lanes = load<u32x16>(panel + c * LANES * 2);
            store(wide + c * LANES, lanes << 16);
            store(wide + WIDTH + c * LANES, lanes & 0xFFFF0000u);
        }
}

// All outputs of one panel for rows [row, row + num_rows).
template <class Format>
void multiply_panel(const Product& product, Inputs<Format> x, int64_t panel, int64_t row, int64_t num_rows) {
    using Element = typename Format::Element;
    using Wide = typename Format::Wide;
    static thread_local Scratch sums, widened;
    constexpr int P = Format::PAIR;
    constexpr bool CAN_WIDEN = !std::is_same_v<Format, Wide> && Wide::ROW_UNIT == 1;
    constexpr int HIGH = HEIGHT / Format::CHAINS;
    [[maybe_unused]] const typename Format::Mode mode;
    const int64_t k = (product.num_inputs + P - 1) / P * P, blocks = (num_rows + HIGH - 1) / HIGH;
    const bool widens = CAN_WIDEN && num_rows >= WIDEN;
    const int64_t depth = blocks == 1 ? k : DEPTH;
    float* kept = sums.get<float>(num_rows * WIDTH);
    float* wide = CAN_WIDEN ? widened.get<float>(DEPTH * WIDTH) : nullptr;
    for (int64_t first = 0; first < k; first += depth) {
        const int64_t length = std::min(depth, k - first), bytes = length * WIDTH * sizeof(Element);
        const int64_t vectors = length / (widens ? 1 : P) * COLUMNS;
        const Element* weights = (const Element*)product.weight + (panel * k + first) * WIDTH;
        if constexpr (CAN_WIDEN) {
            if (widens) widen_panel(wide, weights, length);
        }
        for (int64_t b = 0; b < blocks; ++b) {
            const int64_t begin = num_rows * b / blocks, end = num_rows * (b + 1) / blocks;
            // Panels lie one behind the other. A lone block works at the speed of memory and fetches what it needs
            // soon; several fetch the inputs after these together while they compute (30 % of the time of 32 rows).
            Fetch fetch = {(const char*)weights + NEAR, 64};
            if (blocks > 1) fetch = {(const char*)weights + bytes + bytes * b / blocks, bytes / blocks / vectors};
            with_constant<HIGH>(end - begin, [&](auto r) {
                float* its = kept + begin * WIDTH;
                const auto run = [&]<class As>(Inputs<As> rows, const typename As::Element* from) {
                    multiply_block<Element, r, As>(product, rows, row + begin, panel, first, length, from, fetch, its);
                };
                if constexpr (CAN_WIDEN) {
                    if (widens) return run(Inputs<Wide>{x.data, x.stride}, wide);
                }
                run(x, weights);
            });
        }
    }
}

// Elements from one row to the next, a line at least, at which rows do not share few places of the first cache, as
// those a power of two apart do.
template <class Element>
int64_t spread(int64_t width) {
    constexpr int64_t LINE = 64 / sizeof(Element);
    return ((width + LINE - 1) / LINE | 1) * LINE;
}

// How the inputs of rows are read: where they lie, or in a copy of so many bytes, widened or better to read.
struct Layout {
    int64_t stride, copy_bytes;
};

template <class Format>
Layout layout_of(const Product& product) {
    using Weight = typename Format::Weight;
    constexpr bool IS_SAME = std::is_same_v<Weight, typename Format::Element>;
    const int64_t k = product.num_inputs, stride = spread<Weight>(k);
    const bool is_crowded = product.x_stride * sizeof(Weight) % 1024 == 0;
    if (IS_SAME && k % Format::PAIR == 0 && !is_crowded) return {product.x_stride, 0};
    return {stride, product.num_rows * stride * (int64_t)sizeof(Weight)};
}

template <class Format>
Inputs<Format> prepare_inputs(const Product& product, void* copy, Worker& worker) {
    using Element = typename Format::Element;
    using Weight = typename Format::Weight;
    const Layout layout = layout_of<Format>(product);
    if (layout.copy_bytes == 0) return {(const Weight*)product.x, layout.stride};
    const int64_t k = product.num_inputs;
    worker.share(product.num_rows, part_of(k), [&](int64_t row) {
        const Element* from = (const Element*)product.x + row * product.x_stride;
        Weight* to = (Weight*)copy + row * layout.stride;
        for (int64_t i = 0; i < k; i += LANES) {
            Element rest[LANES] = {};
            const bool is_whole = i + LANES <= k;
            if (!is_whole) std::memcpy(rest, from + i, (k - i) * sizeof(Element));
            if constexpr (std::is_same_v<Weight, Element>) std::memcpy(to + i, is_whole ? from + i : rest, sizeof rest);
            else store(to + i, Format::to_float(is_whole ? from + i : rest));
        }
    });
    return {(const Weight*)copy, layout.stride};
}

// The memory that `multiply` needs for copies.
template <class Format>
int64_t slab_bytes(Product product) {
    product.num_rows = std::min<int64_t>(SLAB, product.num_rows);
    return layout_of<Format>(product).copy_bytes;
}

template <class Format>
void multiply_slabs(Product product, void* copy, Worker& worker) {
    using Element = typename Format::Element;
    const int64_t panels = (product.num_outputs + WIDTH - 1) / WIDTH, num_rows = product.num_rows;
    const int64_t most = std::max<int64_t>(PART / product.num_inputs, PART_ROWS);
    for (int64_t done = 0; done < num_rows; done += SLAB) {
        product.num_rows = std::min<int64_t>(SLAB, num_rows - done);
        const Inputs<Format> x = prepare_inputs<Format>(product, copy, worker);
        // Parts so small that their inputs stay in the second cache, and so many that no thread is without work.
        const int64_t busy = std::min((4 * product.threads + panels - 1) / panels, (product.num_rows + 31) / 32);
        const int64_t parts = std::max((product.num_rows + most - 1) / most, busy);
        worker.share(panels * parts, 1, [&](int64_t i) {
            const int64_t begin = product.num_rows * (i / panels) / parts;
            const int64_t end = product.num_rows * (i / panels + 1) / parts;
            multiply_panel<Format>(product, x, i % panels, begin, end - begin);
        });
        product.x = (const Element*)product.x + product.num_rows * product.x_stride;
        product.y = (Element*)product.y + product.num_rows * product.num_outputs;
        if (product.add) product.add = (const Element*)product.add + product.num_rows * product.num_outputs;
    }
}

}  // namespace radixrt
