/* emulated_simt.h - CUDA's threads, warps and blocks as fibers of one host thread, for kernels compiled as C++17.
 * Given with -include.
 *
 * Blocks run one after another. A lane runs until it comes to a collective; which lane and which warp goes first is
 * drawn anew every time, so that a read of what another lane has not yet been made to write comes out wrong in some
 * order. A collective is done when all lanes of its mask have come to it, at the same line of the source and place of
 * the program: device functions are inlined, so that instances of a template are told apart. The program is aborted,
 * with the places where the lanes are, if lanes wait for each other or for lanes that have returned. Dynamic shared
 * memory is as large as launched for the address sanitizer, and filled with garbage; vector accesses that are not
 * aligned are seen by -fsanitize=alignment. */
#ifndef EMULATED_SIMT_H
#define EMULATED_SIMT_H

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <limits>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __constant__
/* `extern __shared__ uint4 shared[]` in a function of namespace ibp is ibp::shared; other shared variables are made
 * static. */
#define __shared__
/* Not inlined: a function compiled at each of its calls would take minutes. */
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)

struct uint3 {
    unsigned x, y, z;
};
using dim3 = uint3;
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(16) ulonglong2 {
    unsigned long long x, y;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }

/* Of the lane that is running. */
extern uint3 threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = 32;

/* ---- collectives ---- */

namespace simt {

enum class Kind {
    sync,
    barrier,
    arrival,
    shfl,
    shfl_up,
    shfl_down,
    shfl_xor,
    ballot,
    any,
    all,
    add,
    least,
    most,
    bit_and,
    bit_or,
    bit_xor,
    match_any
};

/* Waits until all lanes of mask are here, and returns what the collective gives this lane. Of an arrival at a barrier
 * these are the warp's alone. value: its contribution.
 * argument: lane, distance or barrier. width: of a part of the warp, or threads of a barrier. */
uint64_t collective(Kind kind, uint32_t mask, uint64_t value, uint32_t argument, uint32_t width, const char *file,
                    int line);

/* Runs kernel for every thread of every block. */
void launch(uint32_t num_blocks, uint32_t num_threads, size_t shared_bytes, const std::function<void()> &kernel);

/* Decides in which order lanes and warps go. */
void seed(uint64_t seed);

/* Ends the program if bytes of shared memory, or of the memory watched, were last touched by another thread of the
 * block, one of the two writes, and no __syncwarp or barrier came between. What is watched is so until the next
 * launch is over. Called for every access of kernels compiled with -fsanitize=thread (emulated_races.cpp). */
void touch(const void *bytes, size_t num_bytes, bool writes, const void *place);
void watch(const void *bytes, size_t num_bytes);

template <class T> uint64_t to_bits(T value)
{
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "lanes exchange 4 or 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    return bits;
}
template <class T> T from_bits(uint64_t bits)
{
    T value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
/* As for lanes' numbers of less than 4 bytes, which are exchanged as int. */
template <class T> using Promoted = decltype(+T{});

} // namespace simt

#define SIMT_INLINE inline __attribute__((always_inline))
#define SIMT_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

SIMT_INLINE void __syncwarp(unsigned mask = 0xffffffffu, SIMT_SITE)
{
    simt::collective(simt::Kind::sync, mask, 0, 0, 0, file, line);
}
SIMT_INLINE void __syncthreads(SIMT_SITE)
{
    simt::collective(simt::Kind::barrier, 0xffffffffu, 0, 0, blockDim.x, file, line);
}
SIMT_INLINE int __syncthreads_or(int condition, SIMT_SITE)
{
    static int any;
    __syncthreads(file, line);
    any = 0;
    __syncthreads(file, line);
    any = any || condition;
    __syncthreads(file, line);
    return any;
}

#define SIMT_SHUFFLE(name, kind, number)                                                                       \
    template <class T>                                                                                         \
    SIMT_INLINE simt::Promoted<T> name(unsigned mask, T value, number argument, int width = 32, SIMT_SITE)     \
    {                                                                                                          \
        return simt::from_bits<simt::Promoted<T>>(simt::collective(kind, mask, simt::to_bits(+value),          \
                                                                   static_cast<uint32_t>(argument),            \
                                                                   static_cast<uint32_t>(width), file, line)); \
    }
SIMT_SHUFFLE(__shfl_sync, simt::Kind::shfl, int)
SIMT_SHUFFLE(__shfl_up_sync, simt::Kind::shfl_up, unsigned)
SIMT_SHUFFLE(__shfl_down_sync, simt::Kind::shfl_down, unsigned)
SIMT_SHUFFLE(__shfl_xor_sync, simt::Kind::shfl_xor, int)
#undef SIMT_SHUFFLE

#define SIMT_VOTE(name, result, kind)                                                               \
    SIMT_INLINE result name(unsigned mask, int predicate, SIMT_SITE)                                \
    {                                                                                               \
        return static_cast<result>(simt::collective(kind, mask, predicate != 0, 0, 0, file, line)); \
    }
SIMT_VOTE(__ballot_sync, unsigned, simt::Kind::ballot)
SIMT_VOTE(__any_sync, int, simt::Kind::any)
SIMT_VOTE(__all_sync, int, simt::Kind::all)
#undef SIMT_VOTE

/* Numbers are sign- or zero-extended to 64 bits, which keeps their order. */
#define SIMT_REDUCE(name, kind)                                                                                  \
    template <class T> SIMT_INLINE simt::Promoted<T> name(unsigned mask, T value, SIMT_SITE)                     \
    {                                                                                                            \
        static_assert(sizeof(T) <= 4, "reductions are of 32 bits");                                              \
        return static_cast<simt::Promoted<T>>(                                                                   \
            simt::collective(kind, mask, static_cast<uint64_t>(static_cast<int64_t>(value)), 0, 0, file, line)); \
    }
SIMT_REDUCE(__reduce_add_sync, simt::Kind::add)
SIMT_REDUCE(__reduce_min_sync, simt::Kind::least)
SIMT_REDUCE(__reduce_max_sync, simt::Kind::most)
SIMT_REDUCE(__reduce_and_sync, simt::Kind::bit_and)
SIMT_REDUCE(__reduce_or_sync, simt::Kind::bit_or)
SIMT_REDUCE(__reduce_xor_sync, simt::Kind::bit_xor)
#undef SIMT_REDUCE

template <class T> SIMT_INLINE unsigned __match_any_sync(unsigned mask, T value, SIMT_SITE)
{
    return static_cast<unsigned>(
        simt::collective(simt::Kind::match_any, mask, simt::to_bits(+value), 0, 0, file, line));
}

/* ---- memory ---- */

// One load, as on a GPU: not again what the compiler has loaded before.
template <class T> T __ldg(const T *p)
{
    if constexpr (std::is_scalar_v<T>) return *const_cast<const volatile T *>(p);
    return *p;
}
template <class T> T __ldcs(const T *p) { return *p; }
template <class T> T __ldcg(const T *p) { return *p; }
template <class T> T __ldca(const T *p) { return *p; }
template <class T> T __ldlu(const T *p) { return *p; }
template <class T> void __stcs(T *p, std::common_type_t<T> value) { *p = value; }
template <class T> void __stcg(T *p, std::common_type_t<T> value) { *p = value; }
template <class T> void __stwt(T *p, std::common_type_t<T> value) { *p = value; }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

/* A lane is never interrupted between collectives. */
template <class T>
__attribute__((no_sanitize_thread)) T atomicCAS(T *p, std::common_type_t<T> compare, std::common_type_t<T> value)
{
    const T old = *p;
    if (old == compare) *p = value;
    return old;
}
#define SIMT_ATOMIC(name, expression)                                                                \
    template <class T> __attribute__((no_sanitize_thread)) T name(T *p, std::common_type_t<T> value) \
    {                                                                                                \
        const T old = *p;                                                                            \
        *p = expression;                                                                             \
        return old;                                                                                  \
    }
SIMT_ATOMIC(atomicAdd, old + value)
SIMT_ATOMIC(atomicSub, old - value)
SIMT_ATOMIC(atomicAnd, old &value)
SIMT_ATOMIC(atomicOr, old | value)
SIMT_ATOMIC(atomicXor, old ^ value)
SIMT_ATOMIC(atomicMin, old < value ? old : value)
SIMT_ATOMIC(atomicMax, old < value ? value : old)
SIMT_ATOMIC(atomicExch, value)
#undef SIMT_ATOMIC

/* ---- numbers ---- */

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }
inline unsigned __umulhi(unsigned x, unsigned y) { return static_cast<unsigned>(uint64_t{x} * y >> 32); }
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y)
{
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(x) * y >> 64);
}
inline unsigned __brev(unsigned x)
{
    unsigned reversed = 0;
    for (unsigned i = 0; i < 32u; i++) reversed |= (x >> i & 1u) << (31u - i);
    return reversed;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift)
{
    return static_cast<unsigned>((uint64_t{high} << 32 | low) >> shift % 32u);
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift)
{
    return static_cast<unsigned>((uint64_t{high} << 32 | low) << shift % 32u >> 32);
}
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned shift)
{
    return shift >= 32u ? high : __funnelshift_r(low, high, shift);
}
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned shift)
{
    return shift >= 32u ? low : __funnelshift_l(low, high, shift);
}
/* prmt: a selector of 8 or more replicates the sign of the byte. */
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selectors)
{
    const uint64_t bytes = uint64_t{y} << 32 | x;
    unsigned result = 0;
    for (unsigned i = 0; i < 4u; i++) {
        const unsigned selector = selectors >> 4u * i & 15u,
                       byte = static_cast<unsigned>(bytes >> 8u * (selector % 8u)) & 0xffu;
        result |= (selector < 8u ? byte : byte >> 7 ? 0xffu : 0u) << 8u * i;
    }
    return result;
}
#define SIMT_BYTES(name, expression)                                    \
    inline unsigned name(unsigned a, unsigned b)                        \
    {                                                                   \
        unsigned result = 0;                                            \
        for (unsigned i = 0; i < 32u; i += 8u) {                        \
            const unsigned x = a >> i & 0xffu, y = b >> i & 0xffu;      \
            result |= (static_cast<unsigned>(expression) & 0xffu) << i; \
        }                                                               \
        return result;                                                  \
    }
SIMT_BYTES(__vcmpeq4, x == y ? 0xff : 0)
SIMT_BYTES(__vcmpne4, x != y ? 0xff : 0)
SIMT_BYTES(__vcmpgtu4, x > y ? 0xff : 0)
SIMT_BYTES(__vcmpgeu4, x >= y ? 0xff : 0)
SIMT_BYTES(__vcmpltu4, x < y ? 0xff : 0)
SIMT_BYTES(__vcmpleu4, x <= y ? 0xff : 0)
SIMT_BYTES(__vadd4, x + y)
SIMT_BYTES(__vsub4, x - y)
SIMT_BYTES(__vminu4, x < y ? x : y)
SIMT_BYTES(__vmaxu4, x < y ? y : x)
#undef SIMT_BYTES
inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum)
{
    for (unsigned i = 0; i < 32u; i += 8u) sum += (a >> i & 0xffu) * (b >> i & 0xffu);
    return sum;
}

/* The overloads that CUDA has, so that a call compiles here as it does there. */
#define SIMT_MIN_MAX(result, left, right)                                                                         \
    inline result min(left a, right b)                                                                            \
    {                                                                                                             \
        return static_cast<result>(a) < static_cast<result>(b) ? static_cast<result>(a) : static_cast<result>(b); \
    }                                                                                                             \
    inline result max(left a, right b)                                                                            \
    {                                                                                                             \
        return static_cast<result>(a) < static_cast<result>(b) ? static_cast<result>(b) : static_cast<result>(a); \
    }
SIMT_MIN_MAX(int, int, int)
SIMT_MIN_MAX(unsigned, unsigned, unsigned)
SIMT_MIN_MAX(unsigned, int, unsigned)
SIMT_MIN_MAX(unsigned, unsigned, int)
SIMT_MIN_MAX(long, long, long)
SIMT_MIN_MAX(unsigned long, unsigned long, unsigned long)
SIMT_MIN_MAX(unsigned long, long, unsigned long)
SIMT_MIN_MAX(unsigned long, unsigned long, long)
SIMT_MIN_MAX(long long, long long, long long)
SIMT_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
SIMT_MIN_MAX(unsigned long long, long long, unsigned long long)
SIMT_MIN_MAX(unsigned long long, unsigned long long, long long)
SIMT_MIN_MAX(float, float, float)
SIMT_MIN_MAX(double, double, double)
SIMT_MIN_MAX(double, float, double)
SIMT_MIN_MAX(double, double, float)
#undef SIMT_MIN_MAX

/* ---- host ---- */

using cudaError_t = int;
enum { cudaSuccess = 0 };
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
template <class Stream> cudaError_t cudaMemsetAsync(void *memory, int value, size_t num_bytes, Stream)
{
    memset(memory, value, num_bytes);
    return cudaSuccess;
}
struct cudaFuncAttributes {
    int ptxVersion;
};
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *)
{
    *attributes = {90};
    return cudaSuccess;
}
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *, int, size_t)
{
    *blocks = 1;
    return cudaSuccess;
}

/* What kernel<<<num_blocks, num_threads, shared_bytes, stream>>>(arguments...) becomes. Every thread has its own copy
 * of the arguments. */
template <class... Parameters, class Stream, class... Arguments>
void emulate(void (*kernel)(Parameters...), uint32_t num_blocks, uint32_t num_threads, size_t shared_bytes, Stream,
             const Arguments &...arguments)
{
    simt::launch(num_blocks, num_threads, shared_bytes, [&] { kernel(arguments...); });
}

namespace ibp {

constexpr size_t kSharedBytes = 256 << 10;
extern uint4 shared[kSharedBytes / sizeof(uint4)];

/* bar.sync: of num_threads threads of the block, by whole warps. */
inline void named_barrier(uint32_t id, uint32_t num_threads, SIMT_SITE)
{
    simt::collective(simt::Kind::barrier, 0xffffffffu, 0, id, num_threads, file, line);
}
/* bar.arrive: the same, of a warp that does not wait. */
inline void named_arrival(uint32_t id, uint32_t num_threads, SIMT_SITE)
{
    simt::collective(simt::Kind::arrival, 0xffffffffu, 0, id, num_threads, file, line);
}

} // namespace ibp

#endif
