// torch_tensors.h - checks tensors and finds their memory, registers functions as operations of torch, and shares work
// on the CPU among torch's threads. If an argument is wrong, or a call of torch fails, the functions throw a
// std::runtime_error, which torch passes to Python as a RuntimeError.
//
// Messages are put together without C++ streams, because streams crash if a compiler has linked a part of libstdc++
// statically, beside the libstdc++ of torch. The inline functions in torch's headers write their messages to streams.
// So this file replaces the two macros with which these functions check for errors, and then includes the headers. No
// other file may include headers of torch's stable ABI.
#ifndef IBP_TORCH_TENSORS_H
#define IBP_TORCH_TENSORS_H

#include "../internal/ibp_internal.h"
#include "table_handle.h"

#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/shim_utils.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

// The first function is missing from torch without CUDA; the second is missing from torch before 2.13.
extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t device_index, void **stream) __attribute__((weak));
extern "C" const char *torch_exception_get_what_without_backtrace() __attribute__((weak));

namespace ibp_torch {

inline std::string to_text(const char *text) { return text; }
inline std::string to_text(int64_t number) { return std::to_string(number); }

// Throws a std::runtime_error with the given parts as its message, unless the condition holds.
template <typename... Parts> void require(bool condition, const Parts &...parts)
{
    if (!condition) throw std::runtime_error("ibp: " + (to_text(parts) + ...));
}

[[noreturn]] inline void fail_in_torch(const char *what)
{
    throw std::runtime_error(std::string("ibp: torch refuses: ") + what);
}

// Throws the error that one of torch's C functions has just returned.
[[noreturn]] inline void fail_in_torch_call(const char *call)
{
    fail_in_torch(torch_exception_get_what_without_backtrace ? torch_exception_get_what_without_backtrace() : call);
}

} // namespace ibp_torch

#if !defined(TORCH_ERROR_CODE_CHECK) || !defined(STD_TORCH_CHECK)
#error "torch's headers check errors by macros that this file does not replace"
#endif
#undef TORCH_ERROR_CODE_CHECK
#define TORCH_ERROR_CODE_CHECK(call)          \
    if ((call) != TORCH_SUCCESS) {            \
        ibp_torch::fail_in_torch_call(#call); \
    }
#undef STD_TORCH_CHECK
#define STD_TORCH_CHECK(condition, ...)       \
    if (!(condition)) {                       \
        ibp_torch::fail_in_torch(#condition); \
    }

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

namespace ibp_torch {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;

inline void check(ibp_status status, const char *what)
{
    const bool is_cuda = status == IBP_CUDA_ERROR;
    require(status == IBP_OK, what, ": ", ibp_status_string(status), is_cuda ? ": " : "",
            is_cuda ? ibp_cuda_last_error() : "");
}

// ---- sizes ----

constexpr int64_t kMaxBytes = INT64_MAX / IBP_OVERFLOW_ALIGN; // the core's limit for all items of a table

// Returns count * each_bytes. Throws if either is negative or the product is more than kMaxBytes.
inline int64_t total_bytes(int64_t count, int64_t each_bytes, const char *name)
{
    int64_t bytes = 0;
    const bool fits = !__builtin_mul_overflow(count, each_bytes, &bytes) && bytes <= kMaxBytes;
    require(count >= 0 && each_bytes >= 0 && fits, name, ": ", count, " of ", each_bytes,
            " bytes each are out of range");
    return bytes;
}

// Returns num_bytes / item_bytes, rounded up: the number of items if the last one may be short. num_bytes >= 0.
inline int64_t divide_up(int64_t num_bytes, int64_t item_bytes)
{
    return num_bytes / item_bytes + (num_bytes % item_bytes != 0);
}

inline uint32_t to_u32(int64_t value, int64_t low, int64_t high, const char *name)
{
    require(value >= low && value <= high, name, " is ", value, ", outside [", low, ", ", high, "]");
    return static_cast<uint32_t>(value);
}

// ---- memory ----

using ibp::Memory;

// Returns the number of bytes from a tensor's first element to the end of its storage. Returns -1 if the element lies
// past the end, which is possible because storages can be resized.
inline int64_t bytes_held(const Tensor &tensor)
{
    const auto element_bytes = static_cast<int64_t>(tensor.element_size());
    int64_t storage_bytes = 0, offset = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &storage_bytes));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(tensor.get(), &offset));
    return offset < 0 || offset > storage_bytes / element_bytes ? -1 : storage_bytes - offset * element_bytes;
}

// Returns the memory of a contiguous tensor. The tensor must be new, or an argument of the operation. (Class Given has
// checked that the storages of arguments are large enough.)
inline Memory memory_of(const Tensor &tensor, const char *name)
{
    require(tensor.is_contiguous(), name, " is not contiguous");
    const int64_t num_bytes = tensor.numel() * static_cast<int64_t>(tensor.element_size());
    return {num_bytes == 0 ? nullptr : static_cast<uint8_t *>(tensor.data_ptr()), num_bytes};
}

// Returns the data of a contiguous tensor of the given dtype with at least `least` elements; nullptr if it is empty.
// T: the core's type for these elements.
template <typename T> T *data_of(const Tensor &tensor, ScalarType dtype, int64_t least, const char *name)
{
    require(tensor.scalar_type() == dtype, name, " has the wrong dtype");
    require(tensor.numel() >= least, name, " has ", tensor.numel(), " elements, ", least, " are needed");
    return static_cast<T *>(static_cast<void *>(memory_of(tensor, name).data));
}

inline uint8_t *bytes_of(const Tensor &tensor, int64_t least, const char *name)
{
    return data_of<uint8_t>(tensor, ScalarType::Byte, least, name);
}

inline int64_t *longs_of(const Tensor &tensor, int64_t least, const char *name)
{
    return data_of<int64_t>(tensor, ScalarType::Long, least, name);
}

inline uint64_t *unsigned_longs_of(const Tensor &tensor, int64_t least, const char *name)
{
    return data_of<uint64_t>(tensor, ScalarType::Long, least, name);
}

// Returns the data of a uint16 tensor with an element for each row; nullptr if it is empty.
inline uint16_t *lengths_of(const Tensor &tensor, int64_t num_rows, const char *name = "lengths")
{
    return data_of<uint16_t>(tensor, ScalarType::UInt16, tensor.numel() ? num_rows : 0, name);
}

// Returns the memory of a contiguous tensor of any dtype with at least `least` bytes; nullptr if it is empty.
inline uint8_t *room_of(const Tensor &tensor, int64_t least, const char *name)
{
    const Memory memory = memory_of(tensor, name);
    require(memory.num_bytes >= least, name, " has ", memory.num_bytes, " bytes, ", least, " are needed");
    return memory.data;
}

// Returns the memory from a tensor's first element to its last one, whatever its strides are. num_bytes is -1 if the
// tensor's storage is too small, or has no memory.
inline Memory extent_of(const Tensor &x)
{
    const auto element_bytes = static_cast<int64_t>(x.element_size());
    int64_t last = 0;
    bool fits = true;
    for (int64_t d = 0; d < x.dim(); d++) {
        if (x.size(d) == 0) return {nullptr, 0};
        int64_t step = 0;
        fits = fits && x.stride(d) >= 0 && !__builtin_mul_overflow(x.size(d) - 1, x.stride(d), &step) &&
               !__builtin_add_overflow(last, step, &last);
    }
    auto *const data = static_cast<uint8_t *>(x.data_ptr());
    if (!fits || data == nullptr || last >= bytes_held(x) / element_bytes) return {nullptr, -1};
    return {data, (last + 1) * element_bytes};
}

// ---- devices ----

inline int32_t device_type_of(const Tensor &tensor)
{
    int32_t type = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
    return type;
}

inline void require_cpu(const Tensor &tensor)
{
    require(device_type_of(tensor) == aoti_torch_device_type_cpu(),
            "all tensors must be on the CPU, or all on one CUDA device");
}

// The device on which a call runs: the CPU, or the CUDA device of its tensors. While the object lives, this device is
// the current device of this thread.
class Device {
  public:
    // first: any of the call's tensors.
    explicit Device(const Tensor &first) : number_(first.is_cuda() ? first.get_device_index() : -1)
    {
        if (!is_cuda()) require_cpu(first);
        if (is_cuda()) guard_ = std::make_unique<DeviceGuard>(number_);
    }
    // The CUDA device `here`, with another stream than torch's current one. It is used while `here` lives.
    Device(const Device &here, ibp_stream stream) : number_(here.number_), stream_(stream) {}

    bool is_cuda() const { return number_ >= 0; }

    // Throws unless a tensor is on this device. Torch does not check this before it calls an operation.
    void require_here(const Tensor &tensor) const
    {
        if (!is_cuda()) require_cpu(tensor);
        if (is_cuda()) require_number(tensor.is_cuda() ? tensor.get_device_index() : -1);
    }
    void require_number(int64_t number) const
    {
        require(number == number_, is_cuda() ? "all tensors must be on the same CUDA device"
                                             : "all tensors must be on the CPU, or all on one CUDA device");
    }

    // If the call runs on the CPU, throws unless a tensor is on the CPU. Otherwise throws unless the tensor is on any
    // CUDA device, because CUDA devices can read each other's memory.
    void require_near(const Tensor &tensor) const
    {
        if (!is_cuda()) require_cpu(tensor);
        require(tensor.is_cuda() == is_cuda(), "all tensors must be on the CPU, or all on CUDA devices");
    }

    // Returns the stream on which the call works: torch's current stream of the CUDA device, unless the object was made
    // for another one.
    ibp_stream stream() const
    {
        if (stream_ != nullptr) return stream_;
        require(aoti_torch_get_current_cuda_stream != nullptr, "this torch has no CUDA support");
        void *stream = nullptr;
        require(aoti_torch_get_current_cuda_stream(number_, &stream) == TORCH_SUCCESS, "no current CUDA stream");
        return static_cast<ibp_stream>(stream);
    }

  private:
    const int32_t number_;               // index of the CUDA device; -1 for the CPU
    const ibp_stream stream_ = nullptr;  // nullptr: torch's current stream
    std::unique_ptr<DeviceGuard> guard_; // not std::optional, because gcc 12 gives a warning for it
};

// ---- arguments ----

// An argument of an operation is either a plain value from torch, or it has a role. A role is a class that is made from
// such a value and that says where its tensor is and whether the operation writes it.
template <typename T, typename = void> constexpr bool kIsRole = false;
template <typename T> constexpr bool kIsRole<T, std::void_t<typename T::Value>> = true;
// True for roles that describe further memory: tables and caches.
template <typename T, typename = void> constexpr bool kHasParts = false;
template <typename T> constexpr bool kHasParts<T, std::void_t<decltype(&T::add_parts)>> = true;

// Where a tensor must be. kHere: on the device of the call. kCpu: on the CPU. kNear: see Device::require_near.
enum Place { kHere, kCpu, kNear };
template <typename T, Place PLACE, bool IS_WRITTEN = false> struct Role : T {
    using Value = T;
    static constexpr Place kPlace = PLACE;
    static constexpr bool kIsWritten = IS_WRITTEN;
    explicit Role(const T &value) : T(value) {}
};
using Out = Role<Tensor, kHere, true>;         // a tensor that the operation writes
using OnCpu = Role<Tensor, kCpu>;              // a tensor on the CPU, wherever the other tensors are
using Tensors = std::vector<Tensor>;           // tensors on the device of the call, like a single tensor without a role
using Near = Role<std::vector<Tensor>, kNear>; // tensors on any CUDA device if the call is on one; else on the CPU

// The tensors of a call. The class checks that they are on one device, and that no tensor that the operation writes
// shares memory with another tensor. Otherwise the operation could overwrite numbers that it has checked, and then use
// the new numbers.
class Given {
  public:
    // names: the names of the operation's arguments, in their order, separated by blanks.
    explicit Given(const char *names) : names_(names) { entries_.reserve(32); }

    // Adds an argument. All arguments must be added, in their order.
    template <typename T> void add(const T &argument)
    {
        if constexpr (kHasParts<T>) argument.add_parts(*this);
        Place place = kHere;
        bool is_written = false;
        if constexpr (kIsRole<T>) place = T::kPlace, is_written = T::kIsWritten;
        if constexpr (std::is_base_of_v<Tensors, T>)
            for (const Tensor &tensor : argument) add({position_, nullptr, &tensor, place, is_written, {}});
        else if constexpr (std::is_base_of_v<Tensor, T>)
            add({position_, nullptr, &argument, place, is_written, {}});
        position_++;
    }
    template <typename T> void add(const std::optional<T> &argument)
    {
        if (argument)
            add(*argument);
        else
            position_++;
    }

    // Adds a piece of memory of an argument that has several, such as a table or a cache (see kHasParts). The size of
    // the memory must already be checked.
    void add_part(const char *name, const Memory &memory, bool is_written)
    {
        if (memory.num_bytes != 0) add({position_, name, nullptr, kHere, is_written, memory});
    }
    // Requires that the call runs on the CUDA device with this index; -1: on the CPU.
    void require_device(int64_t number) { wanted_.push_back(number); }

    // Returns the device on which the call runs. Throws if arguments are on other devices or share memory.
    Device device()
    {
        const auto first =
            std::find_if(entries_.begin(), entries_.end(), [](const Entry &e) { return e.tensor && e.place == kHere; });
        require(first != entries_.end(), "there is no tensor");
        Device device(*first->tensor);
        for (const Entry &entry : entries_) {
            if (entry.tensor == nullptr) continue;
            if (entry.place == kCpu) require_cpu(*entry.tensor);
            if (entry.place == kHere) device.require_here(*entry.tensor);
            if (entry.place == kNear) device.require_near(*entry.tensor);
        }
        for (const int64_t number : wanted_) device.require_number(number);
        check_memory();
        return device;
    }

  private:
    struct Entry {
        size_t position;
        const char *part;     // name of memory that the argument describes; nullptr for its tensor
        const Tensor *tensor; // nullptr if `memory` is known already
        Place place;
        bool is_written;
        Memory memory;
    };

    void add(const Entry &entry) { entries_.push_back(entry); }

    std::string name_of(const Entry &entry) const
    {
        if (entry.part) return entry.part;
        const char *name = names_;
        for (size_t k = 0; k < entry.position; k++) name = std::strchr(name, ' ') + 1;
        return std::string(name, std::strcspn(name, " "));
    }

    void check_memory()
    {
        for (Entry &entry : entries_) {
            if (entry.tensor) entry.memory = extent_of(*entry.tensor);
            if (entry.memory.num_bytes < 0)
                require(false, name_of(entry).c_str(), " has more elements than its storage");
        }
        for (const Entry &written : entries_) {
            if (!written.is_written) continue;
            for (const Entry &other : entries_) {
                if (&other == &written || !written.memory.meets(other.memory)) continue;
                const bool is_later = &other < &written;
                require(false, name_of(is_later ? written : other).c_str(), " and ",
                        name_of(is_later ? other : written).c_str(), " share memory");
            }
        }
    }

    const char *names_;
    std::vector<Entry> entries_;
    size_t position_ = 0;
    std::vector<int64_t> wanted_; // the devices that require_device was given
};

// ---- calling the core ----

// Calls a function of the core on the device of the call: on_cuda, with a stream as its last argument, or on_cpu.
template <typename Cuda, typename Cpu, typename... Parameters>
void run_on(const Device &device, const char *what, const Cuda &on_cuda, const Cpu &on_cpu, const Parameters &...given)
{
    check(device.is_cuda() ? on_cuda(given..., device.stream()) : on_cpu(given...), what);
}

// Smallest amount of work that is given to a thread, as the number of bytes that are read or written.
inline constexpr int64_t kGrainBytes = 1 << 16;
// Work on at most this many bytes stays on the calling thread, because other threads take about 10 us to wake, and spin
// for a while after the work is done.
inline constexpr int64_t kLeastSharedBytes = 1 << 19;

// Runs work(first, last, scratch, fault) over ranges of [0, count), on several of torch's threads if there is enough
// work. `fault` keeps the fault with the lowest position. If work returns IBP_INVALID_ARGUMENT, an error is raised.
// Scratch for all ranges is allocated before the first range begins, so that no work is done if there is too little
// memory.
//
// bytes_each: the number of bytes that are read or written for each index in [0, count).
// scratch_bytes: the size of the scratch of each range, in bytes.
template <typename Work>
void over_ranges(int64_t count, int64_t bytes_each, size_t scratch_bytes, ibp_fault *fault, const Work &work)
{
    constexpr size_t kLine = 64; // size of a cache line in bytes; threads should seldom share one
    bytes_each = std::max<int64_t>(1, bytes_each);
    const bool is_little = count <= kLeastSharedBytes / bytes_each;
    const int64_t grain = std::max<int64_t>(1, kGrainBytes / bytes_each),
                  num_ranges = is_little ? std::min<int64_t>(1, count)
                                         : std::min<int64_t>(torch::stable::get_num_threads(), divide_up(count, grain)),
                  range = num_ranges == 0 ? 0 : divide_up(count, num_ranges);
    const size_t stride = (scratch_bytes + kLine - 1) / kLine * kLine;
    const std::unique_ptr<uint8_t[]> scratch(new uint8_t[stride * static_cast<size_t>(num_ranges)]);
    std::mutex mutex;
    bool refused = false; // whether any range returned IBP_INVALID_ARGUMENT
    const auto run = [&](int64_t number) {
        ibp_fault mine{};
        const int64_t first = std::min(count, number * range), last = std::min(count, first + range);
        if (first == last) return;
        const ibp_status status = work(first, last, scratch.get() + stride * static_cast<size_t>(number), &mine);
        if (status == IBP_OK) return;
        const std::lock_guard<std::mutex> lock(mutex);
        refused = refused || status == IBP_INVALID_ARGUMENT;
        if (mine.status == IBP_OK) return;
        if (fault->status == IBP_OK || mine.position < fault->position) *fault = mine;
    };
    torch::stable::parallel_for(0, num_ranges, 1, [&](int64_t first, int64_t last) {
        for (int64_t number = first; number < last; number++) run(number);
    });
    check(refused ? IBP_INVALID_ARGUMENT : IBP_OK, "table");
}

// ---- new tensors ----

// Returns a new tensor whose values are not set. dtype: torch's number for the dtype.
inline Tensor empty_tensor(const std::vector<int64_t> &sizes, const std::vector<int64_t> &strides, int32_t dtype,
                           int32_t device_type, int32_t device_index)
{
    AtenTensorHandle made = nullptr;
    // Torch before 2.13 does not pass on its error message. A lack of memory is the only possible cause.
    if (aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype, device_type,
                                 device_index, &made) != TORCH_SUCCESS)
        fail_in_torch_call("out of memory");
    return Tensor(made);
}

// Returns a new contiguous tensor, as empty_tensor does.
inline Tensor contiguous_tensor(const std::vector<int64_t> &sizes, int32_t dtype, int32_t device_type,
                                int32_t device_index)
{
    std::vector<int64_t> strides(sizes.size());
    int64_t stride = 1;
    for (size_t d = sizes.size(); d-- > 0; stride *= std::max<int64_t>(1, sizes[d])) strides[d] = stride;
    return empty_tensor(sizes, strides, dtype, device_type, device_index);
}

// Returns a new tensor, as empty_tensor does, on the device of the tensor `like`.
inline Tensor new_tensor(const Tensor &like, const std::vector<int64_t> &sizes, int32_t dtype)
{
    return contiguous_tensor(sizes, dtype, device_type_of(like), like.get_device_index());
}
inline Tensor new_tensor(const Tensor &like, const std::vector<int64_t> &sizes, ScalarType dtype)
{
    return new_tensor(like, sizes, torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)));
}

inline std::vector<int64_t> sizes_of(const Tensor &tensor)
{
    std::vector<int64_t> sizes;
    for (int64_t d = 0; d < tensor.dim(); d++) sizes.push_back(tensor.size(d));
    return sizes;
}

inline Tensor contiguous_copy(const Tensor &tensor)
{
    Tensor copy = new_tensor(tensor, sizes_of(tensor), tensor.scalar_type());
    torch::stable::copy_(copy, tensor);
    return copy;
}

// Returns the bytes of a struct as a tensor on the CPU.
template <typename T> Tensor bytes_of_struct(const T &value)
{
    const Tensor bytes = contiguous_tensor({sizeof(T)}, aoti_torch_dtype_uint8(), aoti_torch_device_type_cpu(), 0);
    std::memcpy(bytes.data_ptr(), &value, sizeof(T));
    return bytes;
}

// Returns a new tensor of zeros, int64 [size], on the device of the tensor `like`.
inline Tensor new_counts(const Tensor &like, int64_t size)
{
    Tensor counts = new_tensor(like, {size}, ScalarType::Long);
    torch::stable::zero_(counts);
    return counts;
}

// ---- operations ----

// Takes the next argument from torch's stack, as a T.
template <typename T> struct Argument {
    static T of(const StableIValue *&next)
    {
        if constexpr (kIsRole<T>)
            return T(torch::stable::detail::to<typename T::Value>(*next++));
        else
            return torch::stable::detail::to<T>(*next++);
    }
};
template <typename T> struct Argument<std::optional<T>> {
    static std::optional<T> of(const StableIValue *&next)
    {
        if constexpr (kIsRole<T>) {
            const auto given = torch::stable::detail::to<std::optional<typename T::Value>>(*next++);
            return given ? std::optional<T>(*given) : std::nullopt;
        } else {
            return torch::stable::detail::to<std::optional<T>>(*next++);
        }
    }
};

// Calls an implementation with the arguments on torch's stack, and puts the results on the stack.
template <typename Result, typename... Parameters>
void call(Result (*function)(const Device &, Parameters...), const char *names, StableIValue *stack,
          uint64_t num_arguments)
{
    require(num_arguments == sizeof...(Parameters), "a schema has other arguments");
    const StableIValue *next = stack;
    const std::tuple<std::decay_t<Parameters>...> given{Argument<std::decay_t<Parameters>>::of(next)...};
    const auto run = [&](const auto &...arguments) {
        Given all(names);
        (all.add(arguments), ...);
        const Device device = all.device();
        return function(device, arguments...);
    };
    const auto give = [&](const auto &...results) { ((*stack++ = torch::stable::detail::from(results)), ...); };
    if constexpr (std::is_void_v<Result>)
        std::apply(run, given);
    else if constexpr (std::is_same_v<Result, Tensor> || std::is_same_v<Result, Tensors>)
        give(std::apply(run, given));
    else
        std::apply(give, std::apply(run, given));
}

// The names of a function's arguments, for messages.
template <auto function> const char *names_of = "";

// Makes a function the implementation of an operation. At each call, class Given checks the tensors; then the function
// is called with their device and the arguments. names: the names of the schema's arguments, separated by blanks.
template <auto function, typename Library> void operation(Library &m, const char *name, const char *names)
{
    names_of<function> = names;
    m.impl(name, [](StableIValue *stack, uint64_t num_arguments, uint64_t) {
        call(function, names_of<function>, stack, num_arguments);
    });
}

} // namespace ibp_torch

#endif
