// A step's plan, and its tasks for layers of one shape: which rows meet which pages together, and what is folded after.
// Knows nothing of queries, keys and values.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "scratch.h"
#include "tile.h"

namespace radixrt {

// What tasks depend on beside the plan. Layers that agree share them.
struct LayerKey {
    int64_t window, num_heads, num_kv_heads, dim, threads;

    bool operator==(const LayerKey& other) const { return !std::memcmp(this, &other, sizeof other); }
};

constexpr int64_t NARROW = 8;  // rows of a KV head that take less time than reading what they read

// Rows [row_begin, row_end) of the plan's row_ids against positions [begin, end) of a node, for each KV head.
struct Cell {
    int64_t node, row_begin, row_end, begin, end;
    int64_t cost;     // of a head
    bool folds;       // its groups are folded in place: no row reads anything before them. Else a partial for each
    bool completes;   // it is all that its rows read
    int64_t partial;  // its first partial of a head, counted in rows: group g of row r is partial + g * rows + r

    int64_t num_rows() const { return row_end - row_begin; }
    // Reading takes longer than computing. Then a thread reads all heads of a page, which lie together: prefetchers of
    // CPUs read on from one into the next (0.85 to 0.95 of the time of a task for each head).
    bool is_narrow(const LayerKey& key) const { return num_rows() * key.num_heads <= NARROW * key.num_kv_heads; }
    int64_t num_partials() const { return folds ? 1 : (end - begin + GROUP - 1) / GROUP; }
};

// KV heads [head, head + num_heads) of a cell, for one thread.
struct Task {
    int64_t cell, head, num_heads;
};

struct LayerTasks {
    LayerKey key;
    int64_t threads;                       // that are worth starting
    std::vector<Cell> cells;               // longest first
    std::vector<Task> tasks;               // in the order in which threads take them
    std::vector<int64_t> merged;           // rows that no cell completes
    std::vector<int64_t> merge_indptr;     // [merged.size() + 1]
    std::vector<int64_t> merge_partials;   // the partials of each such row, in order of position
    int64_t num_partials = 0;              // of a head, counted in rows
};

// What layers use one after the other.
struct LayerMemory {
    Scratch normed, heads, attended, opened, gated, copy, partials;
};

struct Step {
    int64_t page_size;
    bool exact;
    std::vector<int64_t> positions, starts, page_indptr, page_ids, row_indptr, row_ids, write_rows, write_slots;
    std::vector<LayerTasks> layers;
    LayerMemory memory;

    const LayerTasks& tasks(const LayerKey& key);

   private:
    std::vector<Cell> tiles(const LayerKey& key) const;
};

// Every node's rows cut into tiles, each one cell that reaches from the first to the last group that the tile reads.
inline std::vector<Cell> Step::tiles(const LayerKey& key) const {
    // What a position costs beside its rows: reading it, in rows that could be computed meanwhile.
    constexpr int64_t READ_COST = 6;
    const int64_t heads = key.num_heads / key.num_kv_heads, limit = std::max<int64_t>(1, TILE / heads);
    std::vector<Cell> cells;
    for (size_t node = 0; node < starts.size(); ++node) {
        const int64_t start = starts[node], stop = start + (page_indptr[node + 1] - page_indptr[node]) * page_size;
        const int64_t num_rows = row_indptr[node + 1] - row_indptr[node], num_tiles = (num_rows + limit - 1) / limit;
        for (int64_t i = 0; i < num_tiles; ++i) {
            Cell cell = {};
            cell.node = node;
            cell.row_begin = row_indptr[node] + num_rows * i / num_tiles;
            cell.row_end = row_indptr[node] + num_rows * (i + 1) / num_tiles;
            int64_t low = INT64_MAX, high = 0;
            for (int64_t r = cell.row_begin; r < cell.row_end; ++r) {
                low = std::min(low, first_read(positions[row_ids[r]], key.window));
                high = std::max(high, positions[row_ids[r]] + 1);
            }
            cell.begin = start + std::max<int64_t>(0, low - start) / GROUP * GROUP;
            cell.end = std::min(stop, high);
            cell.folds = !exact || cell.begin <= low;
            cell.cost = (cell.end - cell.begin) * (cell.num_rows() * heads + READ_COST);
            if (cell.begin < cell.end) cells.push_back(cell);
        }
    }
    return cells;
}

inline const LayerTasks& Step::tasks(const LayerKey& key) {
    for (const LayerTasks& layer : layers)
        if (layer.key == key) return layer;
    LayerTasks& layer = layers.emplace_back();
    layer.key = key;

    const std::vector<Cell> whole = tiles(key);
    int64_t total = 0;
    for (const Cell& cell : whole) total += cell.cost * key.num_kv_heads;
    // A second thread costs 10 us, more on a busy machine, so each gets 25 us of work at least.
    constexpr int64_t MIN_WORK = 400'000;
    layer.threads = std::clamp<int64_t>(total * key.dim / MIN_WORK, 1, key.threads);
    // Four tasks a thread balance well enough; one thread has nothing to balance.
    const int64_t limit = layer.threads == 1 ? total + 1 : total / (4 * layer.threads) + 1;
    for (const Cell& cell : whole) {
        const int64_t groups = (cell.end - cell.begin + GROUP - 1) / GROUP;
        const int64_t cost = cell.cost * (cell.is_narrow(key) ? key.num_kv_heads : 1);  // of a task
        const int64_t parts = std::min(groups, (cost + limit - 1) / limit);
        for (int64_t i = 0; i < parts; ++i) {
            Cell part = cell;
            part.begin = cell.begin + groups * i / parts * GROUP;
            part.end = std::min(cell.end, cell.begin + groups * (i + 1) / parts * GROUP);
            part.cost = cell.cost / parts;
            part.folds = !exact || (cell.folds && i == 0);
            layer.cells.push_back(part);
        }
    }

    std::vector<int64_t> counts(positions.size());
    const auto rows_of = [&](const Cell& cell, auto&& each) {
        for (int64_t r = cell.row_begin; r < cell.row_end; ++r) each(row_ids[r]);
    };
    for (const Cell& cell : layer.cells) rows_of(cell, [&](int64_t row) { counts[row] += cell.num_partials(); });
    std::vector<std::vector<int64_t>> partials(positions.size());
    for (Cell& cell : layer.cells) {
        cell.completes = true;
        rows_of(cell, [&](int64_t row) { cell.completes &= counts[row] == 1; });
        if (cell.completes) continue;
        cell.partial = layer.num_partials;
        for (int64_t g = 0; g < cell.num_partials(); ++g)
            rows_of(cell, [&](int64_t row) { partials[row].push_back(layer.num_partials++); });
    }
    layer.merge_indptr.push_back(0);
    for (size_t row = 0; row < partials.size(); ++row) {
        if (partials[row].empty()) continue;
        layer.merged.push_back(row);
        layer.merge_partials.insert(layer.merge_partials.end(), partials[row].begin(), partials[row].end());
        layer.merge_indptr.push_back(layer.merge_partials.size());
    }
    std::stable_sort(layer.cells.begin(), layer.cells.end(),
                     [](const Cell& a, const Cell& b) { return a.cost > b.cost; });
    // Head by head, so that pages which several tasks read stay in the cache.
    const int64_t num_cells = layer.cells.size();
    for (int64_t head = 0; head < key.num_kv_heads; ++head)
        for (int64_t i = 0; i < num_cells; ++i)
            if (!layer.cells[i].is_narrow(key)) layer.tasks.push_back({i, head, 1});
    for (int64_t i = 0; i < num_cells; ++i)
        if (layer.cells[i].is_narrow(key)) layer.tasks.push_back({i, 0, key.num_kv_heads});
    return layer;
}

}  // namespace radixrt
