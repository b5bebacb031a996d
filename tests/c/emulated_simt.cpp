/* emulated_simt.cpp - fibers, and what makes them a block of warps. No kernel is here: this file is optimised, and not
 * sanitized itself. SIMT_ASAN: the kernels have the address sanitizer, which is told of the fibers' stacks and of
 * shared memory. Races (emulated_races.cpp) are then not looked for. */
#include "emulated_simt.h"

#include <sys/mman.h>
#include <unistd.h>

#ifdef SIMT_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
static void __asan_poison_memory_region(const void *, size_t) {}
static void __asan_unpoison_memory_region(const void *, size_t) {}
static void __sanitizer_start_switch_fiber(void **, const void *, size_t) {}
static void __sanitizer_finish_switch_fiber(void *, const void **, size_t *) {}
static void __sanitizer_print_stack_trace() {}
#endif

uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace ibp {
alignas(16) uint4 shared[kSharedBytes / sizeof(uint4)];
}

/* Saves the registers that a call keeps and the stack pointer to *from, and goes on where `to` was saved. */
#if defined(__x86_64__)
extern "C" void simt_switch(void **from, void *to);
asm(R"(
    .text
    .globl simt_switch
    .type simt_switch, @function
simt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size simt_switch, . - simt_switch
)");
static void *first_frame(uint8_t *top, void (*entry)())
{
    uint64_t *const frame = reinterpret_cast<uint64_t *>(top) - 8; /* six registers, the entry, no caller */
    std::fill(frame, frame + 8, 0);
    frame[6] = reinterpret_cast<uint64_t>(entry);
    return frame;
}
#elif defined(__aarch64__)
extern "C" void simt_switch(void **from, void *to);
asm(R"(
    .text
    .globl simt_switch
    .type simt_switch, %function
simt_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
    .size simt_switch, . - simt_switch
)");
static void *first_frame(uint8_t *top, void (*entry)())
{
    uint64_t *const frame = reinterpret_cast<uint64_t *>(top) - 20;
    std::fill(frame, frame + 20, 0);
    frame[11] = reinterpret_cast<uint64_t>(entry);
    return frame;
}
#else
#error "write simt_switch for this processor"
#endif

namespace simt {

constexpr uint32_t kWarp = 32, kMostThreads = 1024;
/* A GPU has 16 named barriers. The others stand in for barriers in shared memory (Ring in tiles.cuh). */
constexpr uint32_t kBarriers = 48;
constexpr size_t kStackBytes = 256 << 10;
constexpr uint64_t kMostSteps =
    20'000'000; /* of a launch, a warp's way from one collective to the next: no launch of a test has nearly as many */

enum class State { ready, waits, at_barrier, returned };

static const char *const kNames[] = {"__syncwarp",        "barrier",           "arrival",           "__shfl_sync",
                                     "__shfl_up_sync",    "__shfl_down_sync",  "__shfl_xor_sync",   "__ballot_sync",
                                     "__any_sync",        "__all_sync",        "__reduce_add_sync", "__reduce_min_sync",
                                     "__reduce_max_sync", "__reduce_and_sync", "__reduce_or_sync",  "__reduce_xor_sync",
                                     "__match_any_sync"};

struct Fiber {
    uint8_t *stack;
    void *saved, *fake_stack;
    State state;
    bool shows_stack;
    Kind kind;
    uint32_t mask, argument, width;
    uint64_t value, result;
    const char *file;
    int line;
    uint64_t place; /* in the program */
};

static Fiber fibers[kMostThreads];
static Fiber *current;
static void *scheduler, *scheduler_fake_stack;
static const void *scheduler_stack;
static size_t scheduler_stack_bytes;
static const std::function<void()> *kernel;
static uint64_t order = 1;

void seed(uint64_t seed) { order = seed * 2 + 1; }

static uint32_t draw(uint32_t limit)
{
    order = order * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<uint32_t>((order >> 33) % limit);
}

/* ---- from fiber to scheduler and back ---- */

static void enter(Fiber *fiber)
{
    current = fiber;
    threadIdx = {static_cast<uint32_t>(fiber - fibers), 0, 0};
    __sanitizer_start_switch_fiber(&scheduler_fake_stack, fiber->stack, kStackBytes);
    simt_switch(&scheduler, fiber->saved);
    __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
}

static void leave(Fiber *fiber, bool for_ever)
{
    __sanitizer_start_switch_fiber(for_ever ? nullptr : &fiber->fake_stack, scheduler_stack, scheduler_stack_bytes);
    simt_switch(&fiber->saved, scheduler);
    __sanitizer_finish_switch_fiber(fiber->fake_stack, &scheduler_stack, &scheduler_stack_bytes);
}

static void run_fiber()
{
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
    (*kernel)();
    current->state = State::returned;
    leave(current, true);
}

static void start(Fiber *fiber)
{
    if (!fiber->stack) {
        const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)); /* below a stack, never to be touched */
        void *const memory =
            mmap(nullptr, page + kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED || mprotect(memory, page, PROT_NONE) != 0) abort();
        fiber->stack = static_cast<uint8_t *>(memory) + page;
    }
    fiber->saved = first_frame(fiber->stack + kStackBytes, run_fiber);
    fiber->state = State::ready;
    fiber->shows_stack = false;
}

/* ---- errors ---- */

[[noreturn]] static void give_up(const char *what, uint32_t first, uint32_t end)
{
    fflush(stdout);
    fprintf(stderr, "block %u, threads %u to %u: %s\n", blockIdx.x, first, end - 1, what);
    bool shown[kMostThreads] = {};
    for (uint32_t t = first; t < end; t++) {
        if (shown[t]) continue;
        Fiber &one = fibers[t];
        fprintf(stderr,
                one.state == State::ready      ? "running"
                : one.state == State::returned ? "returned"
                                               : "%s at %s:%d, mask %08x, argument %u, width %u",
                kNames[static_cast<int>(one.kind)], one.file, one.line, one.mask, one.argument, one.width);
        fprintf(stderr, "; threads");
        const auto is_here = [&](const Fiber &f) {
            const bool waits = one.state == State::waits || one.state == State::at_barrier;
            return f.state == one.state &&
                   (!waits || (f.kind == one.kind && f.line == one.line && f.file == one.file && f.mask == one.mask));
        };
        for (uint32_t u = t; u < end; u++)
            if (is_here(fibers[u])) shown[u] = true, fprintf(stderr, " %u", u);
        fprintf(stderr, "\n");
        if (one.state != State::waits && one.state != State::at_barrier) continue;
        one.shows_stack = true;
        enter(&one);
    }
    abort();
}

/* ---- races ---- */

constexpr uint32_t kMostWarps = kMostThreads / kWarp;
/* By warp: how many synchronisations of each warp come before what it does now; its own number goes up with each. */
static uint32_t seen[kMostWarps][kMostWarps];

struct Touch {
    uint32_t thread, when; /* when: 1 more than the synchronisations before it; 0: none */
    const void *place;
};
struct Touches {
    Touch write, read;
};
struct Region {
    uintptr_t begin, end;
    std::vector<Touches> of_byte;
};
static Region regions[2]; /* shared memory and what is watched */

void watch(const void *bytes, size_t num_bytes)
{
    regions[1].begin = reinterpret_cast<uintptr_t>(bytes), regions[1].end = regions[1].begin + num_bytes;
}

static bool is_unordered(const Touch &earlier, uint32_t thread)
{
    if (earlier.when == 0 || earlier.thread == thread) return false;
    return earlier.when > seen[thread / kWarp][earlier.thread / kWarp];
}

void touch(const void *bytes, size_t num_bytes, bool writes, const void *place)
{
    const uint32_t thread = threadIdx.x, when = seen[thread / kWarp][thread / kWarp] + 1;
    for (Region &region : regions) {
        const uintptr_t first = reinterpret_cast<uintptr_t>(bytes);
        if (region.of_byte.empty() || first < region.begin || first + num_bytes > region.end) continue;
        for (uintptr_t at = first; at < first + num_bytes; at++) {
            Touches &touches = region.of_byte[at - region.begin];
            const Touch *const other = is_unordered(touches.write, thread)            ? &touches.write
                                       : writes && is_unordered(touches.read, thread) ? &touches.read
                                                                                      : nullptr;
            if (other) {
                fprintf(stderr, "a race: thread %u %s, thread %u %s the byte before; addr2line -Cfip: %p %p\n", thread,
                        writes ? "writes" : "reads", other->thread, other == &touches.write ? "wrote" : "read", place,
                        other->place);
                abort();
            }
            (writes ? touches.write : touches.read) = {thread, when, place};
        }
    }
}

static void forget_touches(size_t shared_bytes)
{
    memset(seen, 0, sizeof seen);
    regions[0].begin = reinterpret_cast<uintptr_t>(ibp::shared), regions[0].end = regions[0].begin + shared_bytes;
#ifndef SIMT_ASAN
    for (Region &region : regions) region.of_byte.assign(region.end - region.begin, {});
#endif
}

static void order_warps(const std::vector<uint32_t> &warps)
{
    uint32_t latest[kMostWarps] = {};
    for (uint32_t w : warps) {
        seen[w][w]++;
        for (uint32_t i = 0; i < kMostWarps; i++) latest[i] = std::max(latest[i], seen[w][i]);
    }
    for (uint32_t w : warps) std::copy(latest, latest + kMostWarps, seen[w]);
}

/* ---- collectives ---- */

/* Which lane's number a shuffle gives to a lane; the lane itself where it would leave its part of the warp. */
static uint32_t source_of(const Fiber &fiber, uint32_t lane)
{
    const uint32_t begin = lane / fiber.width * fiber.width, end = begin + fiber.width;
    switch (fiber.kind) {
    case Kind::shfl: return begin + fiber.argument % fiber.width;
    case Kind::shfl_up: return fiber.argument <= lane - begin ? lane - fiber.argument : lane;
    case Kind::shfl_down: return fiber.argument < end - lane ? lane + fiber.argument : lane;
    default: return (lane ^ fiber.argument) < end ? lane ^ fiber.argument : lane;
    }
}

static uint64_t result_of(const Fiber *warp, uint32_t lane, uint32_t mask)
{
    const Fiber &mine = warp[lane];
    if (mine.kind >= Kind::shfl && mine.kind <= Kind::shfl_xor) return warp[source_of(mine, lane)].value;
    uint64_t result = mine.kind == Kind::all ? 1 : 0;
    bool first = true;
    for (uint32_t i = 0; i < kWarp; i++) {
        if (!(mask >> i & 1u)) continue;
        const uint64_t value = warp[i].value;
        const bool less = static_cast<int64_t>(value) < static_cast<int64_t>(result);
        switch (mine.kind) {
        case Kind::ballot: result |= value << i; break;
        case Kind::any: result |= value; break;
        case Kind::all: result &= value; break;
        case Kind::add: result += value; break;
        case Kind::least: result = first || less ? value : result; break;
        case Kind::most: result = first || !less ? value : result; break;
        case Kind::bit_and: result = first ? value : result & value; break;
        case Kind::bit_or: result |= value; break;
        case Kind::bit_xor: result ^= value; break;
        case Kind::match_any: result |= uint64_t{value == mine.value} << i; break;
        default: break;
        }
        first = false;
    }
    return result;
}

/* Threads and warps that have come to each barrier. */
struct Barrier {
    uint32_t arrived, expected;
};
static Barrier barriers[kBarriers];

static void arrive(uint32_t first)
{
    Fiber *const warp = fibers + first;
    const uint32_t id = warp->argument;
    if (id >= kBarriers || warp->width % kWarp != 0 || warp->width == 0 || warp->width > blockDim.x)
        give_up("there is no such barrier, or not of so many threads", first, first + kWarp);
    Barrier &barrier = barriers[id];
    if (barrier.arrived != 0 && barrier.expected != warp->width)
        give_up("a barrier of different numbers of threads", 0, blockDim.x);
    barrier.expected = warp->width;
    barrier.arrived += kWarp;
    const State then = warp->kind == Kind::barrier ? State::at_barrier : State::ready;
    for (uint32_t lane = 0; lane < kWarp; lane++) warp[lane].state = then;
    if (barrier.arrived < barrier.expected) return;
    std::vector<uint32_t> warps;
    for (uint32_t t = 0; t < blockDim.x; t++) {
        if (fibers[t].state != State::at_barrier || fibers[t].argument != id) continue;
        fibers[t].state = State::ready;
        if (t % kWarp == 0) warps.push_back(t / kWarp);
    }
    order_warps(warps);
    barrier.arrived = 0;
}

static bool is_barrier(const Fiber &fiber) { return fiber.kind == Kind::barrier || fiber.kind == Kind::arrival; }

/* Completes the collectives of a warp whose lanes are all there. All its lanes wait or have returned. */
static void complete(uint32_t first)
{
    Fiber *const warp = fibers + first;
    bool progresses = false, waits = false;
    for (uint32_t lane = 0; lane < kWarp; lane++) {
        const Fiber &mine = warp[lane];
        if (mine.state != State::waits) continue;
        waits = true;
        bool whole = true;
        for (uint32_t i = 0; i < kWarp; i++) {
            const Fiber &other = warp[i];
            if (!(mine.mask >> i & 1u)) continue;
            whole = whole && other.state == State::waits && other.kind == mine.kind && other.mask == mine.mask &&
                    other.line == mine.line && other.place == mine.place &&
                    (other.file == mine.file || strcmp(other.file, mine.file) == 0);
            if (whole && is_barrier(mine) && (other.argument != mine.argument || other.width != mine.width))
                whole = false;
        }
        if (!whole) continue;
        progresses = true;
        if (is_barrier(mine)) return arrive(first);
        const uint32_t mask = mine.mask;
        if (mine.kind == Kind::sync) order_warps({first / kWarp});
        const bool shuffles = mine.kind >= Kind::shfl && mine.kind <= Kind::shfl_xor,
                   is_own = shuffles || mine.kind == Kind::match_any; /* each lane's result */
        const uint64_t result = is_own ? 0 : result_of(warp, lane, mask);
        for (uint32_t i = 0; i < kWarp; i++) {
            if (!(mask >> i & 1u)) continue;
            if (shuffles && !(mask >> source_of(warp[i], i) & 1u))
                give_up("a shuffle from a lane that takes no part", first, first + kWarp);
            warp[i].result = is_own ? result_of(warp, i, mask) : result;
        }
        for (uint32_t i = 0; i < kWarp; i++)
            if (mask >> i & 1u) warp[i].state = State::ready;
    }
    if (waits && !progresses)
        give_up("lanes of a warp wait for each other at different collectives", first, first + kWarp);
}

/* What tells the place of a collective in the program from others: the calls that lead to it. Frame pointers link the
 * callers' frames; the first function of a fiber has a caller with none. */
static uint64_t place_of(const uintptr_t *frame)
{
    uint64_t place = 0;
    for (; frame != nullptr; frame = reinterpret_cast<const uintptr_t *>(frame[0]))
        place = (place ^ frame[1]) * 0x9e3779b97f4a7c15ull;
    return place;
}

uint64_t collective(Kind kind, uint32_t mask, uint64_t value, uint32_t argument, uint32_t width, const char *file,
                    int line)
{
    Fiber *const mine = current;
    const bool shuffles = kind >= Kind::shfl && kind <= Kind::shfl_xor;
    mine->kind = kind, mine->mask = mask, mine->value = value, mine->argument = argument, mine->width = width,
    mine->file = file, mine->line = line,
    mine->place = place_of(static_cast<const uintptr_t *>(__builtin_frame_address(0)));
    mine->state = State::waits;
    const bool good_width = !shuffles || (width >= 1 && width <= kWarp && (width & (width - 1)) == 0);
    if (!(mask >> threadIdx.x % kWarp & 1u) || !good_width) {
        fprintf(stderr, "%s at %s:%d: thread %u is not in the mask %08x, or the width %u is none\n",
                kNames[static_cast<int>(kind)], file, line, threadIdx.x, mask, width);
        __sanitizer_print_stack_trace();
        abort();
    }
    leave(mine, false);
    while (mine->shows_stack) {
        __sanitizer_print_stack_trace();
        mine->shows_stack = false;
        leave(mine, false);
    }
    return mine->result;
}

/* ---- blocks ---- */

static void run_warp(uint32_t first)
{
    const uint32_t start = draw(kWarp), step = draw(2) ? 1 : kWarp - 1;
    for (uint32_t i = 0; i < kWarp; i++) {
        Fiber *const fiber = &fibers[first + (start + i * step) % kWarp];
        if (fiber->state == State::ready) enter(fiber);
    }
    complete(first);
}

static void run_block(uint64_t &steps)
{
    for (uint32_t t = 0; t < blockDim.x; t++) start(&fibers[t]);
    memset(barriers, 0, sizeof barriers);
    std::vector<uint32_t> ready;
    for (;;) {
        ready.clear();
        bool done = true;
        for (uint32_t t = 0; t < blockDim.x; t += kWarp) {
            const auto in_state = [&](State state) {
                return std::any_of(fibers + t, fibers + t + kWarp, [=](const Fiber &f) { return f.state == state; });
            };
            if (in_state(State::ready)) ready.push_back(t);
            done = done && std::all_of(fibers + t, fibers + t + kWarp,
                                       [](const Fiber &f) { return f.state == State::returned; });
        }
        if (done) return;
        if (ready.empty()) give_up("no warp can go on", 0, blockDim.x);
        if (++steps > kMostSteps) give_up("there is no end", 0, blockDim.x);
        run_warp(ready[draw(static_cast<uint32_t>(ready.size()))]);
    }
}

void launch(uint32_t num_blocks, uint32_t num_threads, size_t shared_bytes, const std::function<void()> &body)
{
    if (num_blocks == 0 || num_threads == 0 || num_threads > kMostThreads || num_threads % kWarp != 0 ||
        shared_bytes > ibp::kSharedBytes) {
        fprintf(stderr, "a launch of %u blocks of %u threads with %zu bytes of shared memory\n", num_blocks,
                num_threads, shared_bytes);
        abort();
    }
    kernel = &body;
    gridDim = {num_blocks, 1, 1}, blockDim = {num_threads, 1, 1};
    uint8_t *const memory = reinterpret_cast<uint8_t *>(ibp::shared);
    __asan_poison_memory_region(memory + shared_bytes, ibp::kSharedBytes - shared_bytes);
    uint64_t steps = 0;
    for (uint32_t block = 0; block < num_blocks; block++) {
        blockIdx = {block, 0, 0};
        const uint32_t garbage = draw(256);
        for (size_t i = 0; i < shared_bytes; i++) memory[i] = static_cast<uint8_t>(garbage + 37 * i);
        forget_touches(shared_bytes);
        run_block(steps);
    }
    __asan_unpoison_memory_region(memory + shared_bytes, ibp::kSharedBytes - shared_bytes);
    watch(nullptr, 0);
}

} // namespace simt
