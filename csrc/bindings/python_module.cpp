// python_module.cpp - the module ibp._core: the core's functions that are not operations of torch.
#include "../internal/ibp_internal.h"

#include "file_reader.h"
#include "host_memory.h"
#include "huge_pages.h"
#include "table_handle.h"

#include "../core/slots.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cerrno>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

namespace py = pybind11;

namespace {

using ibp::check;

// Waits until the entries of a directory are on disk. This thread runs no Python code while the directory is open, so
// no signal handler can raise an exception before the directory is closed.
void sync_directory(const char *path)
{
    int error = 0;
    {
        const py::gil_scoped_release released;
        const int directory = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (directory < 0 || fsync(directory) != 0) error = errno;
        if (directory >= 0) close(directory);
    }
    if (!error) return;
    errno = error;
    PyErr_SetFromErrnoWithFilename(PyExc_OSError, path);
    throw py::error_already_set();
}

// The struct DLManagedTensor of dlpack.h, version 0.8, through which DLPack's C interface passes an array.
struct DLManagedTensor {
    struct {
        void *data;
        int32_t device_type, device_id;
        int32_t num_dims;
        uint8_t type_code, type_bits;
        uint16_t type_lanes;
        int64_t *shape, *strides;
        uint64_t byte_offset;
    } array;
    void *manager;
    void (*release)(DLManagedTensor *);
};
static_assert(sizeof(DLManagedTensor) == 64, "the layout of dlpack.h on a 64-bit machine");
enum : int32_t { kDLCUDA = 2 };
enum : uint8_t { kDLUInt = 1 };

// Memory of an object, `owner`, as a DLPack array on a CUDA device. It keeps the owner alive until the DLPack capsule,
// or the tensor that was made from the capsule, releases the array.
struct MappedBytes {
    DLManagedTensor managed;
    py::object owner;
    int64_t num_bytes;

    static void release(DLManagedTensor *managed)
    {
        if (!Py_IsInitialized()) return;      // the interpreter's objects are gone
        const py::gil_scoped_acquire acquire; // torch frees tensors on any thread
        delete static_cast<MappedBytes *>(managed->manager);
    }
};

// Returns a DLPack capsule that holds memory as an array of uint8 on a CUDA device. Torch's own ways to wrap an
// address, from_blob and __cuda_array_interface__, cannot be used: they ask the driver for the device of the address.
// For pinned memory the driver names the device that was current when the memory was pinned, and for the memory of
// another device it names that device.
//
// owner: the object that the memory belongs to; it is kept alive.
// mapped: the address at which kernels of the device find the memory.
// num_bytes: the size of the memory.
// device: the index of the device.
py::object mapped_bytes(py::object owner, void *mapped, int64_t num_bytes, int32_t device)
{
    auto *const bytes = new MappedBytes{{}, std::move(owner), num_bytes};
    bytes->managed.array = {mapped, kDLCUDA, device, 1, kDLUInt, 8, 1, &bytes->num_bytes, nullptr, 0};
    bytes->managed.manager = bytes;
    bytes->managed.release = &MappedBytes::release;
    PyObject *const capsule = PyCapsule_New(&bytes->managed, "dltensor", [](PyObject *unused) {
        if (!PyCapsule_IsValid(unused, "dltensor")) return; // a consumer has taken the array and renamed the capsule
        MappedBytes::release(static_cast<DLManagedTensor *>(PyCapsule_GetPointer(unused, "dltensor")));
    });
    if (capsule == nullptr) {
        delete bytes;
        throw py::error_already_set();
    }
    return py::reinterpret_steal<py::object>(capsule);
}

// Returns pinned memory as mapped_bytes. device: the index of the current device.
py::object map_pinned(py::object owner, uintptr_t address, int64_t num_bytes, int32_t device)
{
    void *mapped = nullptr;
    check(ibp_cuda_map_pinned(reinterpret_cast<void *>(address), &mapped));
    return mapped_bytes(std::move(owner), mapped, num_bytes, device);
}

// Returns memory of a CUDA device as mapped_bytes on another device, which must have access to it. All devices have the
// same address for it (unified addressing, CUDA C++ Programming Guide).
py::object map_peer(py::object owner, uintptr_t address, int64_t num_bytes, int32_t device)
{
    return mapped_bytes(std::move(owner), reinterpret_cast<void *>(address), num_bytes, device);
}

// An ibp_streamer (ibp_stream.h): the streams and events for streaming tables to the device that is current when
// the object is made.
class Streamer {
  public:
    Streamer()
    {
        const py::gil_scoped_release release;
        ibp::check_without_gil(ibp_cuda_create_streamer(&streamer_));
    }
    Streamer(const Streamer &) = delete;
    Streamer &operator=(const Streamer &) = delete;
    ~Streamer() { ibp_cuda_destroy_streamer(streamer_); }

    uintptr_t address() const { return reinterpret_cast<uintptr_t>(streamer_); }
    void continue_stream() { check(ibp_cuda_continue_stream(streamer_)); }

  private:
    ibp_streamer *streamer_ = nullptr;
};

// An ibp_stager (ibp_stream.h), which brings items to the current device with the CPU's help, through two rings. The
// Stager keeps `kept`, the object that owns the rings, alive.
class Stager {
  public:
    Stager(uintptr_t pinned, uintptr_t near, int64_t ring_bytes, py::object kept) : kept_(std::move(kept))
    {
        check(ibp_cuda_create_stager(reinterpret_cast<uint8_t *>(pinned), reinterpret_cast<uint8_t *>(near), ring_bytes,
                                     &stager_));
    }
    Stager(const Stager &) = delete;
    Stager &operator=(const Stager &) = delete;
    ~Stager() { ibp_cuda_destroy_stager(stager_); }

    uintptr_t address() const { return reinterpret_cast<uintptr_t>(stager_); }

  private:
    py::object kept_;
    ibp_stager *stager_ = nullptr;
};

// Implements __init__ of a class, as py::init does. py::init itself cannot be used: it registers the object at a point
// where no exception is caught, so the process would end if there were no memory for the registration.
template <typename T, typename... Args> void make(py::detail::value_and_holder &place, Args... args)
{
    auto holder = std::make_unique<T>(std::forward<Args>(args)...);
    place.value_ptr() = holder.get();
    try {
        place.type->init_instance(place.inst, &holder);
    } catch (...) {
        place.value_ptr() = nullptr; // the holder frees the object
        throw;
    }
}
constexpr py::detail::is_new_style_constructor kNewStyle{};

// A view of the counts in a contiguous Python buffer of 64-bit integers.
class Counts {
  public:
    explicit Counts(const py::buffer &array)
    {
        if (PyObject_GetBuffer(array.ptr(), &view_, PyBUF_SIMPLE) != 0) throw py::error_already_set();
    }
    Counts(const Counts &) = delete;
    Counts &operator=(const Counts &) = delete;
    ~Counts() { PyBuffer_Release(&view_); }

    const uint64_t *data() const { return static_cast<const uint64_t *>(view_.buf); }
    size_t size() const { return static_cast<size_t>(view_.len) / sizeof(uint64_t); }

  private:
    Py_buffer view_;
};

// Chooses the size of slots with ibp_choose_slots (slots.h). Returns (size of a slot in bytes, mean number of bytes
// that a row has in overflow).
std::pair<uint32_t, double> choose_slots(const py::buffer &sectors, uint32_t row_bytes, uint32_t least_bytes,
                                         double overflow_cost, double part_cost, double most_spilled, double near,
                                         const std::optional<std::vector<int64_t>> &sizes)
{
    const Counts counts(sectors);
    if (row_bytes > IBP_MAX_ROW_BYTES ||
        counts.size() != 1 + (size_t{row_bytes} + IBP_OVERFLOW_ALIGN - 1) / IBP_OVERFLOW_ALIGN)
        throw py::value_error("sectors are not those of rows of row_bytes bytes");
    ibp_slot_rule rule{least_bytes, overflow_cost, part_cost, most_spilled, near, nullptr, 0};
    if (sizes) rule.sizes = sizes->data(), rule.num_sizes = sizes->size();
    double mean_overflow = 0;
    const uint32_t slot_bytes = ibp_choose_slots(counts.data(), row_bytes, &rule, &mean_overflow);
    return {slot_bytes, mean_overflow};
}

// Counts rows with ibp_count_spilled (slots.h). Returns (number of rows that do not fit in slots of slot_bytes bytes,
// size of the overflow parts of these rows in bytes).
std::pair<uint64_t, uint64_t> count_spilled(const py::buffer &sectors, uint32_t slot_bytes)
{
    const Counts counts(sectors);
    uint64_t num_rows = 0, overflow_bytes = 0;
    ibp_count_spilled(counts.data(), counts.size(), slot_bytes, &num_rows, &overflow_bytes);
    return {num_rows, overflow_bytes};
}

// Calls `call` and returns its result. If the call raises an exception and `kept` is not empty, sets the attribute
// `table` of the exception to kept[0]. No Python code runs between the call and this assignment, so no interrupt can
// come between them.
py::object call_keeping_table(const py::list &kept, const py::object &call)
{
    try {
        return call();
    } catch (const py::error_already_set &raised) {
        if (!kept.empty()) py::setattr(raised.value(), "table", kept[0]);
        throw;
    }
}

} // namespace

PYBIND11_MODULE(_core, m)
{
    m.doc() = "The ibp core without torch: status, versions, pinned memory.";
    ibp::PinnedPool::of_process(); // created at import, so that no other thread can be creating it during a fork
    m.attr("FORMAT_VERSION") = IBP_FORMAT_VERSION;
    m.attr("MAX_ROW_BYTES") = IBP_MAX_ROW_BYTES;
    m.attr("ROWS_PER_BASE") = IBP_ROWS_PER_BASE;
    m.attr("SECTOR_BYTES") = IBP_OVERFLOW_ALIGN;             // overflow parts begin at multiples of it
    m.attr("TABLE_HANDLE_BYTES") = sizeof(ibp::TableHandle); // sizes of handles in bytes
    m.attr("CACHE_HANDLE_BYTES") = sizeof(ibp::CacheHandle);
    m.attr("MAX_SLABS") = IBP_MAX_SLABS; // the largest number of slabs of a cache of rows
    m.attr("CPU_AVX2_BMI2") = static_cast<uint32_t>(IBP_CPU_AVX2_BMI2);
    m.attr("CPU_AVX512") = static_cast<uint32_t>(IBP_CPU_AVX512);
    m.def("version", &ibp_version, "Returns the version of the linked core library.");
    m.def(
        "status_string", [](int status) { return ibp_status_string(static_cast<ibp_status>(status)); },
        py::arg("status"), "Returns a sentence for a status code of the C API.");
    m.def("cpu_features", &ibp_cpu_features,
          "Returns the features of the processor that the CPU coders use (ibp_cpu_feature of ibp_machine.h); 0: plain "
          "C.");
    m.def("set_cpu_features", &ibp_set_cpu_features, py::arg("features"),
          "Makes all threads use the given features as far as the processor has them. Returns the features in use. For "
          "tests and benchmarks.");
    m.def("cuda_is_built", &ibp_cuda_is_built, "Returns whether this build has CUDA kernels.");
    m.def("cuda_architectures", &ibp_cuda_architectures,
          "Returns the compute capabilities that kernels were compiled for, each times 100, with commas between them.");

    m.def("choose_slots", &choose_slots, py::arg("sectors"), py::arg("row_bytes"), py::arg("least"),
          py::arg("overflow_cost"), py::arg("part_cost"), py::arg("most_spilled"), py::arg("near"), py::arg("sizes"),
          "Returns (slot size in bytes that suits the rows, mean number of bytes of overflow of a row). sectors: int64 "
          "array, in which sectors[k] is the number of rows that take k sectors. The other arguments are those of "
          "Survey.best_slots.");
    m.def(
        "count_spilled", &count_spilled, py::arg("sectors"), py::arg("slot_bytes"),
        "Returns (number of rows that do not fit slots of this size, size in bytes of their overflow in whole sectors)."
        " sectors: as in choose_slots.");

    m.def("ask_for_huge_pages", &ibp::ask_for_huge_pages, py::arg("address"), py::arg("num_bytes"),
          "Asks the system for huge pages for memory that has not been written yet.");
    m.def(
        "call_keeping_table", &call_keeping_table, py::arg("kept"), py::arg("call"),
        "Returns call(). If it raises and kept is not empty, kept[0] becomes the attribute `table` of the exception.");

    m.def("read_header", &ibp_python::read_header, py::arg("header"), py::arg("file_bytes"),
          "Reads the header of a file. Returns (tensors, metadata, checks): {name: (dtype, shape, offset of its first "
          "byte in the file, offset past its last byte)}, {key: text}, and (size in bytes of a block with a checksum, "
          "number of blocks). checks is None if the file has no checksums, and a text if they are refused. Raises "
          "ValueError if the header is wrong.");
    m.def("read_table", &ibp_python::read_table, py::arg("line"),
          "Returns the fields of a table. line: the JSON text of the table. Raises ValueError if the text is wrong.");
    m.def("read_codebook", &ibp_python::read_codebook, py::arg("line"),
          "Returns the fields of a codebook. line: the JSON text of the codebook. Raises ValueError if the text is "
          "wrong.");

    py::class_<ibp::PinnedBuffer>(m, "PinnedBuffer", py::buffer_protocol(), "Pinned, mapped host memory.")
        .def("__init__", &make<ibp::PinnedBuffer, size_t, int>, kNewStyle, py::arg("num_bytes"), py::arg("node") = -1)
        .def_property_readonly("is_used", &ibp::PinnedBuffer::is_used,
                               "Whether GPUs may still read what the memory held before.")
        .def_buffer([](ibp::PinnedBuffer &self) { return self.buffer(); });
    m.def(
        "release_pinned", [](size_t most_bytes) { return ibp::PinnedPool::of_process().release(most_bytes); },
        py::arg("most_bytes") = 0, py::call_guard<py::gil_scoped_release>(),
        "Frees pinned memory that is kept for its next user until at most most_bytes are left; returns the bytes "
        "freed.");
    m.def(
        "kept_pinned_bytes", [] { return ibp::PinnedPool::of_process().kept_bytes(); },
        "Returns the number of bytes of pinned memory that are kept for their next user.");
    m.def(
        "pinned_limit", [] { return ibp::PinnedPool::of_process().limit(); },
        "Returns the largest number of bytes of pinned memory that may be kept.");
    m.def(
        "set_pinned_limit", [](size_t limit) { ibp::PinnedPool::of_process().set_limit(limit); }, py::arg("limit"),
        py::call_guard<py::gil_scoped_release>());

    py::class_<ibp::PinnedRange>(m, "PinnedRange",
                                 "A pin of the memory of an object. It lasts as long as this object lives.")
        .def("__init__", &make<ibp::PinnedRange, py::object, uintptr_t, size_t>, kNewStyle, py::arg("owner"),
             py::arg("address"), py::arg("num_bytes"));

    py::class_<ibp::SharedPages>(m, "SharedPages", py::buffer_protocol(),
                                 "The memory of a file descriptor, shared by all processes that map it.")
        .def("__init__", &make<ibp::SharedPages, int, size_t, bool, int>, kNewStyle, py::arg("file"),
             py::arg("num_bytes"), py::arg("is_new") = false, py::arg("node") = -1)
        .def_property_readonly("is_pinned", &ibp::SharedPages::is_pinned)
        .def("pin", &ibp::SharedPages::pin, "Pins the memory for this process, unless it is already.")
        .def_buffer([](ibp::SharedPages &self) { return self.buffer(); });

    py::class_<ibp::FilePages>(m, "FilePages", py::buffer_protocol(), "The bytes of a file, mapped for reading.")
        .def("__init__", &make<ibp::FilePages, int, size_t, size_t>, kNewStyle, py::arg("file"), py::arg("start"),
             py::arg("num_bytes"))
        .def_property_readonly("is_pinned", &ibp::FilePages::is_pinned)
        .def("pin", &ibp::FilePages::pin, "Pins the memory for this process, unless it is already.")
        .def("load", &ibp::FilePages::load, py::arg("start"), py::arg("num_bytes"),
             "Reads bytes into memory. Returns whether the system could read them.")
        .def_buffer([](ibp::FilePages &self) { return self.buffer(); });

    m.def(
        "sync_directory", [](const py::bytes &path) { sync_directory(PyBytes_AS_STRING(path.ptr())); }, py::arg("path"),
        "Waits until the names in a directory are on disk. path: the directory, as os.fsencode returns it.");

    m.def("map_pinned", &map_pinned, py::arg("owner"), py::arg("address"), py::arg("num_bytes"), py::arg("device"),
          "Returns a DLPack capsule of pinned memory, as bytes on the current CUDA device, whose index is device. The "
          "capsule keeps the owner alive.");
    m.def("map_peer", &map_peer, py::arg("owner"), py::arg("address"), py::arg("num_bytes"), py::arg("device"),
          "Returns a DLPack capsule of a CUDA device's memory, as bytes on another CUDA device, whose index is device "
          "and which must have access to the memory. The capsule keeps the owner alive.");

    py::class_<Stager>(m, "Stager", "The rings and streams of stage_items on the current CUDA device.")
        .def("__init__", &make<Stager, uintptr_t, uintptr_t, int64_t, py::object>, kNewStyle, py::arg("pinned"),
             py::arg("near"), py::arg("ring_bytes"), py::arg("kept"))
        .def_property_readonly("address", &Stager::address);

    py::class_<Streamer>(m, "Streamer", "The streams and events of stream_bytes on the current CUDA device.")
        .def("__init__", &make<Streamer>, kNewStyle)
        .def_property_readonly("address", &Streamer::address)
        .def("continue_stream", &Streamer::continue_stream,
             "Begins another stream of bytes through the ring of the previous stream. Nothing else may have used "
             "the ring since.");
}
