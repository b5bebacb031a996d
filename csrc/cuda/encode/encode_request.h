// encode_request.h - the requests to measure and to encode rows, which the functions of every encoder receive, and the
// list of these functions.
#ifndef IBP_ENCODE_REQUEST_H
#define IBP_ENCODE_REQUEST_H

#include "ibp_cuda.h"

namespace ibp {

// The arguments of ibp_cuda_measure_rows.
struct Measure {
    const ibp_codebook &codebook;
    const uint8_t *data;
    int64_t num_bytes;
    uint16_t *lengths;
    ibp_stream stream;
};
// The arguments of ibp_cuda_encode_into or, if is_measured is true, of ibp_cuda_encode_rows. In the second case the
// index of place.table says how long rows are and where they go, and is only read.
struct Encode {
    const ibp_place &place;
    const ibp_row_source &source;
    const int64_t *row_ids;
    int64_t first_row;
    bool is_measured;
    ibp_fault *fault;
    int max_sms;
    ibp_stream stream;
};

inline const ibp_codebook &codebook_of(const Measure &measure) { return measure.codebook; }
inline const ibp_codebook &codebook_of(const Encode &encode) { return encode.place.table.codebook; }

// Each of these functions launches a kernel of one encoder. Every encoder has its own .cu file in this folder.
// encode.cu says which codebooks each encoder takes. T: the type of an element, as in by_element (kinds.h).
ibp_status measure_masks(const Measure &measure);
ibp_status encode_masks(const Encode &encode);
template <typename T> ibp_status measure_dense(const Measure &measure);
template <typename T> ibp_status encode_dense(const Encode &encode);
ibp_status measure_listed(const Measure &measure);
template <typename T> ibp_status encode_listed(const Encode &encode);
template <typename T> ibp_status encode_long_listed(const Encode &encode);
template <typename T> ibp_status encode_any_listed(const Encode &encode);
template <typename T> ibp_status encode_values(const Encode &encode);
ibp_status measure_fast(const Measure &measure);
ibp_status encode_fast(const Encode &encode);

} // namespace ibp

#endif
