// python_handle.h - ibp._core.TableHandle: the owner of a handle, and calls for few items of its table. Everything that
// stays the same from call to call is worked out once.
//
// torch's dispatcher costs several times what a launch does. Here a call asks the ids for their memory by methods of
// torch.Tensor, allocates the result by torch.empty_strided and launches. Whatever is not the usual case is left to the
// operations: the call returns None, having done nothing.
#ifndef IBP_PYTHON_HANDLE_H
#define IBP_PYTHON_HANDLE_H

#include "ready_cache.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

namespace ibp_python {

namespace py = pybind11;

// An attribute of torch's, or a method without arguments, looked up by a name that is hashed once.
class Name {
  public:
    explicit Name(const char *text) : name_(py::reinterpret_steal<py::object>(PyUnicode_InternFromString(text))) {}
    py::object of(py::handle object) const { return checked(PyObject_GetAttr(object.ptr(), name_.ptr())); }
    py::object call(py::handle object) const { return checked(PyObject_CallMethodNoArgs(object.ptr(), name_.ptr())); }
    bool is_true(py::handle object) const { return call(object).ptr() == Py_True; }
    int64_t number(py::handle object) const { return as_number(call(object)); }

    static py::object checked(PyObject *made)
    {
        if (made == nullptr) throw py::error_already_set();
        return py::reinterpret_steal<py::object>(made);
    }
    static int64_t as_number(const py::object &object)
    {
        const long long value = PyLong_AsLongLong(object.ptr());
        if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
        return value;
    }

  private:
    py::object name_;
};

// torch as a call needs it, looked up once.
struct Torch {
    py::object module = py::module_::import("torch"), c = module.attr("_C"), tensor = module.attr("Tensor"),
               int32 = module.attr("int32"), int64 = module.attr("int64"), empty = module.attr("empty_strided"),
               function_modes = c.attr("_len_torch_function_stack"),
               dispatch_modes = c.attr("_len_torch_dispatch_stack"), tracing_state = c.attr("_get_tracing_state");
    Name is_cuda{"is_cuda"}, is_cpu{"is_cpu"}, get_device{"get_device"}, dtype{"dtype"}, dim{"dim"}, numel{"numel"},
        is_contiguous{"is_contiguous"}, data_ptr{"data_ptr"}, shape{"shape"}, requires_grad{"requires_grad"},
        is_neg{"is_neg"}, is_conj{"is_conj"}, storage{"untyped_storage"}, nbytes{"nbytes"},
        storage_offset{"storage_offset"};

    static const Torch &get()
    {
        static const Torch *const torch = new Torch; // never freed: the interpreter may be gone before
        return *torch;
    }

    // Whether something else wants to see the operations: a mode, or torch.jit.trace.
    bool has_observers() const
    {
        return Name::as_number(Name::checked(PyObject_CallNoArgs(function_modes.ptr()))) != 0 ||
               Name::as_number(Name::checked(PyObject_CallNoArgs(dispatch_modes.ptr()))) != 0 ||
               !Name::checked(PyObject_CallNoArgs(tracing_state.ptr())).is_none();
    }
};

class TableHandle {
  public:
    // describe: torch.ops.ibp.describe_table. parts: its arguments, which own the table's memory.
    TableHandle(const py::object &describe, py::tuple parts) : parts_(std::move(parts))
    {
        describe(reinterpret_cast<uintptr_t>(&handle_), *parts_);
    }
    TableHandle(const TableHandle &) = delete;
    TableHandle &operator=(const TableHandle &) = delete;

    py::buffer_info bytes() { return py::buffer_info(reinterpret_cast<uint8_t *>(&handle_), sizeof handle_); }
    bool is_ready() const { return is_ready_; }

    // Readies the handle for calls for few items. faults: host address of two records of faults, whose memory `kept`
    // owns; the kernel notes in the first one, whose address there is fault. item_shape, dtype: of an item. most_items:
    // of a call; more are left to the operations.
    void make_ready(py::object kept, py::object torch_device, uintptr_t faults, uintptr_t fault,
                    const std::vector<int64_t> &item_shape, py::object dtype, bool is_complex, int64_t most_items)
    {
        faults_ = reinterpret_cast<const ibp_fault *>(faults), fault_ = reinterpret_cast<ibp_fault *>(fault);
        item_shape_ = item_shape, strides_ = py::tuple(item_shape.size() + 1);
        int64_t stride = 1;
        for (size_t d = item_shape_.size() + 1; d-- > 0; stride *= d > 0 ? item_shape_[d - 1] : 1) strides_[d] = stride;
        torch_device_ = std::move(torch_device), dtype_ = std::move(dtype), is_complex_ = is_complex;
        empty_options_["dtype"] = dtype_;
        empty_options_["device"] = torch_device_;
        if (on_gpu()) {
            current_device_ = torch_.c.attr("_cuda_getDevice");
            current_stream_ = torch_.c.attr("_cuda_getCurrentRawStream");
            device_number_ = py::int_(handle_.device);
        }
        kept_ = std::move(kept), most_items_ = most_items, is_ready_ = true;
    }

    // The items at ids as a new tensor, or in out where that is one; None where this is not the place for the call.
    // max_sms: 0: all. cache: of the table, on its device; nullptr: none. in_order: a GPU takes any number of ids.
    py::object take(py::handle ids, py::handle out, int max_sms, const ReadyCache *cache, bool in_order) const
    {
        try {
            return try_to_take(ids, out, max_sms, cache, in_order);
        } catch (py::error_already_set &) { // a tensor without memory: the operations say what is wrong with it
            return py::none();
        }
    }

    // Items of many tables in one call: those at ids[starts[t]] to ids[starts[t + 1] - 1] of table t, item k to
    // position positions[k] of out. All tables are on out's device. false, with nothing launched, where that does not
    // fit.
    static bool take_many(const std::vector<const TableHandle *> &tables, const std::vector<int64_t> &starts,
                          py::handle ids, py::handle positions, py::handle out, int max_sms)
    {
        if (tables.empty() || starts.size() != tables.size() + 1 || max_sms < 0) return false;
        const TableHandle &first = *tables[0];
        ibp_ids items{}, places{};
        Range of_ids{}, of_positions{};
        if (first.torch_.has_observers() || starts[0] != 0) return false;
        if (!first.read_ids(ids, &items, &of_ids) || !first.read_ids(positions, &places, &of_positions)) return false;
        if (places.id_bytes != 4u || places.count != items.count) return false;
        if (!first.is_here(out) || !first.fits(py::reinterpret_borrow<py::object>(out), items.count)) return false;
        const Range written = first.items_in(out, items.count);
        if (written.meets(of_ids) || written.meets(of_positions)) return false;
        for (size_t t = 0; t < tables.size(); t++)
            if (starts[t] > starts[t + 1] || !tables[t]->is_like(first) || tables[t]->meets_table(written))
                return false;
        if (starts.back() != items.count) return false;
        items.positions = static_cast<const uint32_t *>(places.data), items.out_items = items.count;
        return gather_many(tables, starts, items, reinterpret_cast<uint8_t *>(written.first), max_sms);
    }

    // All items of many tables in one call, those of table t to outs[t]. All tables are on one GPU. false, with nothing
    // launched, where that does not fit.
    static bool decode_many(const std::vector<const TableHandle *> &tables, const std::vector<py::object> &outs,
                            int max_sms)
    {
        if (tables.empty() || outs.size() != tables.size() || max_sms < 0) return false;
        const TableHandle &first = *tables[0];
        if (!first.on_gpu() || first.torch_.has_observers()) return false;
        std::vector<ibp_gather> gathers;
        std::vector<Range> written;
        for (size_t t = 0; t < tables.size(); t++) {
            const TableHandle &one = *tables[t];
            const ibp_table &table = one.handle_.table();
            if (!one.is_ready() || one.handle_.device != first.handle_.device || !one.is_here(outs[t])) return false;
            if (!one.fits(outs[t], table.num_items)) return false;
            written.push_back(one.items_in(outs[t], table.num_items));
            if (one.meets_table(written[t])) return false;
            gathers.push_back({&table, nullptr, reinterpret_cast<uint8_t *>(written[t].first), one.fault_});
        }
        std::sort(written.begin(), written.end(), [](const Range &a, const Range &b) { return a.first < b.first; });
        for (size_t t = 1; t < written.size(); t++)
            if (written[t - 1].meets(written[t])) return false;
        const ibp_stream stream = first.stream();
        const py::gil_scoped_release release;
        return ibp_cuda_gather_tables(gathers.data(), int64_t(gathers.size()), max_sms, stream) == IBP_OK;
    }

  private:
    bool on_gpu() const { return handle_.device >= 0; }

    bool is_like(const TableHandle &other) const
    {
        return is_ready() && handle_.device == other.handle_.device && dtype_.is(other.dtype_) &&
               item_shape_ == other.item_shape_;
    }

    static bool gather_many(const std::vector<const TableHandle *> &tables, const std::vector<int64_t> &starts,
                            const ibp_ids &items, uint8_t *out, int max_sms)
    {
        const TableHandle &first = *tables[0];
        const ibp_stream stream = first.stream();
        const py::gil_scoped_release release;
        std::vector<ibp_ids> parts(tables.size(), items);
        std::vector<ibp_gather> gathers;
        for (size_t t = 0; t < tables.size(); t++) {
            parts[t].count = starts[t + 1] - starts[t];
            parts[t].data = static_cast<const uint8_t *>(items.data) + starts[t] * items.id_bytes;
            parts[t].positions = items.positions + starts[t];
            gathers.push_back({&tables[t]->handle_.table(), &parts[t], out, tables[t]->fault_});
            if (!first.on_gpu() && tables[t]->gather(parts[t], nullptr, out, max_sms, stream) != IBP_OK) return false;
        }
        return !first.on_gpu() ||
               ibp_cuda_gather_tables(gathers.data(), int64_t(tables.size()), max_sms, stream) == IBP_OK;
    }

    py::object try_to_take(py::handle ids, py::handle out, int max_sms, const ReadyCache *cache, bool in_order) const
    {
        ibp_ids items{};
        Range read{};
        if (max_sms < 0 || !is_ready() || has_faults() || torch_.has_observers()) return py::none();
        if (!read_ids(ids, &items, &read) || !(items.count <= most_items_ || (in_order && on_gpu()))) return py::none();
        if (on_gpu() && Name::as_number(Name::checked(PyObject_CallNoArgs(current_device_.ptr()))) != handle_.device)
            return py::none();
        const bool is_new = out.is_none();
        const py::object result = is_new ? new_result(items.count) : py::reinterpret_borrow<py::object>(out);
        if (!is_here(result) || (!is_new && !fits(result, items.count))) return py::none();
        const Range written = items_in(result, items.count);
        if (written.first == 0 || (!is_new && (meets_table(written) || written.meets(read)))) return py::none();
        if (cache != nullptr && !is_new && cache->meets(written)) return py::none();
        return gather_from(cache, items, reinterpret_cast<uint8_t *>(written.first), max_sms) ? result : py::none();
    }

    bool has_faults() const
    {
        for (size_t k = 0; k < 2; k++)
            if (*reinterpret_cast<const volatile int64_t *>(faults_ + k) != 0) return true;
        return false;
    }

    // Whether a tensor is a plain one on the table's device.
    bool is_here(py::handle tensor) const
    {
        if (reinterpret_cast<PyObject *>(Py_TYPE(tensor.ptr())) != torch_.tensor.ptr()) return false;
        if (!on_gpu()) return torch_.is_cpu.of(tensor).ptr() == Py_True;
        return torch_.is_cuda.of(tensor).ptr() == Py_True && torch_.get_device.number(tensor) == handle_.device;
    }

    // Whether num_bytes bytes of a contiguous tensor are in its storage, which can have been resized.
    bool is_held(py::handle tensor, int64_t num_bytes, int64_t element_bytes) const
    {
        const int64_t storage_bytes = torch_.nbytes.number(torch_.storage.call(tensor));
        return torch_.storage_offset.number(tensor) <= (storage_bytes - num_bytes) / element_bytes &&
               storage_bytes >= num_bytes;
    }

    bool read_ids(py::handle ids, ibp_ids *items, Range *read) const
    {
        if (!is_here(ids)) return false;
        const py::object dtype = torch_.dtype.of(ids);
        const bool is_long = dtype.is(torch_.int64);
        if (!(is_long || dtype.is(torch_.int32)) || torch_.dim.number(ids) != 1) return false;
        const int64_t count = torch_.numel.number(ids);
        if (count < 1 || !torch_.is_contiguous.is_true(ids)) return false;
        const uint32_t id_bytes = is_long ? 8u : 4u;
        const auto address = static_cast<uintptr_t>(torch_.data_ptr.number(ids));
        if (address == 0 || !is_held(ids, count * id_bytes, id_bytes)) return false;
        items->data = reinterpret_cast<const void *>(address), items->count = count, items->id_bytes = id_bytes;
        *read = {address, address + static_cast<uintptr_t>(count) * id_bytes};
        return true;
    }

    py::object new_result(int64_t count) const
    {
        py::tuple shape(item_shape_.size() + 1);
        shape[0] = count;
        for (size_t d = 0; d < item_shape_.size(); d++) shape[d + 1] = item_shape_[d];
        return Name::checked(
            PyObject_Call(torch_.empty.ptr(), py::make_tuple(shape, strides_).ptr(), empty_options_.ptr()));
    }

    // The memory of a tensor that holds as many items.
    Range items_in(py::handle tensor, int64_t count) const
    {
        const auto first = static_cast<uintptr_t>(torch_.data_ptr.number(tensor));
        return {first, first + static_cast<uintptr_t>(count * handle_.table().item_bytes)};
    }

    // Whether a tensor can be out.
    bool fits(const py::object &out, int64_t count) const
    {
        if (!torch_.dtype.of(out).is(dtype_) || torch_.requires_grad.of(out).ptr() == Py_True) return false;
        const py::object shape = torch_.shape.of(out);
        if (!PyTuple_Check(shape.ptr()) || PyTuple_GET_SIZE(shape.ptr()) != py::ssize_t(item_shape_.size() + 1))
            return false;
        for (size_t d = 0; d <= item_shape_.size(); d++) {
            const int64_t wanted = d == 0 ? count : item_shape_[d - 1];
            if (PyLong_AsLongLong(PyTuple_GET_ITEM(shape.ptr(), py::ssize_t(d))) != wanted) return false;
        }
        if (!torch_.is_contiguous.is_true(out) || torch_.is_neg.is_true(out)) return false;
        const int64_t num_bytes = count * handle_.table().item_bytes;
        return !(is_complex_ && torch_.is_conj.is_true(out)) && is_held(out, num_bytes, element_bytes());
    }

    int64_t element_bytes() const
    {
        int64_t elements = 1;
        for (const int64_t size : item_shape_) elements *= size;
        return handle_.table().item_bytes / elements;
    }

    bool meets_table(const Range &written) const
    {
        const auto fault = reinterpret_cast<uintptr_t>(fault_);
        return written.meets({fault, fault + sizeof *fault_}) ||
               std::any_of(std::begin(handle_.parts), std::end(handle_.parts),
                           [&](const Range &range) { return range.meets(written); });
    }

    // Items of the table, and of a cache where there is one, whose entries for the items are memory of torch's. false:
    // not done, and what was written does not matter.
    bool gather_from(const ReadyCache *cache, const ibp_ids &items, uint8_t *out, int max_sms) const
    {
        const ibp_table &table = handle_.table();
        const int64_t row_bytes = table.codebook.row_bytes;
        py::object held;
        uint64_t *entries = nullptr;
        if (cache != nullptr) {
            if (table.item_bytes == 0 || table.item_bytes % row_bytes != 0) return false;
            held = torch_.empty(py::make_tuple(items.count * (table.item_bytes / row_bytes)), py::make_tuple(1),
                                py::arg("dtype") = torch_.int64, py::arg("device") = torch_device_);
            entries = reinterpret_cast<uint64_t *>(torch_.data_ptr.number(held));
        }
        const ibp_stream on = stream();
        const py::gil_scoped_release release; // a full queue of launches waits for the GPU
        if (cache == nullptr) return gather(items, nullptr, out, max_sms, on) == IBP_OK;
        ibp_cache found;
        ibp_fault unused{};
        return cache->find(table, items, entries, on_gpu() ? fault_ : &unused, !on_gpu(), on, &found) == IBP_OK &&
               gather(items, &found, out, max_sms, on) == IBP_OK;
    }

    // cache: nullptr: all rows come from the table.
    ibp_status gather(const ibp_ids &items, const ibp_cache *cache, uint8_t *out, int max_sms, ibp_stream on) const
    {
        const ibp_table &table = handle_.table();
        if (on_gpu())
            return cache ? ibp_cuda_gather_cached(&table, &items, cache, out, fault_, max_sms, on)
                         : ibp_cuda_gather_items(&table, &items, out, fault_, max_sms, on);
        const size_t scratch_bytes = ibp_scratch_bytes(table.codebook.row_bytes);
        const std::unique_ptr<uint8_t[]> scratch(new uint8_t[scratch_bytes]);
        ibp_fault unused{};
        return cache ? ibp_gather_cached(&table, &items, cache, 0, items.count, out, scratch.get(), scratch_bytes,
                                         &unused)
                     : ibp_gather_items(&table, &items, 0, items.count, out, scratch.get(), scratch_bytes, &unused);
    }

    // torch's current stream of the table's device.
    ibp_stream stream() const
    {
        if (!on_gpu()) return nullptr;
        const py::object stream = Name::checked(PyObject_CallOneArg(current_stream_.ptr(), device_number_.ptr()));
        return reinterpret_cast<ibp_stream>(static_cast<uintptr_t>(Name::as_number(stream)));
    }

    const Torch &torch_ = Torch::get();
    ibp::TableHandle handle_{};
    py::tuple parts_;
    py::object kept_, torch_device_, current_device_, current_stream_, device_number_;
    const ibp_fault *faults_ = nullptr;
    ibp_fault *fault_ = nullptr;
    std::vector<int64_t> item_shape_;
    py::tuple strides_; // of a result
    py::object dtype_;
    py::dict empty_options_;
    bool is_complex_ = false, is_ready_ = false;
    int64_t most_items_ = 0;
};

} // namespace ibp_python

#endif
