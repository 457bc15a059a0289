// Threads that go through the same code and share its loops. Knows nothing of what they do.
//
// OpenMP's own loops end with barriers at which waiting threads sleep where the wait policy is passive, and a sleep
// takes 10 to 15 us to end: as long as a small layer's attention. These threads wait awake, so that a whole decoder
// layer is one parallel region.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(_OPENMP)
#include <omp.h>
#endif

namespace radixrt {

// Where the threads are: in which loop, and how much of it is taken and done.
struct Progress {
    static constexpr int BLOCKS = 16;

    struct alignas(64) Block {
        std::atomic<uint64_t> taken{0};  // the loop's number, then the iterations taken of its block
    };

    Block blocks[BLOCKS];
    alignas(64) std::atomic<int64_t> done{0};
};

// One thread of a team. All come to the same loops in the same order.
class Worker {
   public:
    Worker(Progress& progress, int64_t index, int64_t threads) : progress_(progress), index_(index), threads_(threads) {}

    // Do iterations [0, count), `part` at a time, until none is left, and wait for those that others are at. Each thread
    // has a block of them that lies together and helps with the others' afterwards: what it wrote in one loop is in its
    // caches in the next (a product of 512 rows takes 0.7 to 0.9 of the time). One that comes late goes on at once.
    template <class F>
    void share(int64_t count, int64_t part, const F& f) {
        run(std::min<int64_t>(threads_, Progress::BLOCKS), count, part, f);
    }

    // The same, whoever is free doing the next one.
    template <class F>
    void take_turns(int64_t count, const F& f) {
        run(1, count, 1, f);
    }

   private:
    static constexpr int INDEX_BITS = 40;
    static constexpr int SPINS = 2000;  // about 50 us

    template <class F>
    void run(int64_t num_blocks, int64_t count, int64_t part, const F& f) {
        if (threads_ == 1) {
            for (int64_t i = 0; i < count; ++i) f(i);
            return;
        }
        if (count == 0) return;
        const int64_t home = index_ * num_blocks / threads_;
        for (int64_t i = 0; i < num_blocks; ++i) {
            const int64_t block = (home + i) % num_blocks;
            run_block(progress_.blocks[block].taken, count * block / num_blocks, count * (block + 1) / num_blocks, count,
                      part, f);
        }
        for (int i = 0; is_in(progress_.blocks[Progress::BLOCKS - 1].taken.load(std::memory_order_acquire)); ++i) {
            if (i < SPINS) pause();
            else std::this_thread::yield();  // the other may need this core
        }
        ++loop_;
    }

    template <class F>
    void run_block(std::atomic<uint64_t>& taken, int64_t first, int64_t last, int64_t count, int64_t part, const F& f) {
        uint64_t now = taken.load(std::memory_order_acquire);
        while (is_in(now) && first + index_of(now) < last) {
            const int64_t begin = first + index_of(now), size = std::min(part, last - begin);
            if (!taken.compare_exchange_weak(now, now + size, std::memory_order_acquire)) continue;
            for (int64_t i = begin; i < begin + size; ++i) f(i);
            if (progress_.done.fetch_add(size, std::memory_order_acq_rel) + size == count) {
                progress_.done.store(0, std::memory_order_relaxed);
                // In order: those that wait look at the last.
                for (auto& block : progress_.blocks)
                    block.taken.store((loop_ + 1) << INDEX_BITS, std::memory_order_release);
            }
            now = taken.load(std::memory_order_acquire);
        }
    }

    bool is_in(uint64_t taken) const { return taken >> INDEX_BITS == loop_; }
    static int64_t index_of(uint64_t taken) { return taken & ((uint64_t(1) << INDEX_BITS) - 1); }

    static void pause() {
#if defined(__x86_64__)
        _mm_pause();
#endif
    }

    Progress& progress_;
    const int64_t index_, threads_;
    uint64_t loop_ = 0;
};

// Threads that are worth starting for so many multiplications: one thread does so many before another has woken up.
inline int64_t worth(int64_t threads, int64_t work) { return work > 1 << 16 ? threads : 1; }

// Rows of so many elements that take a microsecond or so, for loops that do little with each.
inline int64_t part_of(int64_t width) { return (1 << 13) / width + 1; }

inline int64_t thread_index() {
#if defined(_OPENMP)
    return omp_get_thread_num();
#else
    return 0;
#endif
}

// Run `f` on so many threads at once, each as a Worker of one team.
template <class F>
void together(int64_t threads, const F& f) {
    Progress progress;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Worker worker(progress, thread_index(), threads);
        f(worker);
    }
}

}  // namespace radixrt
