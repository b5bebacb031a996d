// file_reader.h - makes the C reader of files (ibp_file.h) available to Python. It returns headers and lines of fields
// as Python objects. If the reader refuses a file, a ValueError says why.
#ifndef IBP_FILE_READER_H
#define IBP_FILE_READER_H

#include "../internal/ibp_file_fields.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <vector>

namespace ibp_python {

namespace py = pybind11;

// Returns the text of a JSON string, with its escapes decoded, as a Python string.
inline py::str text_of(ibp_text text)
{
    std::string utf8(ibp_copy_text(text, nullptr, 0), '\0');
    ibp_copy_text(text, utf8.data(), utf8.size() + 1);
    return py::str(utf8);
}

// Returns the first kMostBytes bytes of a text as a Python literal, for messages. Bytes that are not UTF-8 are
// replaced.
inline std::string shown(ibp_text text)
{
    constexpr size_t kMostBytes = 100;
    const py::bytes bytes(text.data, std::min(text.num_bytes, kMostBytes));
    return py::repr(bytes.attr("decode")("utf-8", "replace")).cast<std::string>();
}

// Throws a ValueError that says what was found and what was wanted, unless status is IBP_OK.
inline void check_read(ibp_status status, const ibp_refusal &refusal)
{
    if (status == IBP_OK) return;
    if (!refusal.wanted) throw py::value_error(ibp_status_string(status));
    std::string found;
    if (refusal.key && !refusal.found.data) found = "the field '" + std::string(refusal.key) + "' is missing; ";
    if (refusal.key && refusal.found.data) found = refusal.key + (" is " + shown(refusal.found)) + "; ";
    if (!refusal.key && refusal.found.data) found = "it has " + shown(refusal.found) + "; ";
    throw py::value_error(found + "wanted " + refusal.wanted);
}

// Adds a key to a dictionary. Throws a ValueError if the dictionary has the key already.
template <typename Value> void enter(const py::dict &where, const py::str &key, const Value &value)
{
    if (where.contains(key)) throw py::value_error(py::repr(key).cast<std::string>() + " is there twice");
    where[key] = value;
}

// Opens the header of a file of file_bytes bytes. If the file has a newer format, throws a ValueError that names the
// release that wrote the file.
inline void open_header(const std::vector<uint8_t> &bytes, size_t file_bytes, ibp_file *file)
{
    const ibp_status status = ibp_open_header(bytes.data(), bytes.size(), file_bytes, file);
    if (status != IBP_NEWER_FILE) return check_read(status, file->refusal);
    const auto release = text_of(file->release).cast<std::string>();
    throw py::value_error("it has format " + std::to_string(file->version) + ", and ibp " + ibp_version() +
                          " reads formats up to " + std::to_string(IBP_FORMAT_VERSION) + ": ibp " +
                          (release.empty() ? "a later one" : release.substr(0, 40)) + " wrote it and reads it");
}

// Returns the tuple (size of a block in bytes, number of blocks) for the checksums of a file. Returns None if the file
// has no checksums, or a string that says why the checksums are refused.
inline py::object checks_of(const ibp_file &file)
{
    ibp_file_checks checks{};
    ibp_refusal refusal{};
    const ibp_status status = ibp_find_checks(&file, &checks, &refusal);
    if (status == IBP_NOT_IN_FILE) return py::none();
    try {
        check_read(status, refusal);
    } catch (const py::value_error &error) {
        return py::str(error.what());
    }
    return py::make_tuple(checks.block_bytes, checks.num_blocks);
}

// Reads the header of a file of file_bytes bytes. Returns (tensors, metadata, checks):
//
// tensors: {name: (dtype, shape, start, end)}; the tensor has the bytes [start, end) of the file.
// metadata: {key: value}; both are strings.
// checks: the value that checks_of returns.
//
// header: all bytes of the file before the data.
inline py::tuple read_header(const py::bytes &header, size_t file_bytes)
{
    const std::string_view view = header;
    const std::vector<uint8_t> bytes(view.begin(), view.end()); // a copy, because the header must be aligned
    ibp_file file;
    ibp_file_tensor tensor;
    ibp_text key, value;
    py::dict tensors, metadata;
    open_header(bytes, file_bytes, &file);
    for (size_t at = 0; ibp_next_tensor(&file, &at, &tensor) == IBP_OK;) {
        const size_t start = bytes.size() + tensor.start;
        const py::tuple shape(py::cast(std::vector<int64_t>(tensor.shape, tensor.shape + tensor.num_dims)));
        enter(tensors, text_of(tensor.name),
              py::make_tuple(text_of(tensor.dtype), shape, start, start + tensor.num_bytes));
    }
    for (size_t at = 0; ibp_next_metadata(&file, &at, &key, &value) == IBP_OK;)
        enter(metadata, text_of(key), text_of(value));
    return py::make_tuple(tensors, metadata, checks_of(file));
}

// Returns the value of a field as a Python object.
inline py::object value_of(const ibp_field &field)
{
    switch (field.kind) {
    case IBP_FIELD_NUMBER:
    case IBP_FIELD_FINGERPRINT: return py::int_(field.number);
    case IBP_FIELD_REAL: return py::float_(text_of(field.text));
    case IBP_FIELD_LIST: {
        py::list numbers;
        for (const py::handle each : text_of(field.text).attr("split")(","))
            if (py::len(each) != 0) numbers.append(py::int_(py::reinterpret_borrow<py::object>(each)));
        return py::tuple(numbers);
    }
    default: return text_of(field.text);
    }
}

// Returns {name: value} for those fields that occur in the line that was read.
template <size_t N> py::dict dict_of(const std::array<ibp_field, N> &fields)
{
    py::dict given;
    for (const ibp_field &field : fields)
        if (field.is_given && field.kind != IBP_FIELD_OTHERS) given[field.key] = value_of(field);
    return given;
}

// Reads the line of a table. Returns its fields as {name: value}.
//
// line: the table's line, escaped as it is in the JSON string.
inline py::dict read_table(const std::string &line)
{
    std::array<ibp_field, IBP_TABLE_FIELDS> fields;
    ibp_file_table table;
    const ibp_status status = ibp_read_table({line.data(), line.size()}, fields.data(), &table);
    check_read(status, table.refusal);
    return dict_of(fields);
}

// Reads the line of a codebook. Returns its fields as {name: value}.
//
// line: the codebook's line, escaped as it is in the JSON string.
inline py::dict read_codebook(const std::string &line)
{
    std::array<ibp_field, IBP_CODEBOOK_FIELDS> fields;
    ibp_refusal refusal{};
    check_read(ibp_read_codebook({line.data(), line.size()}, fields.data(), &refusal), refusal);
    return dict_of(fields);
}

} // namespace ibp_python

#endif
