/* pinned_pool.cpp - csrc/bindings/pinned_pool.h over memory that is not pinned: who is given what, how much is kept,
 * and what threads, forks and failing allocations do. Prints what is wrong. */
#include "bindings/pinned_pool.h"

#include <sys/wait.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

namespace {

constexpr size_t kMiB = size_t{1} << 20;
std::atomic<int> failures{0};
std::atomic<int> until_failure{0}; // the allocation of this number, counted from 1, fails; 0: none
std::atomic<size_t> held_bytes{0};
size_t most_bytes = SIZE_MAX; // that the system has

void expect(bool condition, const char *what)
{
    if (condition) return;
    failures++;
    std::printf("wrong: %s\n", what);
}

ibp_status alloc(size_t num_bytes, int, void **host)
{
    if (held_bytes + num_bytes > most_bytes) return IBP_CUDA_ERROR;
    *host = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    held_bytes += num_bytes;
    return *host == MAP_FAILED ? IBP_CUDA_ERROR : IBP_OK;
}
ibp_status unmap(void *host, size_t num_bytes)
{
    held_bytes -= num_bytes;
    munmap(host, num_bytes);
    return IBP_OK;
}
const ibp::PinnedSource kSource = {alloc, unmap};

ibp::PinnedBlock taken(ibp::PinnedPool &pool, size_t num_bytes, bool should_be_used, int node = 0)
{
    ibp::PinnedBlock block{};
    bool is_used = false;
    expect(pool.take(num_bytes, node, &block, &is_used) == IBP_OK && block.data, "memory is given");
    expect(block.num_bytes >= num_bytes && block.num_bytes - num_bytes <= num_bytes / 8, "of about the size");
    expect(is_used == should_be_used, should_be_used ? "what is kept is used again" : "new memory");
    return block;
}

void test_what_is_given()
{
    ibp::PinnedPool pool(kSource, 8 * kMiB);
    const ibp::PinnedBlock block = taken(pool, kMiB, false);
    pool.give(block);
    expect(pool.kept_bytes() == kMiB && held_bytes == kMiB, "one block is kept");
    pool.give(taken(pool, 2 * kMiB, false));
    pool.give(taken(pool, kMiB, false, 1)); // another node's
    expect(pool.kept_bytes() == 4 * kMiB, "three blocks are kept");
    const ibp::PinnedBlock again = taken(pool, kMiB - kMiB / 16, true);
    expect(again.data == block.data, "the smallest that fits, of the node");
    pool.give(again);
    pool.give(taken(pool, kMiB / 2, false)); // what is kept is too large
    pool.give(taken(pool, 1000, false));     // too little to be kept
    expect(pool.kept_bytes() == 4 * kMiB + kMiB / 2, "small blocks are not kept");
    expect(pool.release(0) == 4 * kMiB + kMiB / 2 && held_bytes == 0, "all is released");
}

void test_bounds()
{
    ibp::PinnedPool pool(kSource, 4 * kMiB);
    ibp::PinnedBlock blocks[6];
    for (size_t i = 0; i < 6; i++) blocks[i] = taken(pool, kMiB + i * kMiB / 4, false);
    for (const ibp::PinnedBlock &block : blocks) pool.give(block);
    expect(pool.kept_bytes() <= 4 * kMiB && held_bytes == pool.kept_bytes(), "no more than the limit is kept");
    expect(taken(pool, blocks[5].num_bytes, true).data == blocks[5].data, "what was given last is kept");
    pool.give(blocks[5]);
    pool.give(taken(pool, 5 * kMiB, false));
    expect(pool.kept_bytes() <= 4 * kMiB, "more than the limit at once is not kept");
    most_bytes = held_bytes + kMiB;
    const ibp::PinnedBlock large = taken(pool, 3 * kMiB, false);
    expect(pool.kept_bytes() == 0, "what is kept makes room");
    most_bytes = SIZE_MAX;
    pool.give(large);
    pool.set_limit(0);
    expect(held_bytes == 0, "a limit of 0 keeps nothing");
    pool.give(taken(pool, kMiB, false));
    expect(held_bytes == 0, "nor later");
}

void test_threads()
{
    ibp::PinnedPool pool(kSource, 16 * kMiB);
    const auto work = [&](unsigned seed) {
        std::mt19937 generator(seed);
        for (int i = 0; i < 2000; i++) {
            const size_t num_bytes = ibp::PinnedPool::kLeastKept + generator() % (kMiB / 4);
            ibp::PinnedBlock block{};
            bool is_used = false;
            if (pool.take(num_bytes, 0, &block, &is_used) != IBP_OK) expect(false, "memory is given to a thread");
            std::memcpy(block.data, &seed, sizeof seed);
            std::this_thread::yield();
            expect(std::memcmp(block.data, &seed, sizeof seed) == 0, "a block has one user");
            pool.give(block);
        }
    };
    std::vector<std::thread> threads;
    for (unsigned seed = 0; seed < 4; seed++) threads.emplace_back(work, seed);
    for (std::thread &thread : threads) thread.join();
    expect(held_bytes == pool.kept_bytes() && held_bytes <= 16 * kMiB, "the bound holds with threads");
    pool.set_limit(0);
}

/* A child frees the copies of its parent's blocks, and the parent's stay as they are. */
void test_forks()
{
    ibp::PinnedPool pool(kSource, 8 * kMiB);
    const ibp::PinnedBlock block = taken(pool, kMiB, false);
    static_cast<uint8_t *>(block.data)[5] = 7;
    std::fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        pool.give(block);
        _exit(pool.kept_bytes() == 0 && held_bytes == kMiB ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    expect(status == 0, "a child does not keep what its parent has pinned");
    expect(static_cast<uint8_t *>(block.data)[5] == 7, "the parent's memory is as it was");
    pool.give(block);
    pool.set_limit(0);
    // The process's own pool can be used in a child.
    ibp::PinnedPool &own = ibp::PinnedPool::of_process();
    const pid_t second = fork();
    if (second == 0) _exit(own.kept_bytes() == 0 && own.limit() == ibp::PinnedPool::default_limit() ? 0 : 1);
    waitpid(second, &status, 0);
    expect(status == 0, "a child has a pool");
}

/* Destructors give memory back: whichever allocation fails, nothing is thrown, and no block is lost. */
void test_failing_allocations()
{
    constexpr size_t kLarge = 65 * kMiB; // its pages are made by several threads where there are processors
    bool has_failed = true;
    for (int k = 1; has_failed; k++) {
        ibp::PinnedPool pool(kSource, 2 * kMiB);
        const ibp::PinnedBlock blocks[] = {taken(pool, kMiB, false), taken(pool, kMiB, false),
                                           taken(pool, kMiB, false)};
        void *const pages = mmap(nullptr, kLarge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        until_failure = k;
        try {
            for (const ibp::PinnedBlock &block : blocks) pool.give(block);
            expect(held_bytes == pool.kept_bytes() && held_bytes <= 2 * kMiB, "what cannot be kept is freed");
            pool.set_limit(kMiB);
            ibp::make_pages(pages, kLarge, -1);
        } catch (const std::bad_alloc &) {
            expect(false, "a failing allocation is thrown");
        }
        has_failed = until_failure <= 0;
        until_failure = 0;
        munmap(pages, kLarge);
        pool.release(0);
        expect(held_bytes == 0, "all is released");
    }
}

} // namespace

void *operator new(size_t num_bytes)
{
    if (until_failure > 0 && --until_failure == 0) {
        until_failure = -1;
        throw std::bad_alloc();
    }
    if (void *const made = std::malloc(num_bytes)) return made;
    throw std::bad_alloc();
}
void operator delete(void *made) noexcept { std::free(made); }
void operator delete(void *made, size_t) noexcept { std::free(made); }

int main()
{
    test_what_is_given();
    test_bounds();
    test_threads();
    test_forks();
    test_failing_allocations();
    std::printf("%d wrong\n", failures.load());
    return failures != 0;
}
