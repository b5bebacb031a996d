/* main.c - runs every C unit test and says how many checks held. */
#include "check.h"

#include <time.h>

long num_passed, num_failed;
bool is_quick;

static void run(const char *name, void (*test)(void))
{
    const long passed = num_passed, failed = num_failed;
    const clock_t start = clock();
    test();
    printf("%-24s %9ld passed, %ld failed, %.1f s\n", name, num_passed - passed, num_failed - failed,
           (double)(clock() - start) / CLOCKS_PER_SEC);
}

/* With the argument "quick": fewer rounds of what repeats itself with other random numbers. */
int main(int count, char **arguments)
{
    is_quick = count > 1 && strcmp(arguments[1], "quick") == 0;
    run("bits", test_bits);
    run("status", test_status);
    run("codebook", test_codebook);
    run("analysis", test_analysis);
    run("learning", test_learn);
    ibp_set_cpu_features(0);
    run("rows in plain C", test_rows);
    run("corrupt rows in plain C", test_corrupt_rows);
    ibp_set_cpu_features(UINT32_MAX);
    run("rows", test_rows);
    run("corrupt rows", test_corrupt_rows);
    run("cpu paths", test_cpu_paths);
    run("tables", test_tables);
    run("corrupt tables", test_corrupt_tables);
    run("offsets past 4 GiB", test_offsets_past_4_gib);
    run("places", test_places);
    run("pages of a kv-cache", test_kv_pages);
    run("cache", test_cache);
    run("stream", test_stream);
    run("partition", test_partition);
    run("no cuda", test_no_cuda);
    run("arguments", test_arguments);
    run("hostile codebooks", test_hostile_codebooks);
    run("changing rows", test_changing_rows);
    run("changing arrays", test_changing_arrays);
    run("files", test_file);
    run("stack", test_stack);
    printf("%ld passed, %ld failed\n", num_passed, num_failed);
    return num_failed != 0;
}
