// The native CPU backend's entry points: steps, attention of one layer, copies of pages, products, norms, rotations,
// gates, decoder layers, which are all of these, and draws.
// Knows nothing of Python or torch: plain pointers and strides, checked by the caller.

#include "native/draw.h"
#include "native/layer.h"

namespace radixrt {

template <class Element>
void run(Step& step, const Attention& call) {
    const LayerTasks& tasks = step.tasks(call.key());
    float* partials = step.memory.partials.get<float>(merge_floats(call, tasks));
    together(tasks.threads,
             [&](Worker& worker) { attend<Vectors<Element>>(step, call, tasks, partials, worker); });
}

template <class Element>
void run(const Product& product) {
    static thread_local Scratch scratch;
    char* copy = scratch.get<char>(copy_bytes<Element>(product));
    together(worth(product.threads, product.work()),
             [&](Worker& worker) { multiply<Element>(product, copy, worker); });
}

template <class Element>
void run(const Norm& norm) {
    together(worth(norm.threads, norm.work()), [&](Worker& worker) { normalise<Element>(norm, worker); });
}

template <class Element>
void run(const Rotation& rotation) {
    together(worth(rotation.threads, rotation.work()), [&](Worker& worker) { rotate<Element>(rotation, worker); });
}

template <class Element>
void run(const Gate& its) {
    together(worth(its.threads, its.work()), [&](Worker& worker) { gate<Element>(its, worker); });
}

}  // namespace radixrt

using namespace radixrt;

#pragma GCC visibility push(default)
extern "C" {

// Copies its arguments: the arrays of an AttentionPlan and (row, slot) pairs to write. Freed by radixrt_free.
Step* radixrt_prepare(int64_t page_size, int32_t exact, const int64_t* const* arrays, const int64_t* sizes) {
    auto* step = new Step;
    step->page_size = page_size;
    step->exact = exact != 0;
    std::vector<int64_t>* fields[] = {&step->positions,  &step->starts,  &step->page_indptr, &step->page_ids,
                                      &step->row_indptr, &step->row_ids, &step->write_rows,  &step->write_slots};
    for (int i = 0; i < 8; ++i) fields[i]->assign(arrays[i], arrays[i] + sizes[i]);
    return step;
}

void radixrt_free(Step* step) { delete step; }

void radixrt_attend_float32(Step* step, const Attention* call) { run<float>(*step, *call); }

void radixrt_attend_bfloat16(Step* step, const Attention* call) { run<bfloat16>(*step, *call); }

void radixrt_multiply_float32(const Product* call) { run<float>(*call); }

void radixrt_multiply_bfloat16(const Product* call) { run<bfloat16>(*call); }

void radixrt_normalise_float32(const Norm* call) { run<float>(*call); }

void radixrt_normalise_bfloat16(const Norm* call) { run<bfloat16>(*call); }

void radixrt_rotate_float32(const Rotation* call) { run<float>(*call); }

void radixrt_rotate_bfloat16(const Rotation* call) { run<bfloat16>(*call); }

void radixrt_gate_float32(const Gate* call) { run<float>(*call); }

void radixrt_gate_bfloat16(const Gate* call) { run<bfloat16>(*call); }

void radixrt_run_float32(Step* step, const Layer* layer, const LayerRows* call) { run<float>(*step, *layer, *call); }

void radixrt_run_bfloat16(Step* step, const Layer* layer, const LayerRows* call) { run<bfloat16>(*step, *layer, *call); }

// Where each draws from its own row.
void radixrt_draw(const Draw* draws, int64_t num_draws, int64_t threads, int64_t* found) {
    int64_t work = 0;
    for (int64_t i = 0; i < num_draws; ++i) work += draws[i].count;
    together(worth(threads, work), [&](Worker& worker) {
        worker.take_turns(num_draws, [&](int64_t i) { found[i] = drawn(draws[i]); });
    });
}

// Copy page src[i] of each cache to page dst[i] of the one like it in targets; page_bytes[c] is the size of a page of
// cache c.
void radixrt_copy_pages(void* const* caches, void* const* targets, const int64_t* page_bytes, int64_t num_caches,
                        const int64_t* src, const int64_t* dst, int64_t num_pages, int32_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < num_caches * num_pages; ++i) {
        const int64_t bytes = page_bytes[i / num_pages];
        const char* cache = (const char*)caches[i / num_pages];
        char* target = (char*)targets[i / num_pages];
        std::memcpy(target + dst[i % num_pages] * bytes, cache + src[i % num_pages] * bytes, bytes);
    }
}
}
