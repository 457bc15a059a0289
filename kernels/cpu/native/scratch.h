// Memory that a thread keeps between calls. Knows nothing of what is in it.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

namespace radixrt {

// Fresh memory would be mapped page by page in each call.
class Scratch {
   public:
    template <class T>
    T* get(int64_t count) {
        const size_t need = (count * sizeof(T) + 63) / 64 * 64;
        if (need > size_) {
            data_.reset(std::aligned_alloc(64, need));
            size_ = need;
        }
        return (T*)data_.get();
    }

   private:
    struct Free { void operator()(void* data) const { std::free(data); } };
    std::unique_ptr<void, Free> data_;
    size_t size_ = 0;
};

}  // namespace radixrt
