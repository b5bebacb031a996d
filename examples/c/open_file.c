/* open_file.c - lists what a file of compressed tables holds, or prints rows of one of its tables by their ids.
 *
 *     cc open_file.c $(pkg-config --cflags --libs ibp) -o open_file
 *     ./open_file model.safetensors
 *     ./open_file model.safetensors embedding 17 4 99
 *
 * The file is mapped, and just the rows that are asked for are read and decoded.
 */
#define _DEFAULT_SOURCE
#include <ibp_file.h>

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SHOWN_BYTES = 16, NAME_BYTES = 1024 };

static int complain(const char *what, const char *why)
{
    fprintf(stderr, "%s: %s\n", what, why);
    return EXIT_FAILURE;
}

/* Maps a whole file. @return NULL if that cannot be done. */
static const uint8_t *map_file(const char *path, size_t *num_bytes)
{
    struct stat about;
    const int descriptor = open(path, O_RDONLY);
    void *bytes = MAP_FAILED;
    if (descriptor >= 0 && fstat(descriptor, &about) == 0 && about.st_size > 0)
        bytes = mmap(NULL, *num_bytes = (size_t)about.st_size, PROT_READ, MAP_PRIVATE, descriptor, 0);
    if (descriptor >= 0) close(descriptor);
    return bytes != MAP_FAILED ? bytes : NULL;
}

static void print_shape(const int64_t *shape, uint32_t num_dims)
{
    printf("[");
    for (uint32_t d = 0; d < num_dims; d++) printf("%s%" PRId64, d != 0 ? ", " : "", shape[d]);
    printf("]");
}

static int list(const ibp_file *file)
{
    char name[NAME_BYTES], dtype[32];
    ibp_text text;
    ibp_file_tensor tensor;
    for (size_t at = 0; ibp_next_table(file, &at, &text) == IBP_OK;) {
        ibp_file_table table;
        ibp_copy_text(text, name, sizeof name);
        const ibp_status status = ibp_find_table(file, 1, name, &table);
        if (status != IBP_OK) {
            printf("%s: %s\n", name, ibp_status_string(status));
            continue;
        }
        ibp_copy_text(table.dtype, dtype, sizeof dtype);
        printf("%s: %s ", name, dtype);
        print_shape(table.shape, table.num_dims);
        printf(", scheme %s, rows of %u bytes\n", ibp_scheme_name(table.scheme), table.row_bytes);
    }
    for (size_t at = 0; ibp_next_tensor(file, &at, &tensor) == IBP_OK;) {
        if (ibp_is_part(file, &tensor)) continue;
        ibp_copy_text(tensor.name, name, sizeof name);
        ibp_copy_text(tensor.dtype, dtype, sizeof dtype);
        printf("%s: %s ", name, dtype);
        print_shape(tensor.shape, tensor.num_dims);
        printf(", plain\n");
    }
    return EXIT_SUCCESS;
}

/* Fetches the items of the ids, and prints the first bytes of each. */
static int print_rows(const ibp_table *table, const char *const *words, int count)
{
    const size_t scratch_bytes = ibp_scratch_bytes(table->codebook.row_bytes), item_bytes = (size_t)table->item_bytes;
    int64_t *const ids = malloc((size_t)count * sizeof *ids);
    uint8_t *const rows = calloc((size_t)count, item_bytes != 0 ? item_bytes : 1), *const scratch =
                                                                                       malloc(scratch_bytes);
    ibp_fault fault = {0};
    ibp_status status = IBP_BUFFER_TOO_SMALL;
    if (ids && rows && scratch) {
        for (int k = 0; k < count; k++) ids[k] = strtoll(words[k], NULL, 10);
        const ibp_ids wanted = {.data = ids, .count = count, .id_bytes = sizeof *ids};
        status = ibp_gather_items(table, &wanted, 0, count, rows, scratch, scratch_bytes, &fault);
        for (int k = 0; k < count; k++) {
            printf("%s:", words[k]);
            for (size_t i = 0; i < item_bytes && i < SHOWN_BYTES; i++)
                printf(" %02x", rows[(size_t)k * item_bytes + i]);
            printf(item_bytes > SHOWN_BYTES ? " ...\n" : "\n");
        }
    }
    if (fault.status != IBP_OK) fprintf(stderr, "id %" PRId64 ": ", fault.id);
    free(ids), free(rows), free(scratch);
    return status == IBP_OK ? EXIT_SUCCESS : complain("rows", ibp_status_string(status));
}

static int open_table(const ibp_file *file, const char *name, const char *const *words, int count)
{
    ibp_file_table found;
    ibp_table table;
    ibp_status status = ibp_find_table(file, 1, name, &found);
    if (status != IBP_OK) return complain(name, ibp_status_string(status));
    void *const workspace = aligned_alloc(16, (found.workspace_bytes + 31) / 16 * 16);
    if (!workspace) return complain(name, "no memory for the codebook");
    status = ibp_open_table(&found, workspace, found.workspace_bytes, &table);
    const int result = status == IBP_OK ? print_rows(&table, words, count) : complain(name, ibp_status_string(status));
    free(workspace);
    return result;
}

int main(int count, char **words)
{
    if (count < 2) return complain("usage", "open_file FILE [TABLE ID ...]");
    size_t num_bytes = 0;
    ibp_file file;
    const uint8_t *const bytes = map_file(words[1], &num_bytes);
    if (!bytes) return complain(words[1], "no file that can be mapped");
    const ibp_status status = ibp_open_file(bytes, num_bytes, &file);
    int result = EXIT_FAILURE;
    if (status != IBP_OK)
        complain(words[1], ibp_status_string(status));
    else
        result = count == 2 ? list(&file) : open_table(&file, words[2], (const char *const *)words + 3, count - 3);
    munmap((void *)bytes, num_bytes);
    return result;
}
