// request.h - what is measured or encoded, as the kernels of every encoder get it, and the list of encoders.
#ifndef IBP_ENCODE_REQUEST_H
#define IBP_ENCODE_REQUEST_H

#include "ibp_cuda.h"

namespace ibp {

// The arguments of ibp_cuda_measure_rows and of ibp_cuda_encode_rows.
struct Measure {
    const ibp_codebook &codebook;
    const uint8_t *data;
    int64_t num_bytes;
    uint16_t *lengths;
    ibp_stream stream;
};
struct Encode {
    const ibp_table &table;
    const uint8_t *data;
    uint8_t *slots, *overflow;
    ibp_fault *fault;
    ibp_stream stream;
};

// The encoders, each in a translation unit of its own under encode/. encode.cu says which codebooks each one takes.
ibp_status measure_masks(const Measure &measure);
ibp_status encode_masks(const Encode &encode);
ibp_status measure_dense(const Measure &measure);
ibp_status encode_dense(const Encode &encode);
ibp_status measure_listed(const Measure &measure);
ibp_status encode_listed(const Encode &encode);
ibp_status encode_pairs(const Encode &encode);

} // namespace ibp

#endif
