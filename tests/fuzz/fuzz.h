/* fuzz.h - what fuzz targets share: values drawn from an input, memory that ends at a fence, and codebooks and tables
 * made of an input.
 *
 * A target is a function LLVMFuzzerTestOneInput, for libFuzzer or for driver.c. It builds what is right from the first
 * bytes of its input, damages it as later bytes say, and calls the library. What it does, the input alone decides. */
#ifndef FUZZ_H
#define FUZZ_H

#include "internal/ibp_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Ends the process where a promise is broken. */
#define REQUIRE(condition)                                                      \
    do {                                                                        \
        if (condition) break;                                                   \
        fprintf(stderr, "%s:%d: broken: %s\n", __FILE__, __LINE__, #condition); \
        abort();                                                                \
    } while (0)

/* What is left of an input. Behind its end there are zeros. */
typedef struct input {
    const uint8_t *at, *end;
} input;

uint64_t take(input *in, uint32_t num_bytes);
uint32_t take_below(input *in, uint32_t limit); /* of one byte, or more where limit needs them */
bool take_flag(input *in);
/* A size from 1 to IBP_MAX_ROW_BYTES, most of them small. */
uint32_t take_size(input *in);
/* Fills num_bytes bytes with up to `most` bytes of the input, again and again. */
void take_pattern(input *in, uint8_t *to, size_t num_bytes, size_t most);

enum { NUM_PLACES = 24 };
/* num_bytes bytes that end where memory that can be touched does: even accesses that no sanitizer sees are found.
 * place: 0 to NUM_PLACES - 1; what was there before is lost. Aligned to 16 if num_bytes is a multiple of it. */
uint8_t *fenced(int place, size_t num_bytes);
/* Scratch for rows of row_bytes bytes, likewise. */
uint8_t *fenced_scratch(uint32_t row_bytes);

/* A codebook with row_bytes set, its arrays in places of their own. Right, but for hostile arrays in some.
 * @return false if the fields that the input gives contradict each other. */
bool take_codebook(input *in, ibp_codebook *codebook);

/* Overwrites numbers of an array where the input says so. */
void damage(input *in, void *array, size_t num_bytes);

/* Calls `use` with each set of processor features that this processor has, plain C first. */
void on_each_processor(void (*use)(void *), void *argument);

#endif
