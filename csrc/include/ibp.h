/* ibp.h - public C API of the ibp core: codebooks, rows and tables in host memory. C11 and C++17.
 *
 * Lossless compression of tensors whose rows decode alone. The bytes are specified in FORMAT.md; section numbers below
 * refer to it. The CUDA twins, with device pointers and a stream, are in ibp_cuda.h.
 *
 * Memory. No function here allocates, prints or reads the environment. Callers own every buffer; no function keeps one
 * after it returns. Functions that code rows work in `scratch`: ibp_scratch_bytes(row_bytes) bytes, at any alignment,
 * whose content before and after means nothing. A function takes at most IBP_MAX_STACK_BYTES of stack.
 *
 * Threads. Every function may be called from several threads at once on different outputs and different scratch; inputs
 * may be shared. The only state is the set of processor features in use (ibp_set_cpu_features), an atomic.
 *
 * Arguments. Pointers are not NULL unless that is said. Sizes are exact. Every function checks its numbers and the
 * fields of the codebook or table that it is given, which takes a few nanoseconds, and returns IBP_INVALID_ARGUMENT for
 * unknown schemes and for values that are out of range or contradict each other. It does not check what arrays hold:
 * ibp_check_codebook and ibp_check_table do that, once, for codebooks that come from elsewhere.
 *
 * Safety. Coded bytes, lengths and bases may be hostile: they are detected or give wrong data, and nothing outside the
 * buffers is read or written. The same holds for a codebook whose fields are in range but whose arrays hold anything,
 * and for arrays that another thread writes during the call: rows, ids, positions, offsets, entries, lengths, bases
 * and what codebooks point to. A value that is checked is read once. During a call the structs that arguments point to
 * stay as they are, and so do addresses in arrays, which are trusted; scratch and workspaces are the call's own.
 *
 * ABI. While the major version is 0, a minor version may change anything in this file; a patch version changes no
 * declaration. From version 1 on, a minor version only adds: functions, enumerators, and fields at the end of
 * ibp_codebook, ibp_planes and ibp_table, for which zero means what there was before. So zero structs before you fill
 * them in, and compare ibp_version_number() with IBP_VERSION_NUMBER where header and library may come from different
 * builds. The name of the shared library changes with every version that is not compatible. The format of stored bytes
 * has a version of its own. What stands under "unstable" may change with any version. */
#ifndef IBP_H
#define IBP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define IBP_API
#else
#define IBP_API __attribute__((visibility("default")))
#endif

#define IBP_VERSION "0.2.0"
#define IBP_VERSION_MAJOR 0
#define IBP_VERSION_MINOR 2
#define IBP_VERSION_PATCH 0
/* Grows with every version. */
#define IBP_VERSION_NUMBER (IBP_VERSION_MAJOR * 10000 + IBP_VERSION_MINOR * 100 + IBP_VERSION_PATCH)
/* Of the bytes of tables (FORMAT.md). */
#define IBP_FORMAT_VERSION 1

/* ---- bounds ----------------------------------------------------------------------------------------------------- */

#define IBP_MAX_ROW_BYTES 65536u
#define IBP_MAX_STACK_BYTES 32768u /* of any function here; tests/c/test_stack.c measures it */

/* Scratch for rows of row_bytes bytes. The most is what the AVX2 decoder of scheme planes takes for elements of one
 * byte: three times a row for the largest coded row (section 6: 8 bits of symbol and residual, 16 of digits), and
 * seven rows of levels, symbols and listed elements, bitmaps included; a row of the live columns; and two rows for
 * those that lie in two parts, or are wanted in part. The rest is alignment and padding. */
#define IBP_SCRATCH_BYTES(row_bytes) (14 * (size_t)(row_bytes) + 4096)
#define IBP_MAX_SCRATCH_BYTES IBP_SCRATCH_BYTES(IBP_MAX_ROW_BYTES)

/* No codebook codes a row of row_bytes bytes in more than this: 24 bits for each element of one byte, a bitmap of
 * positions, and the header, the cluster's number and the padding of eight parts. A table stores rows raw that would
 * not shrink. */
#define IBP_CODED_ROW_BYTES(row_bytes) (3 * (size_t)(row_bytes) + ((size_t)(row_bytes) + 7) / 8 + 16)
#define IBP_MAX_CODED_ROW_BYTES IBP_CODED_ROW_BYTES(IBP_MAX_ROW_BYTES)

/* What a row counts as that a codebook has no coded form for (section 6: invariant bits or constant columns that are
 * not the codebook's): more bytes than any buffer has. A table stores it raw. */
#define IBP_NO_CODED_FORM ((size_t)UINT32_MAX)

/* ---- status ----------------------------------------------------------------------------------------------------- */

#define IBP_STATUS_LIST(X)                                                                  \
    X(IBP_OK, 0, "no error")                                                                \
    X(IBP_INVALID_ARGUMENT, 1, "an argument is outside its documented range")               \
    X(IBP_INDEX_OUT_OF_RANGE, 2, "an item id is outside [0, num_items)")                    \
    X(IBP_CORRUPT_ROW, 3, "a coded row contradicts its length, its codebook or its buffer") \
    X(IBP_BUFFER_TOO_SMALL, 4, "an output buffer is smaller than documented")               \
    X(IBP_NO_CUDA, 5, "this build has no CUDA support")                                     \
    X(IBP_CUDA_ERROR, 6, "a CUDA call failed")                                              \
    X(IBP_BAD_FILE, 7, "the bytes are no file of this format, or contradict each other")    \
    X(IBP_NEWER_FILE, 8, "the file is of a newer version of the format")                    \
    X(IBP_NOT_IN_FILE, 9, "the file has no such table, tensor or checksums")                \
    X(IBP_UNSUPPORTED_TABLE, 10, "the table has fields or a codec that are not known here") \
    X(IBP_WRONG_CHECKSUM, 11, "bytes of the file do not have the checksum that it names")

typedef enum ibp_status {
#define IBP_STATUS_ENUM(name, value, text) name = value,
    IBP_STATUS_LIST(IBP_STATUS_ENUM)
#undef IBP_STATUS_ENUM
} ibp_status;

/* One sentence for a status; never NULL, also for values that are none. */
IBP_API const char *ibp_status_string(ibp_status status);

/* The version of the library that is linked, where the macros are those of the header: text, number, and that of the
 * format. */
IBP_API const char *ibp_version(void);
IBP_API int ibp_version_number(void);
IBP_API int ibp_format_version(void);

/* IBP_SCRATCH_BYTES and IBP_CODED_ROW_BYTES as functions. 0 if row_bytes is not 1 to IBP_MAX_ROW_BYTES. */
IBP_API size_t ibp_scratch_bytes(uint32_t row_bytes);
IBP_API size_t ibp_max_coded_row_bytes(uint32_t row_bytes);

/* ---- codebook --------------------------------------------------------------------------------------------------- */

typedef enum ibp_scheme { IBP_SCHEME_RAW = 0, IBP_SCHEME_IBP = 1, IBP_SCHEME_PLANES = 2 } ibp_scheme;

#define IBP_MAX_CLUSTERS 256u
#define IBP_MAX_PLANES 4u
#define IBP_MAX_DIGIT_BITS 4u

/* Codebook of scheme planes (section 6). */
typedef struct ibp_planes {
    const void *entries;    /* symbols, symbol_bytes each and aligned to that, [columns or 1][num_entries]; NULL if
                               there are none, not read where they are consecutive */
    uint64_t default_value; /* element that a listed row leaves out, and a default row consists of (section 2) */
    uint64_t closed_value;  /* element that a closed row's listed elements equal */
    uint32_t element_bytes; /* 1, 2, 4 or 8; divides row_bytes */
    uint32_t residual_bits; /* 0 to 8 * element_bytes - invariant_bits */
    uint32_t rotate;        /* 0 or 1 */
    uint32_t num_planes;    /* 0 to IBP_MAX_PLANES */
    uint32_t num_entries;   /* sum of 2^b - 1 over the planes */
    uint32_t symbol_bytes;  /* 1, 2, 4 or 8: the smallest that holds the bits of a symbol: those of an element that are
                               neither invariant nor residual */
    uint8_t digit_bits[IBP_MAX_PLANES]; /* 1 to IBP_MAX_DIGIT_BITS */
    bool per_column, listed;            /* not both */
    bool consecutive;        /* entry i is first_symbol + i, without the bits above a symbol's; not with per_column, nor
                                 with clusters */
    bool signed_default;     /* unlisted elements have any highest bit; with `listed` only */
    uint32_t invariant_bits; /* 0 to 8 * element_bytes: the lowest bits of every element */
    uint64_t invariant_value; /* what they are */
    uint64_t first_symbol;    /* read where entries are consecutive */
    /* Constant columns: those that are not live. Where there are any, per_column counts live ones. */
    uint32_t num_constant;        /* 0: the following are not read; else fewer than there are columns */
    const uint16_t *live_columns; /* the others, in increasing order */
    const uint8_t *row_template;  /* row_bytes bytes: the default row, which is default_value in the live columns */
} ibp_planes;

/* How the rows of a table are coded: a value, whose arrays the caller keeps. The pointers are host pointers for the
 * functions of this file and device pointers for those of ibp_cuda.h. The fields of other schemes than its own are not
 * read. Scheme ibp has a working form with one entry for each 32-bit word of a row, as ibp_build_codebook makes it:
 * each array has ibp_codebook_words(row_bytes) entries, 16-byte aligned; those past the row are zero.
 * ibp_build_codebook and ibp_build_planes_codebook make codebooks that are right. */
typedef struct ibp_codebook {
    ibp_scheme scheme;
    uint32_t row_bytes;     /* 1 to IBP_MAX_ROW_BYTES; read in every scheme */
    const uint32_t *mask;   /* scheme ibp: 1: the bit is invariant */
    const uint32_t *bitval; /* its value; 0 where mask is 0 */
    const uint32_t *flags;  /* bits 0-16: bit position of the word's first participation bit; bits 17-20: which of
                               the chunks that start in the word are flagged; bits 21-31: see format.h */
    uint32_t chunk_bytes;   /* 1, 2, 4 or 8 */
    uint32_t num_flags;     /* participation bits of a row */
    ibp_planes planes;      /* scheme planes */
    /* Clusters (section 7): where there is more than one codebook, the fields above are the first one's. */
    uint32_t num_clusters;         /* 0 or 1: one codebook; at most IBP_MAX_CLUSTERS */
    uint32_t cluster_stride;       /* to the next one's: entries of mask, bitval and flags; bytes of planes.entries */
    const uint32_t *cluster_flags; /* scheme ibp: num_flags of cluster k at [k * cluster_stride] */
} ibp_codebook;

/* "raw", "ibp", "planes"; NULL for what is no scheme. */
IBP_API const char *ibp_scheme_name(ibp_scheme scheme);

/* Entries of each array of a codebook: row_bytes / 4, rounded up to a multiple of 4. */
IBP_API size_t ibp_codebook_words(uint32_t row_bytes);

/* Scheme ibp: builds the working form from the masks and bitvals of a whole row (row_bytes bytes each).
 * flag_all: every chunk has a participation bit (the paper's bytes), not only those with a mask.
 * words: 3 * ibp_codebook_words(row_bytes) entries, 16-byte aligned, filled with mask, bitval and flags; out points
 * into it.
 * @return IBP_INVALID_ARGUMENT if row_bytes or chunk_bytes is out of range or a bitval bit is set where the mask is
 * clear. */
IBP_API ibp_status ibp_build_codebook(const uint8_t *mask, const uint8_t *bitval, uint32_t row_bytes,
                                      uint32_t chunk_bytes, bool flag_all, uint32_t *words, ibp_codebook *out);

/* Scheme planes: works out what follows from the other fields of a codebook: planes->num_entries and
 * planes->symbol_bytes (not read), and the clusters. entries_bytes: of planes->entries in all, one set of entries after
 * the other, a set for each cluster; no array is read, so that they may be in device memory. 0 where there are no
 * entries, and where they are consecutive.
 * @return IBP_INVALID_ARGUMENT if a field is out of range, or entries_bytes is not 1 to IBP_MAX_CLUSTERS sets. */
IBP_API ibp_status ibp_build_planes_codebook(const ibp_planes *planes, uint32_t row_bytes, size_t entries_bytes,
                                             ibp_codebook *out);

/* Whether a codebook is right: its fields, and what its arrays hold (of every cluster: flags that are the masks', no
 * mask past the row, bitvals inside masks; entries of no more bits than symbols have; live columns that increase and
 * exist, a template that has the default in them). Takes as long as to read it.
 * Host pointers only. A codebook that only has fields in range does no harm either, but rows may then come back wrong.
 * @return IBP_INVALID_ARGUMENT if not. */
IBP_API ibp_status ibp_check_codebook(const ibp_codebook *codebook);

/* ---- analysis (the paper's section 4.1) ------------------------------------------------------------------------- */

/* Adds to counts[8 * i + b] the number of rows whose bit b of byte i is 1. counts: 8 * row_bytes entries, set to 0 by
 * the caller. */
IBP_API ibp_status ibp_count_bits(const uint8_t *data, size_t num_rows, uint32_t row_bytes, uint64_t *counts);

/* The paper's threshold: a bit is invariant with value 1 if count > tau * num_rows, with value 0 if count < (1 - tau) *
 * num_rows; with tau = 1, if all rows agree. 0.5 <= tau <= 1. mask, bitval: row_bytes bytes each. */
IBP_API ibp_status ibp_threshold_bits(const uint64_t *counts, uint64_t num_rows, uint32_t row_bytes, double tau,
                                      uint8_t *mask, uint8_t *bitval);

/* For each of the chunks first_chunk to last_chunk - 1 of a row the mask that saves most bits on the given rows, found
 * greedily: bits are added in the order in which most of the rows that still match agree on them, and the best mask on
 * the way is kept; none where nothing pays for the participation bit. Beyond the paper, whose threshold asks each bit
 * by itself. mask, bitval: row_bytes bytes each, written where the chunks are. */
IBP_API ibp_status ibp_choose_masks(const uint8_t *data, size_t num_rows, uint32_t row_bytes, uint32_t chunk_bytes,
                                    uint32_t first_chunk, uint32_t last_chunk, uint8_t *mask, uint8_t *bitval);

/* The share of the rows' bytes that masks would save, the codebook left out, by up to 64 of the rows and 256 bytes of
 * each: as ibp_choose_masks finds them, of the best chunk_bytes. Meant to be quick, and rather too high. num_rows: at
 * least 1. */
IBP_API ibp_status ibp_estimate_masks(const uint8_t *data, size_t num_rows, uint32_t row_bytes, double *savings);

/* Adds to hits[i] the number of rows whose chunk i participates under the codebook, of scheme ibp; of its first
 * cluster. hits: ceil(row_bytes / chunk_bytes) entries. */
IBP_API ibp_status ibp_count_hits(const ibp_codebook *codebook, const uint8_t *data, size_t num_rows, uint64_t *hits);

/* ---- learning ---------------------------------------------------------------------------------------------------- */

/* How much a codebook may cost the decoder. Fast: dense rows with one plane of 4-bit digits and consecutive entries,
 * which code and decode at the rate of memory, unless they save nothing; then as by default. */
typedef enum ibp_level { IBP_LEVEL_DEFAULT = 0, IBP_LEVEL_FAST = 1 } ibp_level;

/* Rows to learn a codebook from: all of a table's, or some drawn at random. */
typedef struct ibp_sample {
    const uint8_t *rows;    /* num_rows * row_bytes bytes, at most 2^30 */
    int64_t num_rows;       /* at least 1 */
    int64_t table_rows;     /* of the whole table, over which the codebook's bytes are spread; num_rows if more */
    uint32_t row_bytes;     /* 1 to IBP_MAX_ROW_BYTES */
    uint32_t element_bytes; /* 1, 2, 4 or 8; divides row_bytes */
    uint32_t exponent_bits; /* of floats, below 8 * element_bytes; 0: anything else */
    ibp_level level;
    bool codes_invariant; /* code the bits and columns too that all of the sample agrees on: the codebook then has a
                             coded form for any row */
} ibp_sample;

/* Bytes of scratch, 16-byte aligned, that ibp_learn_planes needs; 0 for a sample that it refuses. */
IBP_API size_t ibp_learn_scratch_bytes(const ibp_sample *sample);

/* Bytes that the arrays of a codebook for such rows take at most; 0 for an invalid argument. */
IBP_API size_t ibp_max_planes_bytes(uint32_t row_bytes, uint32_t element_bytes);

/* The best codebook of scheme planes (section 6) for a level: invariant bits, constant columns, symbol widths,
 * rotation, digit widths, dense or listed rows, and entries a table or a column, compared by what counts of the symbols
 * say that a mean row takes. Entries a column are learned from the even rows and judged by the odd ones, unless the
 * sample is the table.
 * arrays: 8-byte aligned room for arrays_bytes, at least ibp_max_planes_bytes; the pointers of *planes point into it.
 * coded_bytes: of a mean row with its share of the codebook, as expected; row_bytes if nothing pays.
 * @return IBP_BUFFER_TOO_SMALL if scratch or arrays has too little room. */
IBP_API ibp_status ibp_learn_planes(const ibp_sample *sample, void *scratch, size_t scratch_bytes, uint8_t *arrays,
                                    size_t arrays_bytes, ibp_planes *planes, double *coded_bytes);

/* The entries for some rows of a codebook that is given but for them: the most frequent symbols of what it codes of
 * the rows. planes: of one cluster, not consecutive; its entries are not read. entries: exactly entries_bytes.
 * scratch: as for ibp_learn_planes, with the same sample. */
IBP_API ibp_status ibp_learn_entries(const ibp_sample *sample, const ibp_planes *planes, void *scratch,
                                     size_t scratch_bytes, uint8_t *entries, size_t entries_bytes);

/* ---- one row (sections 5 and 6) --------------------------------------------------------------------------------- */

/* Of codebooks of scheme raw there are no coded rows: these functions refuse them. */

/* Exact size of a row as coded, in bytes, whether or not it is smaller than the row; 0 for an invalid argument, where
 * there is no coded row; IBP_NO_CODED_FORM if the codebook cannot code it. row: codebook->row_bytes bytes. */
IBP_API size_t ibp_coded_row_bytes(const ibp_codebook *codebook, const uint8_t *row, void *scratch,
                                   size_t scratch_bytes);

/* Writes the coded row to dst. @return IBP_BUFFER_TOO_SMALL, with nothing useful in dst, if it needs more than
 * dst_bytes, or if the codebook cannot code it; else IBP_OK; and in all cases what ibp_coded_row_bytes returns in
 * *coded_bytes. Writes nothing past dst_bytes. */
IBP_API ibp_status ibp_encode_row(const ibp_codebook *codebook, const uint8_t *row, uint8_t *dst, size_t dst_bytes,
                                  size_t *coded_bytes, void *scratch, size_t scratch_bytes);

/* Rebuilds a row (codebook->row_bytes bytes) from exactly src_bytes coded bytes. Reads nothing outside src.
 * @return IBP_CORRUPT_ROW, with unspecified bytes in row, if the coded row does not have exactly src_bytes bytes. */
IBP_API ibp_status ibp_decode_row(const ibp_codebook *codebook, const uint8_t *src, size_t src_bytes, uint8_t *row,
                                  void *scratch, size_t scratch_bytes);

/* ---- a table of rows (sections 1 to 3) -------------------------------------------------------------------------- */

/* Where a table's bytes are and how they are coded; the caller keeps all arrays. Host pointers here; device-accessible
 * ones in ibp_cuda.h. */
typedef struct ibp_table {
    int64_t num_items;       /* items of the original tensor */
    int64_t item_bytes;      /* bytes of one item; all items have less than INT64_MAX / 32 bytes */
    const uint8_t *slots;    /* NULL if slots_bytes is 0 */
    const uint8_t *overflow; /* NULL if overflow_bytes is 0 */
    const uint16_t *lengths; /* one a row, or NULL: every row is raw; NULL in scheme raw */
    const uint64_t *bases;   /* one for rows_per_base rows, or NULL: no overflow parts */
    int64_t slots_bytes;
    int64_t overflow_bytes;
    uint64_t slots_start, overflow_start; /* which byte of the whole table's slots and overflow they begin with: 0, but
                                             for a block of its rows */
    uint32_t slot_bytes;                  /* 0, row_bytes, or a multiple of IBP_OVERFLOW_ALIGN below row_bytes */
    ibp_codebook codebook;
    uint32_t rows_per_base; /* 0 or IBP_ROWS_PER_BASE: rooms in the rows' order; 1: every row has a base, and its part
                               lies anywhere */
} ibp_table;

/* The entry of lengths of a default row, which has no bytes (section 2). */
#define IBP_DEFAULT_LENGTH(row_bytes) ((row_bytes) < 65535u ? (row_bytes) : 65535u)

#define IBP_ROWS_PER_BASE 32u  /* rows that share an entry of bases where their rooms are in order (section 2) */
#define IBP_OVERFLOW_ALIGN 32u /* bytes: the unit of overflow rooms and slots (section 3), a sector of GPU memory */

/* Whether the fields of a table fit each other, and ibp_check_codebook of its codebook. Its rows and index are not
 * read: what is wrong in them is found row by row. Host pointers only. @return IBP_INVALID_ARGUMENT if not. */
IBP_API ibp_status ibp_check_table(const ibp_table *table);

/* Rows of a table: ceil(num_items * item_bytes / row_bytes). 0 if these are out of range. */
IBP_API int64_t ibp_num_rows(const ibp_table *table);

/* lengths[r] for rows 0 to num_rows - 1 of data (num_bytes bytes, the last row may be short): IBP_DEFAULT_LENGTH for
 * a default row, else the coded size, or 0 if that is not smaller. */
IBP_API ibp_status ibp_measure_rows(const ibp_codebook *codebook, const uint8_t *data, int64_t num_bytes,
                                    uint16_t *lengths, void *scratch, size_t scratch_bytes);

/* Fills bases (ceil(num_rows / IBP_ROWS_PER_BASE) entries) for the given slot size, and *overflow_bytes with the size
 * that overflow must have, for a table whose rooms are in the rows' order. lengths: num_rows entries as
 * ibp_measure_rows makes them, or NULL (all rows raw). num_rows = ceil(num_bytes / row_bytes). */
IBP_API ibp_status ibp_index_rows(const uint16_t *lengths, int64_t num_bytes, uint32_t row_bytes, uint32_t slot_bytes,
                                  uint64_t *bases, int64_t *overflow_bytes);

/* Adds to survey[0] the bytes of the rows as stored and to survey[1 + k] how many of them take k sectors of
 * IBP_OVERFLOW_ALIGN bytes; one that claims to be longer than a row counts as a row of all sectors. lengths: num_rows
 * entries. survey: 2 + ceil(row_bytes / IBP_OVERFLOW_ALIGN) entries, set to 0 by the caller. */
IBP_API ibp_status ibp_survey_rows(const uint16_t *lengths, int64_t num_bytes, uint32_t row_bytes, uint64_t *survey);

/* What went wrong first; all zero when nothing did. Eight-byte fields so that a GPU can write it into mapped memory. */
typedef struct ibp_fault {
    int64_t status;   /* an ibp_status: IBP_INDEX_OUT_OF_RANGE, IBP_CORRUPT_ROW or IBP_BUFFER_TOO_SMALL */
    int64_t position; /* position in the output; a row number where there are no ids */
    int64_t id;       /* the id there; a row number where there are no ids */
    int64_t taken;    /* used by the GPU to let the first fault win */
} ibp_fault;

/* Codes the rows first_row to last_row - 1 of data into slots and overflow, which have the sizes that the table says;
 * table->slots and table->overflow are not read. data: the whole tensor. Stops at the first row that it cannot code,
 * noted in *fault if that is still clear.
 * @return IBP_CORRUPT_ROW if table->lengths does not belong to data, IBP_BUFFER_TOO_SMALL if a part lies outside its
 * array. */
IBP_API ibp_status ibp_encode_rows(const ibp_table *table, const uint8_t *data, int64_t first_row, int64_t last_row,
                                   uint8_t *slots, uint8_t *overflow, void *scratch, size_t scratch_bytes,
                                   ibp_fault *fault);

/* Codes data (num_bytes bytes, the last row may be short) in one pass, as a table in packed layout holds it: rows back
 * to back to dst, lengths as ibp_measure_rows makes them, and *stored_bytes, at most num_bytes: how much was written.
 * Bytes of dst after those may be written to. Tables are coded so by blocks of rows, one after the other.
 * @return IBP_INVALID_ARGUMENT also if dst_bytes is below num_bytes, or the codebook's scheme is raw. */
IBP_API ibp_status ibp_encode_packed(const ibp_codebook *codebook, const uint8_t *data, int64_t num_bytes, uint8_t *dst,
                                     int64_t dst_bytes, uint16_t *lengths, int64_t *stored_bytes, void *scratch,
                                     size_t scratch_bytes);

/* ---- rows coded into memory that is there ------------------------------------------------------------------------ */

#define IBP_NO_BASE UINT64_MAX /* in bases: a row that owns no overflow part */
#define IBP_MAX_SOURCE_DIMS 4u

/* What has become of rows that were coded into a place; added up over calls. */
typedef struct ibp_place_counts {
    uint64_t spilled; /* rows with an overflow part */
    uint64_t lost;    /* rows for whose overflow part there was no room */
} ibp_place_counts;

/* A table's memory, for rows that are coded one by one, in any order and again and again: every row has a base of its
 * own (rows_per_base 1), and the parts of overflow are handed out as rows need them. What is written here is read
 * through `table`, whose pointers are the same arrays.
 *
 * A row that has never been coded has base IBP_NO_BASE, and 0 in rooms. Fill lengths with 0 and bases with IBP_NO_BASE:
 * reading such a row is a fault then, unless slots hold raw rows.
 * A row keeps the part that it owns for as long as its bytes fit; else it gets a new one, at a multiple of
 * IBP_OVERFLOW_ALIGN, and the old one is lost to the table. With `rooms` a row remembers how much it owns while it
 * needs less, and one that grows gets room for its raw bytes, so that no row ever takes more than two parts; without
 * them it owns what its length says. */
typedef struct ibp_place {
    ibp_table table;   /* sizes and codebook; its pointers are not read. rows_per_base 1, starts 0 */
    uint8_t *slots;    /* table.slots_bytes */
    uint8_t *overflow; /* table.overflow_bytes */
    uint16_t *lengths; /* one a row; NULL in scheme raw */
    uint64_t *bases;   /* one a row; may be NULL where slot_bytes is row_bytes: there are no parts */
    uint16_t *rooms;   /* one a row: units of IBP_OVERFLOW_ALIGN that it owns from its base on; or NULL */
    uint64_t *used;    /* bytes of overflow that have been handed out; more than there are once one was refused. Not
                          NULL where there are bases */
    ibp_place_counts *counts; /* or NULL */
} ibp_place;

/* Rows as they are before coding: in one buffer or in many of the same layout (pages, tensors). Row i is row
 * i % rows_per_buffer of buffer i / rows_per_buffer, and inside a buffer at the sum of index * stride over num_dims
 * dimensions, in which its number is counted with the last one fastest: a slice of a cache is a source as it lies. A
 * row itself is row_bytes bytes one after the other, at any alignment; 16 bytes are read at once. */
typedef struct ibp_row_source {
    const uint8_t *data;                  /* the buffer; not read where there are buffers */
    const uint8_t *const *buffers;        /* addresses of ceil(num_rows / rows_per_buffer) of them; NULL: data alone */
    int64_t num_rows;                     /* of all buffers; at most INT32_MAX */
    int64_t rows_per_buffer;              /* at least 1, at most INT32_MAX; read where there are buffers */
    int64_t sizes[IBP_MAX_SOURCE_DIMS];   /* outermost first, 1 to INT32_MAX; their product is at least the rows of a
                                             buffer. The first one is not read */
    int64_t strides[IBP_MAX_SOURCE_DIMS]; /* bytes */
    uint32_t num_dims;                    /* 0: rows lie one after the other */
    uint32_t last_row_bytes; /* bytes of row num_rows - 1 where it is short, with num_dims 0; 0: row_bytes */
} ibp_row_source;

/* Codes the rows first to last - 1 of a source into a place: row i becomes row row_ids[i] of the table, or
 * first_row + i where row_ids is NULL. Threads may each take rows of one source; the order in which parts are handed
 * out says where they lie, and nothing else. Otherwise as ibp_cuda_encode_into (ibp_cuda.h), of which this is the host
 * twin, for host pointers: rows that are lost, equal ids, bytes behind a row's own, what is not trusted.
 * @return the first fault's status, noted in *fault if that is still clear, or IBP_OK; lost rows are counted only. */
IBP_API ibp_status ibp_encode_into(const ibp_place *place, const ibp_row_source *source, const int64_t *row_ids,
                                   int64_t first_row, int64_t first, int64_t last, void *scratch, size_t scratch_bytes,
                                   ibp_fault *fault);

#define IBP_MAX_OUT_DIMS 4u

/* Item ids of a gather: int32_t (id_bytes 4) or int64_t (id_bytes 8); id_bytes 0, with no data: the items 0, 1, 2 and
 * so on. Item k goes to position positions[k] of the output, which has out_items positions; a position past them is
 * left out and noted as IBP_INDEX_OUT_OF_RANGE. positions NULL: to position k.
 * Positions lie one after the other, item_bytes each, or, where num_dims is not 0, as the items of a strided tensor:
 * they are numbered in row-major order of num_dims dimensions, of sizes[d] each, and that of index (i0, i1, ...) begins
 * at byte i0 * strides[0] + i1 * strides[1] + ... of the output. No two may share a byte.
 * With addresses, position p begins there and nowhere else: the output is several pieces of memory, such as the blocks
 * of a paged cache. They are trusted, as `out` is, which is not read then; positions and num_dims are NULL and 0. */
typedef struct ibp_ids {
    const void *data;
    int64_t count;
    uint32_t id_bytes;
    const uint32_t *positions;
    int64_t out_items;                 /* read where there are positions */
    uint32_t num_dims;                 /* at most IBP_MAX_OUT_DIMS */
    int64_t sizes[IBP_MAX_OUT_DIMS];   /* at least 1; as many positions in all as there are items to put, or more */
    int64_t strides[IBP_MAX_OUT_DIMS]; /* bytes, at least 0 */
    const uint64_t *addresses;         /* NULL, or one for each of count items */
} ibp_ids;

/* out[k] = item ids[k], for first <= k < last, item_bytes bytes each; out points to position 0. With positions,
 * out[positions[k]]. A bad id or a corrupt row leaves zeros in its place and is noted in *fault if that is still clear.
 * @return the first fault's status, or IBP_OK. */
IBP_API ibp_status ibp_gather_items(const ibp_table *table, const ibp_ids *ids, int64_t first, int64_t last,
                                    uint8_t *out, void *scratch, size_t scratch_bytes, ibp_fault *fault);

/* out = bytes [start, end) of the original tensor, 0 <= start <= end <= num_items * item_bytes. Otherwise as
 * ibp_gather_items.
 * @return IBP_INVALID_ARGUMENT for another range. */
IBP_API ibp_status ibp_decode_bytes(const ibp_table *table, int64_t start, int64_t end, uint8_t *out, void *scratch,
                                    size_t scratch_bytes, ibp_fault *fault);

/* ---- pages of a KV-cache ---------------------------------------------------------------------------------------- */

/* Pages on their way between the blocks of paged tensors and a place: page k of the transfer is page pages[k] of the
 * place and block blocks[k] of `tensors` tensors. A page has a block of each of num_tensors tensors, of which those
 * from first_tensor on are moved. A block of a tensor is `pieces` pieces of memory of one size; the place has
 * ids_per_block rows, or items, for it, a whole number for each piece. Page numbers and block numbers may be any. */
typedef struct ibp_page_transfer {
    const int64_t *pages, *blocks;
    int64_t count, num_pages, num_blocks; /* of the transfer, of the place, of each tensor */
    uint32_t num_tensors, first_tensor, tensors, pieces, ids_per_block;
    const uint64_t *starts;       /* [tensors * pieces]: where the pieces of block 0 begin */
    const uint64_t *block_starts; /* NULL, or [num_blocks]: what is added to starts for each block */
    int64_t block_stride;         /* else its number times these bytes */
    uint64_t scratch;             /* address of a piece that nobody uses, for those that are not there */
} ibp_page_transfer;

/* Works out ids, count * tensors * ids_per_block of them: those of the place, in the order of pages, tensors and bytes,
 * and addresses, count * tensors * pieces: of the pieces. ids are -1 where there is no such page or block, or, with
 * stored, where the page's flag of any tensor of the transfer is 0: num_pages * num_tensors flags, of blocks of
 * tensors.
 * @return IBP_INVALID_ARGUMENT for numbers that contradict each other, and then nothing is written. */
IBP_API ibp_status ibp_plan_pages(const ibp_page_transfer *transfer, const uint8_t *stored, int64_t *ids,
                                  uint64_t *addresses);

/* Notes which blocks of tensors are stored, once their rows have been coded into a place: all of them, but those with a
 * row that was lost. ids: of rows, ids_per_block for each of num_blocks, as ibp_plan_pages has them; those with a first
 * one below 0 are left out. lengths, rooms: of the place, num_rows of them; rooms NULL where slots hold whole rows.
 * stored, seen: flags, num_rows / ids_per_block of them: of the device that decodes, and of the host.
 * @return IBP_INVALID_ARGUMENT also if that is no whole number. */
IBP_API ibp_status ibp_note_pages(const int64_t *ids, int64_t num_blocks, uint32_t ids_per_block,
                                  const uint16_t *lengths, const uint16_t *rooms, int64_t num_rows, uint8_t *stored,
                                  uint8_t *seen);

/* ---- fingerprints (section 10) ---------------------------------------------------------------------------------- */

/* Adds to *sum what the words of a part of a tensor add to its fingerprint. part: num_bytes bytes at any alignment,
 * which begin with word first_word of the tensor; a multiple of 8 bytes but for the last part. Parts may come in any
 * order. */
IBP_API ibp_status ibp_sum_words(const uint8_t *part, int64_t num_bytes, uint64_t first_word, uint64_t *sum);

/* The fingerprint of a tensor of num_bytes bytes whose words add up to sum, from 0 on. */
IBP_API uint64_t ibp_finish_fingerprint(uint64_t sum, int64_t num_bytes);

/* Both in one: of num_bytes bytes at any alignment, at least 0. */
IBP_API uint64_t ibp_fingerprint(const uint8_t *data, int64_t num_bytes);

/* ---- deltas (section 9) ------------------------------------------------------------------------------------------ */

/* Adds the rows first_row to last_row - 1 of a table of differences to base, or subtracts them: element by element,
 * modulo 2^w. base: the whole tensor, as many bytes as the table's, at any alignment. *change: what that adds to the
 * sum of ibp_sum_words is added to it. A corrupt row changes nothing, now and when it is subtracted, and is noted in
 * *fault if that is still clear; the others are added all the same. Threads may each take rows of one table.
 * scratch: ibp_scratch_bytes(row_bytes) and row_bytes more.
 * @return the first fault's status, or IBP_OK; IBP_INVALID_ARGUMENT also for rows that are no multiple of 8 bytes. */
IBP_API ibp_status ibp_add_rows(const ibp_table *table, uint32_t element_bytes, bool subtracts, int64_t first_row,
                                int64_t last_row, uint8_t *base, uint64_t *change, void *scratch, size_t scratch_bytes,
                                ibp_fault *fault);

/* ---- large tables ----------------------------------------------------------------------------------------------- */

#define IBP_MAX_WINDOWS 65536

/* Windows of 2^window_bits items that num_items items fall into: at least 1; 0 for a window_bits above 62 or negative
 * num_items. */
IBP_API int64_t ibp_num_windows(int64_t num_items, uint32_t window_bits);

/* Bytes of workspace, 8-byte aligned, that a partition of count ids needs; 0 for arguments that ibp_partition_ids
 * refuses. */
IBP_API size_t ibp_partition_workspace_bytes(int64_t count, int64_t num_items, uint32_t window_bits);

/* Puts ids in the order of the windows of 2^window_bits items that they lie in, so that a gather goes through the table
 * once: sorted_ids[k] = ids[positions[k]], sorted_ids of the type of ids; inside a window their order is kept. An id
 * out of range counts to the nearest window. ids->positions is not read. Where ids change meanwhile, positions still
 * are the numbers 0 to count - 1, each once, and a sorted id is any of those that were at its position.
 * @return IBP_INVALID_ARGUMENT for more than UINT32_MAX ids, more than IBP_MAX_WINDOWS windows or a negative num_items.
 */
IBP_API ibp_status ibp_partition_ids(const ibp_ids *ids, int64_t num_items, uint32_t window_bits, void *workspace,
                                     void *sorted_ids, uint32_t *positions);

/* A selection is the table of the items ids[0], ids[1], ... in packed layout (section 3), its rows copied as they are
 * stored. Its row q is row q % n of item ids[q / n], n = item_bytes / row_bytes; the functions fail with
 * IBP_INVALID_ARGUMENT unless that is whole.
 *
 * For its rows first_row to last_row - 1: lengths[q - first_row], where the table has lengths, and the sum of their
 * stored bytes.
 * @return IBP_INDEX_OUT_OF_RANGE or IBP_CORRUPT_ROW (a length above row_bytes), noted in *fault if that is still clear.
 */
IBP_API ibp_status ibp_measure_selection(const ibp_table *table, const ibp_ids *ids, int64_t first_row,
                                         int64_t last_row, uint16_t *lengths, uint64_t *stored_bytes, ibp_fault *fault);
/* Copies its rows first_row to last_row - 1, as stored, back to back to dst, which has room for dst_bytes.
 * @return IBP_INDEX_OUT_OF_RANGE or IBP_CORRUPT_ROW (a row that lies outside the table or does not fit dst), noted
 * likewise. */
IBP_API ibp_status ibp_copy_selection(const ibp_table *table, const ibp_ids *ids, int64_t first_row, int64_t last_row,
                                      uint8_t *dst, uint64_t dst_bytes, ibp_fault *fault);

/* ---- a cache of rows (the paper's section 5) --------------------------------------------------------------------- */

/* Rows of a table as they are stored, the slot part and the overflow part joined, in memory that is nearer than the
 * table: slabs, one a GPU. A row is found by its number in a map of its slab, which gives its entry: 64 bits, the
 * paper's, 0 where the cache does not hold the row.
 *
 *   bits 0-39   where the row's bytes begin in the slab
 *   bits 40-42  number of the slab
 *   bit 43      1: the row is coded. 0: its row_bytes bytes are stored as they are
 *   bits 44-59  of a coded row, its entry of lengths (section 2): the bytes stored, or that it is a default row, which
 *               has none; else 0
 *   bit 60      present: an entry without it is as good as 0
 *   bit 61      dirty: the row has changed since it was taken from the table
 *
 * A lookup takes two steps: find turns ids into the entries of their rows, a gather takes these as a further source of
 * rows' bytes. Caches are for tables whose items are whole rows: item_bytes is a multiple of row_bytes.
 *
 * Nothing of a cache is trusted. An entry that lies outside its slab is a corrupt row; a map that holds anything gives
 * wrong rows, and is left as soon as so many ways as a row may be found in have been looked at. */
#define IBP_MAX_SLABS 8u
#define IBP_ENTRY_OFFSET_BITS 40u
#define IBP_ENTRY_SLAB_SHIFT 40u
#define IBP_ENTRY_CODED ((uint64_t)1 << 43)
#define IBP_ENTRY_LENGTH_SHIFT 44u
#define IBP_ENTRY_PRESENT ((uint64_t)1 << 60)
#define IBP_ENTRY_DIRTY ((uint64_t)1 << 61)

/* A way of a map: a row's number and its entry. */
typedef struct ibp_cached_row {
    int64_t row; /* or one of the following */
    uint64_t entry;
} ibp_cached_row;

#define IBP_WAY_EMPTY ((int64_t)-1)   /* never used: a search ends in the set that has one */
#define IBP_WAY_REMOVED ((int64_t)-2) /* used once: a search goes on */

/* A row is found in its home set, which a hash of its number names, or, where that has no empty way, in sets that the
 * hash names after it, IBP_SEARCHED_WAYS ways in all. A map with sets of two ways that is filled by 85 % leaves out
 * fewer than one row in a thousand. */
#define IBP_SEARCHED_WAYS 32u

/* A slab's map: sets of `ways` ways. An empty map has IBP_WAY_EMPTY and entry 0 in every way. */
typedef struct ibp_cache_map {
    ibp_cached_row *rows; /* num_sets * ways, aligned to 16 bytes */
    int64_t num_sets;     /* 1 to UINT32_MAX; 0: the slab has no rows */
    uint32_t ways;        /* 2, 4, 8, 16 or 32 */
} ibp_cache_map;

typedef struct ibp_slab {
    const uint8_t *bytes;
    int64_t num_bytes;
} ibp_slab;

/* What a gather reads besides its table: for row r of the item of id k the entry k * rows_per_item + r, rows_per_item
 * being item_bytes / row_bytes. */
typedef struct ibp_cache {
    const uint64_t *entries; /* ids * rows_per_item */
    uint32_t num_slabs;      /* at most IBP_MAX_SLABS */
    ibp_slab slabs[IBP_MAX_SLABS];
} ibp_cache;

/* Of rows that were asked for. Default rows, and ids out of range, count as neither. */
typedef struct ibp_cache_counts {
    uint64_t hits[IBP_MAX_SLABS]; /* rows found, by slab */
    uint64_t misses;              /* rows not found */
    uint64_t missed_bytes;        /* as stored, each row's in whole units of IBP_OVERFLOW_ALIGN */
} ibp_cache_counts;

/* owners[i] = the slab of num_slabs, 1 to IBP_MAX_SLABS, whose map row rows[i] belongs to, by a hash of its number. */
IBP_API ibp_status ibp_owners_of_rows(const int64_t *rows, int64_t count, uint32_t num_slabs, uint8_t *owners);

/* Whose rows are looked up: rows_per_item rows of row_bytes bytes an item. */
typedef struct ibp_row_query {
    const ibp_ids *ids;      /* its positions are not read */
    int64_t rows_per_item;   /* at least 1 */
    uint32_t row_bytes;      /* 1 to IBP_MAX_ROW_BYTES */
    const uint16_t *lengths; /* one a row, or NULL: every row is raw */
    int64_t num_rows;        /* rows of the table; ids past them are out of range */
} ibp_row_query;

/* entries[k * rows_per_item + r] = entry of row r of item ids[k], 0 where no map has it, for first <= k < last.
 * maps: num_maps of them, at most IBP_MAX_SLABS; a row is looked up in that of its owner among num_maps. counts, which
 * may be NULL, is added to, in one piece, so that threads may share it. */
IBP_API ibp_status ibp_find_cached(const ibp_row_query *query, const ibp_cache_map *maps, uint32_t num_maps,
                                   int64_t first, int64_t last, uint64_t *entries, ibp_cache_counts *counts);

/* As ibp_gather_items, of items of whole rows: a row whose entry is present comes from its slab.
 * @return IBP_INVALID_ARGUMENT also for items that are not whole rows. */
IBP_API ibp_status ibp_gather_cached(const ibp_table *table, const ibp_ids *ids, const ibp_cache *cache, int64_t first,
                                     int64_t last, uint8_t *out, void *scratch, size_t scratch_bytes, ibp_fault *fault);

/* A slab that is written, and its map. */
typedef struct ibp_cache_slab {
    ibp_cache_map map;
    uint8_t *bytes;
    int64_t num_bytes; /* at most 2^IBP_ENTRY_OFFSET_BITS */
    uint32_t number;   /* of the slab among those of the cache: below IBP_MAX_SLABS */
} ibp_cache_slab;

/* Copies rows of a table into a slab, as they are stored, and puts them into its map: row rows[i] to offsets[i], for
 * first <= i < last. A row that is in the map already, default rows, and rows for which the ways that a search would
 * look at are taken, are left out; so are rows with a negative number or offset. Of equal rows one is taken. Rooms that
 * overlap give wrong rows. Threads may share a map. The map's entry of a row is written after its bytes. A map without
 * sets leaves no row out: rows are copied, equal ones too, and nothing says where they are.
 * @return IBP_INDEX_OUT_OF_RANGE: there is no such row; IBP_CORRUPT_ROW: the row lies outside the table, or is lost;
 * IBP_BUFFER_TOO_SMALL: it does not lie in the slab; these rows are left out, and the first one is noted in *fault. */
IBP_API ibp_status ibp_fill_slab(const ibp_table *table, const int64_t *rows, const int64_t *offsets, int64_t first,
                                 int64_t last, const ibp_cache_slab *slab, ibp_fault *fault);

/* A cache whose rows are replaced by those that are asked for. Sets have IBP_SEARCHED_WAYS ways, and a row lies in its
 * home set; way i of the map owns slot_bytes bytes of the slab from i * slot_bytes on. */
typedef struct ibp_lru {
    ibp_cache_slab slab;
    uint32_t slot_bytes; /* a multiple of IBP_OVERFLOW_ALIGN; longer rows are not cached */
    uint32_t *stamps;    /* one a way, the time of its last use, then one a set, 0 between calls. Zeros at first */
    uint64_t *clock;     /* two numbers, the same between calls: how many calls there were */
} ibp_lru;

/* entries[k * rows_per_item + r] = entry of row r of item ids[k] for all ids, after the rows that were missing have
 * taken the places of those used longest ago. Rows that the cache holds when the call begins keep their places. Each
 * missing row, in the order of the ids, takes a way of its set that has no row, else the one used longest ago, but none
 * that this call uses nor one that is dirty; its bytes are copied there. Where there is no such way, and for rows that
 * are longer than a slot, the entry is 0. Equal ids get the same entry; those after the first count as hits. counts may
 * be NULL.
 * @return the first fault's status, noted in *fault if that is still clear: an id out of range, or a row that lies
 * outside the table; their entries are 0. IBP_INVALID_ARGUMENT also for items that are not whole rows. */
IBP_API ibp_status ibp_claim_cached(const ibp_table *table, const ibp_ids *ids, const ibp_lru *lru, uint64_t *entries,
                                    ibp_cache_counts *counts, ibp_fault *fault);

/* Takes rows out of a map: rows[i] for 0 <= i < count. Rows that it does not have, and negative numbers, are left out.
 */
IBP_API ibp_status ibp_drop_cached(const int64_t *rows, int64_t count, const ibp_cache_map *map);

/* Says that the cached bytes of rows have been written anew: of rows[i], if the map has it, lengths[i] is the new entry
 * of lengths (NULL: as before), and dirty whether the table's own row is older. Rows differ. Negative numbers are left
 * out. */
IBP_API ibp_status ibp_set_cached(const int64_t *rows, const uint16_t *lengths, int64_t count, bool dirty,
                                  const ibp_cache_map *map);

/* ---- unstable: may change with any version ---------------------------------------------------------------------- */

/* Features of the processor that the functions of this file use for rows where it has them. Bytes and statuses are the
 * same without. */
typedef enum ibp_cpu_feature {
    IBP_CPU_AVX2_BMI2 = 1,
    IBP_CPU_AVX512 = 2 /* F, BW, DQ, VL, VBMI, VBMI2 and VPOPCNTDQ of it; never in use without IBP_CPU_AVX2_BMI2 */
} ibp_cpu_feature;

/* The features in use, a sum of ibp_cpu_feature: all that the processor has, unless set otherwise. */
IBP_API uint32_t ibp_cpu_features(void);
/* Uses those of the given features that the processor has, in all threads from now on: for tests and benchmarks, 0
 * being the plain C code. @return the features in use. */
IBP_API uint32_t ibp_set_cpu_features(uint32_t features);

#ifdef __cplusplus
}
#endif
#endif
