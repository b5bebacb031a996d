/* failing_allocations.cpp - a library to be preloaded: lets one chosen allocation of the libraries that are watched
 * fail. An allocation is theirs if they call the allocator, or libstdc++ does for them. glibc only. */
#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <unwind.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

extern "C" {
void *__libc_malloc(size_t num_bytes);
void *__libc_calloc(size_t count, size_t num_bytes);
void *__libc_realloc(void *memory, size_t num_bytes);
void *__libc_memalign(size_t alignment, size_t num_bytes);
}

namespace {

constexpr size_t kMostRanges = 32;

/* Code of a library. */
struct Range {
    uintptr_t first, end;
    bool has(uintptr_t address) const { return address >= first && address < end; }
};
struct Ranges {
    Range ranges[kMostRanges];
    size_t count;

    bool have(uintptr_t address) const
    {
        for (size_t i = 0; i < count; i++)
            if (ranges[i].has(address)) return true;
        return false;
    }
};

Ranges watched, between;               /* libraries whose allocations are counted; those that allocate for others */
std::atomic<int64_t> until_failure{0}; /* the allocation of this number, counted from 1, fails; 0: none */
std::atomic<bool> has_failed{false};
thread_local bool is_unwinding = false;

struct Search {
    const char *part_of_path;
    Ranges *found;
};

int add_ranges(dl_phdr_info *library, size_t, void *data)
{
    auto *const search = static_cast<Search *>(data);
    if (std::strstr(library->dlpi_name, search->part_of_path) == nullptr) return 0;
    for (size_t i = 0; i < library->dlpi_phnum; i++) {
        const ElfW(Phdr) &part = library->dlpi_phdr[i];
        if (part.p_type != PT_LOAD || (part.p_flags & PF_X) == 0) continue;
        if (search->found->count == kMostRanges) return 1;
        const uintptr_t first = library->dlpi_addr + part.p_vaddr;
        search->found->ranges[search->found->count++] = {first, first + part.p_memsz};
    }
    return 0;
}

/* Walks up to the first caller that is not in `between`. */
struct Walk {
    uintptr_t caller;
    int depth;
};
_Unwind_Reason_Code step(_Unwind_Context *context, void *data)
{
    constexpr int kDeepest = 24;
    auto *const walk = static_cast<Walk *>(data);
    const uintptr_t address = _Unwind_GetIP(context);
    if (address == walk->caller) walk->depth = 0; /* the allocator's caller: what comes before is of this file */
    if (walk->depth < 0) return _URC_NO_REASON;
    if (!between.have(address)) {
        walk->caller = address;
        return _URC_END_OF_STACK;
    }
    return ++walk->depth < kDeepest ? _URC_NO_REASON : _URC_END_OF_STACK;
}

bool is_theirs(uintptr_t caller)
{
    if (watched.have(caller)) return true;
    if (is_unwinding || !between.have(caller)) return false;
    is_unwinding = true; /* which allocates when it is first done */
    Walk walk{caller, -1};
    _Unwind_Backtrace(step, &walk);
    is_unwinding = false;
    return watched.have(walk.caller);
}

bool fails(void *return_address)
{
    if (until_failure.load(std::memory_order_relaxed) <= 0) return false;
    if (!is_theirs(reinterpret_cast<uintptr_t>(return_address)) || --until_failure != 0) return false;
    has_failed = true;
    return true;
}

void *no_memory()
{
    errno = ENOMEM;
    return nullptr;
}

void *checked(void *memory)
{
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}

} // namespace

#define IBP_FAILS fails(__builtin_return_address(0))

extern "C" {

/* Counts allocations of libraries with this in their path, and those that others with `helper` in theirs make for
 * them. @return the number of pieces of code. */
size_t ibp_test_watch(const char *part_of_path, const char *helper)
{
    Search libraries{part_of_path, &watched}, helpers{helper, &between};
    dl_iterate_phdr(add_ranges, &libraries);
    dl_iterate_phdr(add_ranges, &helpers);
    return watched.count;
}

/* Lets allocation `number`, counted from 1 from now on, fail. */
void ibp_test_arm(int64_t number)
{
    has_failed = false;
    until_failure = number;
}

/* @return whether an allocation has failed since. */
bool ibp_test_disarm()
{
    until_failure = 0;
    return has_failed;
}

void *malloc(size_t num_bytes) { return IBP_FAILS ? no_memory() : __libc_malloc(num_bytes); }
void *calloc(size_t count, size_t num_bytes) { return IBP_FAILS ? no_memory() : __libc_calloc(count, num_bytes); }
void *realloc(void *memory, size_t num_bytes) { return IBP_FAILS ? no_memory() : __libc_realloc(memory, num_bytes); }
void *aligned_alloc(size_t alignment, size_t num_bytes)
{
    return IBP_FAILS ? no_memory() : __libc_memalign(alignment, num_bytes);
}
int posix_memalign(void **memory, size_t alignment, size_t num_bytes)
{
    void *const made = IBP_FAILS ? nullptr : __libc_memalign(alignment, num_bytes);
    if (made == nullptr) return ENOMEM;
    *memory = made;
    return 0;
}
void *mmap(void *at, size_t num_bytes, int protection, int flags, int file, off_t offset)
{
    if (IBP_FAILS) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    return reinterpret_cast<void *>(syscall(SYS_mmap, at, num_bytes, protection, flags, file, offset));
}
}

void *operator new(size_t num_bytes) { return checked(IBP_FAILS ? nullptr : __libc_malloc(num_bytes)); }
void *operator new[](size_t num_bytes) { return checked(IBP_FAILS ? nullptr : __libc_malloc(num_bytes)); }
void *operator new(size_t num_bytes, const std::nothrow_t &) noexcept
{
    return IBP_FAILS ? nullptr : __libc_malloc(num_bytes);
}
void *operator new[](size_t num_bytes, const std::nothrow_t &) noexcept
{
    return IBP_FAILS ? nullptr : __libc_malloc(num_bytes);
}
void *operator new(size_t num_bytes, std::align_val_t alignment)
{
    return checked(IBP_FAILS ? nullptr : __libc_memalign(static_cast<size_t>(alignment), num_bytes));
}
void *operator new[](size_t num_bytes, std::align_val_t alignment)
{
    return checked(IBP_FAILS ? nullptr : __libc_memalign(static_cast<size_t>(alignment), num_bytes));
}
