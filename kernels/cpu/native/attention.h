// Attention of one layer's rows over paged keys and values. Knows nothing of tensors or of how tasks were cut.
//
// New keys and values are written, tasks reduce their pages, and rows that several tasks have read are folded. The
// oracle is ../reference.py.
#pragma once

#include "scratch.h"
#include "tasks.h"
#include "team.h"
#include "tiled_attention.h"

namespace radixrt {

// A tensor [rows, heads, elements]; strides in elements, the last dimension contiguous.
struct Rows {
    void* data;
    int64_t row_stride, head_stride;

    template <class Element>
    Element* at(int64_t row, int64_t head) const {
        return (Element*)data + row * row_stride + head * head_stride;
    }
};

struct Attention {
    Rows q, k, v, out;
    void *k_cache, *v_cache;
    int64_t num_heads, num_kv_heads, dim;
    int64_t window;  // positions a row reads back from its own; at least 1
    float scale, softcap;
    int32_t threads;

    LayerKey key() const { return {window, num_heads, num_kv_heads, dim, threads}; }
};

// Write the keys and values of the i-th row that brings some, of one head. Where rows fill both places of a pair, the
// first writes the values of both.
template <class Format>
void write_slot(const Step& step, const Attention& call, int64_t i, int64_t head) {
    using Element = typename Format::Element;
    constexpr int PAIR = Format::PAIR;
    const int64_t slot = step.write_slots[i], page = slot / step.page_size, offset = slot % step.page_size;
    const int64_t base = (page * call.num_kv_heads + head) * step.page_size * call.dim;
    const Element* k = call.k.at<const Element>(step.write_rows[i], head);
    const Element* v = call.v.at<const Element>(step.write_rows[i], head);
    Element* keys = (Element*)call.k_cache + base + offset * PAIR;
    Element* values = (Element*)call.v_cache + base + offset / PAIR * PAIR * call.dim + offset % PAIR;
    for (int64_t d = 0; d < call.dim; d += PAIR) std::memcpy(keys + d * step.page_size, k + d, PAIR * sizeof(Element));
    if constexpr (PAIR == 2) {
        const bool is_second = offset % 2;
        const int64_t other = is_second ? i - 1 : i + 1, size = step.write_slots.size();
        if (other >= 0 && other < size && step.write_slots[other] == (slot ^ 1)) {
            if (is_second) return;
            const Element* next = call.v.at<const Element>(step.write_rows[other], head);
            for (int64_t d = 0; d < call.dim; d += LANES) store(values + d * PAIR, in_pairs(v + d, next + d));
            return;
        }
    }
    for (int64_t d = 0; d < call.dim; ++d) values[d * PAIR] = v[d];
}

// The first positions of a cell.
template <class Cache>
Positions<Cache> positions_of(const Step& step, const Attention& call, const Cell& cell, int64_t head) {
    using Element = typename Cache::Element;
    const int64_t first_page = step.page_indptr[cell.node], num_pages = step.page_indptr[cell.node + 1] - first_page;
    return {{(const Element*)call.k_cache, (const Element*)call.v_cache, step.page_ids.data() + first_page, num_pages,
             call.num_kv_heads, head, __builtin_ctzll(step.page_size), call.dim},
            cell.begin - step.starts[cell.node]};
}

// Reduce a cell for the rows of one KV head. The cache is in `Cache`, the arithmetic in `Format`; `after` is read next.
template <class Cache, class Format>
void run_cell(const Step& step, const Attention& call, const LayerTasks& layer, const Cell& cell, int64_t head,
              const Positions<Cache>& after, float* merge_data) {
    using Element = typename Cache::Element;
    using Weight = typename Format::Weight;
    static thread_local Scratch queries, wide, scores, positions, blocks, limits, results;
    const int64_t heads = call.num_heads / call.num_kv_heads, num_rows = cell.num_rows() * heads;
    const auto row_of = [&](int64_t i) { return step.row_ids[cell.row_begin + i / heads]; };
    const auto head_of = [&](int64_t i) { return head * heads + i % heads; };

    Tile<Format> tile = {};
    tile.num_rows = num_rows;
    tile.num_blocks = tile.blocks_of(num_rows);
    tile.dim = call.dim;
    tile.scale = call.scale;
    tile.softcap = call.softcap;
    tile.blocks = blocks.get<Block>(tile.num_blocks);
    tile.q = queries.get<Weight>(tile.padded_rows() * tile.query_stride());
    if (!std::is_same_v<Cache, Format> && Format::ROW_UNIT == 1) tile.wide = wide.get<float>(PANEL * call.dim);
    tile.scores = scores.get<float>(tile.padded_rows() * GROUP);
    tile.low = limits.get<int>(2 * num_rows);
    tile.high = tile.low + num_rows;
    int64_t* row_positions = positions.get<int64_t>(num_rows);
    for (int64_t i = 0; i < num_rows; ++i) row_positions[i] = step.positions[row_of(i)];
    tile.positions = row_positions;
    tile.template set_queries<Cache>([&](int64_t i) { return call.q.at<const Element>(row_of(i), head_of(i)); });

    // A group's partials are folded into those of the first, or stand behind them.
    Partials into = {results.get<float>(Partials::floats(num_rows, call.dim)), call.dim};
    if (!cell.completes)
        into.data = merge_data + Partials::floats((head * layer.num_partials + cell.partial) * heads, call.dim);
    Positions<Cache> here = positions_of<Cache>(step, call, cell, head);
    for (int64_t first = cell.begin; first < cell.end; first += GROUP) {
        const bool is_last = first + GROUP >= cell.end;
        const Positions<Cache> next = is_last ? after : Positions<Cache>{here.run, here.first + GROUP};
        const int64_t length = std::min<int64_t>(GROUP, cell.end - first), group = (first - cell.begin) / GROUP;
        tile.set_limits(first, length, call.window);
        reduce_group(tile, here, length, next, cell.folds ? into : into.from(group * num_rows), cell.folds && group > 0);
        here = next;
    }
    if (!cell.completes) return;
    for (int64_t i = 0; i < num_rows; ++i)
        finish<Cache>(call.out.at<Element>(row_of(i), head_of(i)), into[i], call.dim);
}

// Task i: heads of a cell one after the other, wide ones in the format's Wide.
template <class Format>
void run_task(const Step& step, const Attention& call, const LayerTasks& layer, int64_t i, float* merge_data) {
    using Wide = typename Format::Wide;
    const Task& task = layer.tasks[i];
    const Cell& cell = layer.cells[task.cell];
    const int64_t num_rows = cell.num_rows() * (call.num_heads / call.num_kv_heads), end = task.head + task.num_heads;
    // About: threads take turns.
    const Task& next = layer.tasks[std::min<int64_t>(i + layer.threads, layer.tasks.size() - 1)];
    for (int64_t head = task.head; head < end; ++head) {
        const auto after = head + 1 < end ? positions_of<Format>(step, call, cell, head + 1)
                                          : positions_of<Format>(step, call, layer.cells[next.cell], next.head);
        if (num_rows > Format::MANY) run_cell<Format, Wide>(step, call, layer, cell, head, after, merge_data);
        else run_cell<Format, Format>(step, call, layer, cell, head, after, merge_data);
    }
}

// Fold a row's partials in order of position, for all query heads of one KV head.
template <class Format>
void merge_row(const Attention& call, const LayerTasks& layer, int64_t i, int64_t head, float* merge_data) {
    const int64_t heads = call.num_heads / call.num_kv_heads;
    const Partials partials = {merge_data, call.dim};
    const auto at = [&](int64_t j, int64_t h) -> Partial& {
        return partials[(head * layer.num_partials + layer.merge_partials[j]) * heads + h];
    };
    for (int64_t h = 0; h < heads; ++h) {
        Partial& into = at(layer.merge_indptr[i], h);
        for (int64_t j = layer.merge_indptr[i] + 1; j < layer.merge_indptr[i + 1]; ++j) fold(into, at(j, h), call.dim);
        finish<Format>(call.out.at<typename Format::Element>(layer.merged[i], head * heads + h), into, call.dim);
    }
}

// The memory that `attend` folds rows in.
inline int64_t merge_floats(const Attention& call, const LayerTasks& layer) {
    return Partials::floats(layer.num_partials * call.num_heads, call.dim);
}

template <class Format>
void attend(const Step& step, const Attention& call, const LayerTasks& layer, float* merge_data, Worker& worker) {
    constexpr int64_t MERGES = 8;  // at a time: about a microsecond
    const int64_t kv_heads = call.num_kv_heads, tasks = layer.tasks.size();
    const int64_t writes = step.write_rows.size() * kv_heads, merges = layer.merged.size() * kv_heads;
    [[maybe_unused]] const typename Format::Mode mode;
    worker.share(writes, part_of(2 * call.dim),
                 [&](int64_t i) { write_slot<Format>(step, call, i / kv_heads, i % kv_heads); });
    worker.take_turns(tasks, [&](int64_t i) { run_task<Format>(step, call, layer, i, merge_data); });
    worker.share(merges, MERGES, [&](int64_t i) {
        merge_row<Format>(call, layer, i / kv_heads, i % kv_heads, merge_data);
    });
}

}  // namespace radixrt
