// pinned_pool.h - pinned host memory that is kept for its next user: to pin memory takes longer than to fill it.
#ifndef IBP_PINNED_POOL_H
#define IBP_PINNED_POOL_H

#include "../cuda/host_pages.h"
#include "ibp_cuda.h"

#include <pthread.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <vector>

namespace ibp {

// Pinned memory of a NUMA node, in the process that has pinned it.
struct PinnedBlock {
    void *data;
    size_t num_bytes;
    int node;
    pid_t process;
};

// Where pinned memory comes from and goes to: the system, or a test's.
struct PinnedSource {
    ibp_status (*alloc)(size_t num_bytes, int node, void **host);
    ibp_status (*free)(void *host, size_t num_bytes);
};

// Blocks that nobody uses, at most `limit` bytes of them: beyond that, the blocks that were given first go back to the
// system. Functions may be called by several threads at once.
//
// GPUs may still read a block that is given back, on any stream: whoever is given a used block waits for them first.
// A process that forks leaves its blocks to its parent: what the child has is a copy that is not pinned.
class PinnedPool {
  public:
    static constexpr size_t kLeastKept = size_t{64} << 10; // bytes: of less, pinning is as fast as waiting for GPUs

    PinnedPool(const PinnedSource &source, size_t limit) : source_(source), limit_(limit) {}

    // What the system has, once for the process. It is never destroyed: objects that outlive the interpreter use it.
    static PinnedPool &of_process()
    {
        static PinnedPool &pool = *[] {
            auto *const made = new PinnedPool({ibp_cuda_alloc_pinned, ibp_cuda_free_pinned}, default_limit());
            pthread_atfork([] { of_process().mutex_.lock(); }, [] { of_process().mutex_.unlock(); },
                           [] { of_process().start_again(); });
            return made;
        }();
        return pool;
    }

    // 4 GiB, or an eighth of the machine's memory where that is less.
    static size_t default_limit()
    {
        const auto pages = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)),
                   page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
        return std::min(size_t{4} << 30, pages / 8 * page_bytes);
    }

    // A block of at least num_bytes > 0 bytes, and at most an eighth more, on a node. is_used: it is not new.
    // @return what pinning new memory returns. Where that fails, what is kept is freed first.
    ibp_status take(size_t num_bytes, int node, PinnedBlock *block, bool *is_used)
    {
        *is_used = take_kept(num_bytes, node, block);
        if (*is_used) return IBP_OK;
        *block = {nullptr, num_bytes, node, getpid()};
        ibp_status status = source_.alloc(num_bytes, node, &block->data);
        if (status == IBP_CUDA_ERROR && release(0) > 0) status = source_.alloc(num_bytes, node, &block->data);
        return status;
    }

    void give(const PinnedBlock &block)
    {
        if (block.process != getpid()) {
            munmap(block.data, block.num_bytes);
            return;
        }
        if (block.num_bytes < kLeastKept || !keep(block)) source_.free(block.data, block.num_bytes);
        release(limit());
    }

    size_t limit()
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        return limit_;
    }
    void set_limit(size_t limit)
    {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            limit_ = limit;
        }
        release(limit);
    }

    size_t kept_bytes()
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        return kept_bytes_;
    }

    // Frees the blocks that were given first until at most most_bytes are kept. @return the bytes freed.
    size_t release(size_t most_bytes)
    {
        size_t freed_bytes = 0;
        PinnedBlock block{};
        while (take_first(most_bytes, &block)) {
            source_.free(block.data, block.num_bytes);
            freed_bytes += block.num_bytes;
        }
        return freed_bytes;
    }

  private:
    // The smallest block that fits.
    bool take_kept(size_t num_bytes, int node, PinnedBlock *block)
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        auto best = kept_.end();
        for (auto it = kept_.begin(); it != kept_.end(); ++it) {
            const bool fits =
                it->node == node && it->num_bytes >= num_bytes && it->num_bytes - num_bytes <= num_bytes / 8;
            if (fits && (best == kept_.end() || it->num_bytes < best->num_bytes)) best = it;
        }
        if (best == kept_.end()) return false;
        *block = *best;
        kept_bytes_ -= best->num_bytes;
        kept_.erase(best);
        return true;
    }

    // The block that was given first, if more than most_bytes are kept. Allocates nothing: destructors come here.
    bool take_first(size_t most_bytes, PinnedBlock *block)
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (kept_bytes_ <= most_bytes) return false;
        *block = kept_.front();
        kept_bytes_ -= block->num_bytes;
        kept_.erase(kept_.begin());
        return true;
    }

    bool keep(const PinnedBlock &block)
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (block.num_bytes > limit_) return false;
        try {
            kept_.push_back(block);
        } catch (const std::bad_alloc &) {
            return false;
        }
        kept_bytes_ += block.num_bytes;
        return true;
    }

    // In a child process, whose parent holds the lock: the blocks that were kept are copies here.
    void start_again()
    {
        for (const PinnedBlock &block : kept_) munmap(block.data, block.num_bytes);
        kept_.clear();
        kept_bytes_ = 0;
        mutex_.unlock();
    }

    const PinnedSource source_;
    std::mutex mutex_;
    std::vector<PinnedBlock> kept_; // in the order in which they were given
    size_t limit_, kept_bytes_ = 0;
};

} // namespace ibp

#endif
