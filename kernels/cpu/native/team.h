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

namespace radixrt {

// Where the threads are: in which loop, and how much of it is taken and done.
struct Progress {
    alignas(64) std::atomic<uint64_t> taken{0};  // the loop's number, then the iterations taken of it
    alignas(64) std::atomic<int64_t> done{0};
};

// One thread of a team. All come to the same loops in the same order.
class Worker {
   public:
    static constexpr int64_t GUIDED = 0;  // parts that get smaller towards the end; each lies together

    Worker(Progress& progress, int64_t threads) : progress_(progress), threads_(threads) {}

    // Do iterations [0, count), `part` at a time, until none is left, and wait for those that others are at. A thread
    // that comes late goes on at once.
    template <class F>
    void share(int64_t count, int64_t part, const F& f) {
        if (threads_ == 1) {
            for (int64_t i = 0; i < count; ++i) f(i);
            return;
        }
        if (count == 0) return;
        uint64_t taken = progress_.taken.load(std::memory_order_acquire);
        while (taken >> INDEX_BITS == loop_ && index_of(taken) < count) {
            const int64_t begin = index_of(taken), left = count - begin;
            const int64_t size = part == GUIDED ? std::max<int64_t>(left / (2 * threads_), 1) : std::min(part, left);
            if (!progress_.taken.compare_exchange_weak(taken, taken + size, std::memory_order_acquire)) continue;
            for (int64_t i = begin; i < begin + size; ++i) f(i);
            if (progress_.done.fetch_add(size, std::memory_order_acq_rel) + size == count) {
                progress_.done.store(0, std::memory_order_relaxed);
                progress_.taken.store((loop_ + 1) << INDEX_BITS, std::memory_order_release);
            }
            taken = progress_.taken.load(std::memory_order_acquire);
        }
        for (int i = 0; progress_.taken.load(std::memory_order_acquire) >> INDEX_BITS == loop_; ++i) {
            if (i < SPINS) pause();
            else std::this_thread::yield();  // the other may need this core
        }
        ++loop_;
    }

   private:
    static constexpr int INDEX_BITS = 40;
    static constexpr int SPINS = 2000;  // about 50 us

    static int64_t index_of(uint64_t taken) { return taken & ((uint64_t(1) << INDEX_BITS) - 1); }

    static void pause() {
#if defined(__x86_64__)
        _mm_pause();
#endif
    }

    Progress& progress_;
    const int64_t threads_;
    uint64_t loop_ = 0;
};

// Threads that are worth starting for so many multiplications: one thread does so many before another has woken up.
inline int64_t worth(int64_t threads, int64_t work) { return work > 1 << 16 ? threads : 1; }

// Rows of so many elements that take a microsecond or so, for loops that do little with each.
inline int64_t part_of(int64_t width) { return (1 << 13) / width + 1; }

// Run `f` on so many threads at once, each as a Worker of one team.
template <class F>
void together(int64_t threads, const F& f) {
    Progress progress;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Worker worker(progress, threads);
        f(worker);
    }
}

}  // namespace radixrt
