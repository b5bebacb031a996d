/* driver.c - runs a fuzz target where there is no libFuzzer: first on every input of the corpus, then on mutations of
 * them, keeping those that reach code which none reached before.
 *
 *     fuzz_rows [-seconds=S] [-runs=N] [-seed=K] [-most=BYTES] CORPUS...
 *
 * CORPUS: files of inputs, each after its length (uint32, little-endian); see pack.py. Where an input ends the process,
 * it is in the file crash-<name of the program> afterwards: give that, packed, to see it again.
 *
 * What code is reached, the target's objects tell if they are compiled with -fsanitize-coverage=trace-pc (gcc, clang).
 */
#include "fuzz.h"

#include <inttypes.h>
#include <signal.h>
#include <time.h>

enum { MOST_INPUTS = 1 << 16, MAP_SIZE = 1 << 16 };

typedef struct text {
    uint8_t *bytes;
    size_t size;
} text;

static text inputs[MOST_INPUTS], current;
static size_t num_inputs, num_reached, most_bytes = 4096;
static uint8_t reached[MAP_SIZE], hit[MAP_SIZE];
static uint32_t hits[MAP_SIZE], num_hits;
static const char *program;
static uint64_t state = 1;

/* ---- coverage ---- */

void __sanitizer_cov_trace_pc(void);

/* Notes the edge from the place that was reached before. Compiled without instrumentation. */
void __sanitizer_cov_trace_pc(void)
{
    static uintptr_t previous;
    const uintptr_t here = (uintptr_t)__builtin_return_address(0);
    const uint32_t at = (uint32_t)((here ^ previous) * 0x9E3779B1u >> 7) % MAP_SIZE;
    previous = here >> 1;
    if (hit[at]) return;
    hit[at] = 1;
    hits[num_hits++] = at;
}

/* Whether the last run reached something new. */
static bool is_new(void)
{
    const size_t before = num_reached;
    for (uint32_t i = 0; i < num_hits; i++) {
        num_reached += !reached[hits[i]];
        reached[hits[i]] = 1, hit[hits[i]] = 0;
    }
    num_hits = 0;
    return num_reached != before;
}

/* ---- running ---- */

/* Keeps the input that ends the process. Sanitizers call it, and signals. */
static void keep_input(void)
{
    char path[256];
    const char *const name = strrchr(program, '/');
    snprintf(path, sizeof path, "crash-%s", name ? name + 1 : program);
    FILE *const file = fopen(path, "wb");
    if (!file) return;
    fwrite(current.bytes, 1, current.size, file);
    fclose(file);
    fprintf(stderr, "the input is in %s, %zu bytes\n", path, current.size);
}

void __sanitizer_set_death_callback(void (*callback)(void)) __attribute__((weak));

/* The undefined behaviour sanitizer of gcc knows nothing of that callback: it is to raise a signal. */
const char *__ubsan_default_options(void);
const char *__ubsan_default_options(void) { return "abort_on_error=1:print_stacktrace=1"; }

static void on_signal(int number)
{
    keep_input();
    signal(number, SIG_DFL);
    raise(number);
}

/* A copy of just the input's size, so that a sanitizer sees what is read behind its end. */
static void run(const uint8_t *bytes, size_t size)
{
    current = (text){malloc(size != 0 ? size : 1), size};
    if (!current.bytes) abort();
    memcpy(current.bytes, bytes, size);
    LLVMFuzzerTestOneInput(current.bytes, size);
    if (is_new() && num_inputs < MOST_INPUTS)
        inputs[num_inputs++] = current;
    else
        free(current.bytes);
    current = (text){NULL, 0};
}

static void read_corpus(const char *path)
{
    FILE *const file = fopen(path, "rb");
    uint32_t size;
    if (!file) {
        fprintf(stderr, "%s cannot be read\n", path);
        exit(2);
    }
    while (fread(&size, 4, 1, file) == 1) {
        uint8_t *const bytes = malloc(size != 0 ? size : 1);
        if (!bytes || fread(bytes, 1, size, file) != size) abort();
        run(bytes, size);
        free(bytes);
    }
    fclose(file);
}

/* ---- mutations ---- */

/* splitmix64 (Steele, Lea and Flood 2014). */
static uint64_t next(void)
{
    uint64_t z = state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}
static size_t below(size_t limit) { return limit < 2 ? 0 : (size_t)(next() % limit); }

/* Puts num_bytes bytes in the place of `gone` bytes at `at`, as far as there is room. */
static void replace(uint8_t *bytes, size_t *size, size_t at, size_t gone, const uint8_t *with, size_t num_bytes)
{
    if (*size - gone + num_bytes > most_bytes) return;
    memmove(bytes + at + num_bytes, bytes + at + gone, *size - at - gone);
    memmove(bytes + at, with, num_bytes);
    *size += num_bytes - gone;
}

static void mutate(uint8_t *bytes, size_t *size)
{
    static const uint64_t numbers[] = {0,
                                       1,
                                       0x7f,
                                       0x80,
                                       0xff,
                                       0x7fff,
                                       0xffff,
                                       0x10000,
                                       0x7fffffff,
                                       0xffffffff,
                                       0x7fffffffffffffff,
                                       0x8000000000000000,
                                       UINT64_MAX};
    uint8_t random[16];
    const size_t at = below(*size), left = *size - at, part = below(left < 64 ? left + 1 : 64);
    const text other = inputs[below(num_inputs)];
    const size_t from = below(other.size), there_are = other.size - from;
    const uint64_t number = numbers[below(sizeof numbers / sizeof *numbers)];
    for (size_t i = 0; i < sizeof random; i++) random[i] = (uint8_t)next();
    switch (*size == 0 ? 2 : below(7)) {
    case 0: bytes[at] ^= (uint8_t)(1u << below(8)); break;
    case 1: bytes[at] = (uint8_t)next(); break;
    case 2: replace(bytes, size, at, 0, random, 1 + below(sizeof random)); break;
    case 3: replace(bytes, size, at, part, random, 0); break;
    case 4: memcpy(bytes + at, &number, left < 8 ? left : (size_t)1 << below(4)); break;
    case 5: replace(bytes, size, at, part, other.bytes + from, below(there_are < 64 ? there_are + 1 : 64)); break;
    default: bytes[at] = (uint8_t)(bytes[at] + below(33) - 16); break;
    }
}

static void run_mutation(uint8_t *room)
{
    const text base = inputs[below(num_inputs)];
    size_t size = base.size < most_bytes ? base.size : most_bytes;
    memcpy(room, base.bytes, size);
    for (size_t count = 1 + below(6); count > 0; count--) mutate(room, &size);
    run(room, size);
}

int main(int count, char **words)
{
    double seconds = 0;
    uint64_t runs = UINT64_MAX, done = 0;
    program = words[0];
    if (__sanitizer_set_death_callback) __sanitizer_set_death_callback(keep_input);
    signal(SIGABRT, on_signal);
    run((const uint8_t *)"", 0);
    for (int i = 1; i < count; i++) {
        if (sscanf(words[i], "-seconds=%lf", &seconds) == 1) continue;
        if (sscanf(words[i], "-runs=%" SCNu64, &runs) == 1 || sscanf(words[i], "-seed=%" SCNu64, &state) == 1) continue;
        if (sscanf(words[i], "-most=%zu", &most_bytes) == 1) continue;
        read_corpus(words[i]);
    }
    if (num_inputs == 0) inputs[num_inputs++] = (text){calloc(1, 1), 1};
    uint8_t *const room = malloc(most_bytes + 16);
    if (!room) abort();
    const size_t at_first = num_inputs;
    for (const clock_t start = clock(); done < runs; done++) {
        if (seconds > 0 && done % 64 == 0 && (double)(clock() - start) / CLOCKS_PER_SEC > seconds) break;
        run_mutation(room);
    }
    printf("%" PRIu64 " executions, %zu edges reached, %zu inputs of the corpus, %zu found\n", done, num_reached,
           at_first, num_inputs - at_first);
    free(room);
    return 0;
}
