// pinned_pool.h - keeps pinned host memory for reuse, because pinning memory takes longer than filling it.
#ifndef IBP_PINNED_POOL_H
#define IBP_PINNED_POOL_H

#include "../cuda/host_pages.h"
#include "../internal/ibp_machine.h"

#include <pthread.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <vector>

namespace ibp {

// A block of pinned memory on a NUMA node. process: the id of the process that pinned the block. In other processes the
// block is not pinned.
struct PinnedBlock {
    void *data;
    size_t num_bytes;
    int node;
    pid_t process;
};

// The functions with which a pool allocates and frees pinned memory. Tests substitute their own functions.
struct PinnedSource {
    ibp_status (*alloc)(size_t num_bytes, int node, void **host);
    ibp_status (*free)(void *host, size_t num_bytes);
};

// A pool of pinned blocks. It keeps blocks that their owners give back, and hands them to new owners. It keeps at most
// `limit` bytes; if more are given back, it frees the blocks that it has kept longest. Several threads may call its
// functions at once.
//
// When a block is given back, GPUs may still be reading it, on any stream. So the next owner of the block must wait for
// the GPUs before it writes to the block. After fork() the blocks belong to the parent process. The child process has
// copies, which are not pinned.
class PinnedPool {
  public:
    // Size in bytes of the smallest block that the pool keeps. Pinning a smaller block takes no longer than waiting for
    // the GPUs, which the next owner of a kept block must do.
    static constexpr size_t kLeastKept = size_t{64} << 10;

    PinnedPool(const PinnedSource &source, size_t limit) : source_(source), limit_(limit) {}

    // Returns the pool of this process, which allocates its blocks with ibp_cuda_alloc_pinned. The pool is never
    // destroyed, because some objects that use it outlive the interpreter.
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

    // Returns 4 GiB, or an eighth of the machine's memory if that is less.
    static size_t default_limit()
    {
        const auto pages = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)),
                   page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
        return std::min(size_t{4} << 30, pages / 8 * page_bytes);
    }

    // Takes a block of at least num_bytes > 0 bytes, and at most an eighth more, on a NUMA node. Allocates a new block
    // if no kept block fits. If this fails, frees all kept blocks and tries once more. Returns IBP_OK if it took a kept
    // block, else the status of the allocation.
    //
    // is_used: receives true if the block has had an owner before.
    ibp_status take(size_t num_bytes, int node, PinnedBlock *block, bool *is_used)
    {
        *is_used = take_kept(num_bytes, node, block);
        if (*is_used) return IBP_OK;
        *block = {nullptr, num_bytes, node, getpid()};
        ibp_status status = source_.alloc(num_bytes, node, &block->data);
        if (status == IBP_CUDA_ERROR && release(0) > 0) status = source_.alloc(num_bytes, node, &block->data);
        return status;
    }

    // Gives a block back. The pool keeps or frees it. If this process is a child that has only a copy of the block, the
    // copy is unmapped.
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

    // Frees kept blocks, oldest first, until at most most_bytes bytes are kept. Returns the number of bytes freed.
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
    // Takes the smallest kept block that fits: one on the node, of at least num_bytes bytes and at most an eighth more.
    // Returns whether there is such a block.
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

    // If more than most_bytes bytes are kept, takes the block that was given back longest ago. Returns whether it took
    // a block. It allocates nothing, because destructors call it.
    bool take_first(size_t most_bytes, PinnedBlock *block)
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (kept_bytes_ <= most_bytes) return false;
        *block = kept_.front();
        kept_bytes_ -= block->num_bytes;
        kept_.erase(kept_.begin());
        return true;
    }

    // Keeps a block. Returns false if the block is larger than the limit, or if there is no memory for another entry of
    // kept_.
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

    // Empties the pool of a child process, right after fork(). The parent took the lock before fork(), so the child
    // holds it. The child's kept blocks are only copies, so they are unmapped.
    void start_again()
    {
        for (const PinnedBlock &block : kept_) munmap(block.data, block.num_bytes);
        kept_.clear();
        kept_bytes_ = 0;
        mutex_.unlock();
    }

    const PinnedSource source_;
    std::mutex mutex_;
    std::vector<PinnedBlock> kept_; // in the order in which they were given back
    size_t limit_, kept_bytes_ = 0;
};

} // namespace ibp

#endif
