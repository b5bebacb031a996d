/* ibp_stream.h - tables in pinned host memory, brought to the GPU by its copy engine: whole, or some items.
 *
 *     ibp_status stream_one(const ibp_table *table, const uint64_t *host_bases, uint8_t *ring, int64_t ring_bytes,
 *                           uint8_t *out, ibp_fault *fault, ibp_stream stream)
 *     {
 *         ibp_streamer *streamer = NULL;
 *         const int64_t end = table->num_items * table->item_bytes;
 *         ibp_status status = ibp_cuda_create_streamer(&streamer);
 *         if (status == IBP_OK) status = ibp_cuda_begin_stream(streamer, ring, ring_bytes);
 *         if (status == IBP_OK)
 *             status = ibp_cuda_stream_bytes(streamer, table, host_bases, 0, end, true, out, fault, 0, stream);
 *         ibp_cuda_destroy_streamer(streamer); // what is queued is completed
 *         return status;
 *     }
 */
#ifndef IBP_STREAM_H
#define IBP_STREAM_H

#include "ibp_cuda_device.h"
#include "ibp_table.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- items with the CPU's help ----------------------------------------------------------------------------------- */

/* Brings items at ids in host memory to the GPU, of tables in pinned host memory so large that a GPU which fetches rows
 * at random places is bound by address translation: threads of the CPU gather slots into a ring of pinned memory, the
 * copy engine moves them to a ring on the GPU, and the GPU decodes them there, all at the same time. Owns a stream and
 * events of the device that is current when it is created. Used by one call at a time. */
typedef struct ibp_stager ibp_stager;

/* pinned, near: ring_bytes each, pinned host memory and device memory, aligned to 16 bytes, the stager's own until it
 * is destroyed and the work queued by then is completed. 24 MiB keep a PCIe 5 link busy. */
IBP_API ibp_status ibp_cuda_create_stager(uint8_t *pinned, uint8_t *near, int64_t ring_bytes, ibp_stager **stager);
/* From any current device; NULL: nothing to do. */
IBP_API ibp_status ibp_cuda_destroy_stager(ibp_stager *stager);

/* Calls work(state, number) once for every number of [0, count), on as many threads as it likes at the same time or
 * one after the other, and returns when all have returned: an OpenMP loop, or a pool of threads. */
typedef void (*ibp_run)(void *runner, int64_t count, void (*work)(void *state, int64_t number), void *state);

/* As ibp_cuda_gather_items, of items of whole rows at ids in host memory (no positions, contiguous output), in the
 * order of the stream. Comes back when the last chunk is queued; ids and slots are not read afterwards.
 * table: with slots, its arrays as the device sees them: what is not in a slot it reads itself. slots: the same slots
 * as the CPU sees them. run(runner, num_threads, ...) is called once.
 * @return IBP_INVALID_ARGUMENT also where an item's slots do not fit into a twelfth of the ring. */
IBP_API ibp_status ibp_cuda_stage_items(ibp_stager *stager, const ibp_table *table, const uint8_t *slots,
                                        const ibp_ids *ids, uint8_t *out, ibp_fault *fault, int max_sms, ibp_run run,
                                        void *runner, int64_t num_threads, ibp_stream stream);

/* ---- streams of whole tables ------------------------------------------------------------------------------------- */

/* Brings tables from pinned host memory to the GPU with its copy engine, chunk by chunk through a ring of staging
 * buffers there, while the chunks before are decoded. Owns streams and events of the device that is current when it
 * is created, no other memory. Used by one host thread at a time, and with one caller's stream; from another current
 * device the functions that use one return IBP_INVALID_ARGUMENT. */
typedef struct ibp_streamer ibp_streamer;

IBP_API ibp_status ibp_cuda_create_streamer(ibp_streamer **streamer);
/* Work already queued is completed. From any current device; NULL: nothing to do. */
IBP_API ibp_status ibp_cuda_destroy_streamer(ibp_streamer *streamer);

/* Begins a stream: one table after the other, each by a call of ibp_cuda_stream_bytes with the same caller's stream,
 * through this ring. ring: device memory, aligned to 128 bytes, free for use where the caller's stream is when the
 * first chunk is queued; every later use of it by the caller's stream comes after all copies of the stream, since
 * each call joins its own. ring_bytes: it is cut in four; 32 MiB keep a PCIe 5 link busy, and where 32 rows do not
 * fit into a quarter, the kernel fetches rows from host memory itself. Queues nothing. */
IBP_API ibp_status ibp_cuda_begin_stream(ibp_streamer *streamer, uint8_t *ring, int64_t ring_bytes);

/* Begins another stream through the ring of the one before, which nothing else has used since: its first copies wait
 * for nothing but room in the ring, so that the link stays busy from one stream into the next. Not where either of them
 * is captured.
 * @return IBP_INVALID_ARGUMENT if none has begun. */
IBP_API ibp_status ibp_cuda_continue_stream(ibp_streamer *streamer);

/* As ibp_cuda_decode_bytes, of the next table of a stream.
 * table: slots and overflow mapped pinned host memory, which must hold its bytes when this is called and stay as it
 * is until they have been copied; lengths, bases and codebook in device memory; slots_start and overflow_start 0.
 * bases: table->bases in host memory, read before the function returns. Where they are out of order, rows of that
 * chunk are fetched as ibp_cuda_decode_bytes does it; other wrong bases may cost intact rows of the same chunk, which
 * are then zeros and noted. ends: this is the last table of the stream, so that its last chunks are small ones.
 * Leaving it out only costs time. The caller's stream waits for the last chunk, and copies for the caller's stream
 * where the stream begins and, from the fifth chunk on, until a place of the ring has been decoded: copies for one
 * table run while the one before is still being decoded, and all of it can be captured in a CUDA graph, whose replays
 * then need the ring and the pinned memory, but no longer the streamer. A whole stream, from begin to its last table,
 * is either captured or not. */
IBP_API ibp_status ibp_cuda_stream_bytes(ibp_streamer *streamer, const ibp_table *table, const uint64_t *bases,
                                         int64_t start, int64_t end, bool ends, uint8_t *out, ibp_fault *fault,
                                         int max_sms, ibp_stream stream);

#ifdef __cplusplus
}
#endif
#endif
