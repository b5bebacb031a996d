/* ibp_stream.h - brings whole tables, or items of tables, from pinned host memory to the GPU with the GPU's copy
 * engine, and orders the work of two streams.
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
 *         ibp_cuda_destroy_streamer(streamer); // work that is queued is still completed
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

/* ---- the order of two streams ------------------------------------------------------------------------------------ */

typedef struct CUevent_st *ibp_event; /* a cudaEvent_t */

/* Records an event on a stream: whoever waits for the event afterwards waits for the work that is queued on the stream
 * at this time. An event that was recorded before may be recorded again; waits that are queued already are for its
 * earlier records. */
IBP_API ibp_status ibp_cuda_record_event(ibp_event event, ibp_stream stream);

/* Makes the stream `waiting` wait for the work that is queued on the stream `running`. The function records `event` on
 * `running`, and no other thread may record this event until the function has returned. */
IBP_API ibp_status ibp_cuda_wait_for_stream(ibp_stream waiting, ibp_stream running, ibp_event event);

/* ---- items with the CPU's help ----------------------------------------------------------------------------------- */

/* A stager brings items of tables to the GPU. The tables are in pinned host memory, and the ids of the items are in
 * host memory. A stager is for tables so large that address translation would slow down a GPU that fetches rows at
 * random addresses itself. Three steps run at the same time: threads of the CPU gather slots into a ring of pinned
 * memory, the copy engine moves them to a ring on the GPU, and the GPU decodes them there. A stager owns a stream and
 * events of the device that is current when it is created. One call at a time may use it. */
typedef struct ibp_stager ibp_stager;

/* Creates a stager.
 *
 * pinned, near: ring_bytes bytes of pinned host memory, and ring_bytes bytes of device memory, aligned to 16 bytes.
 *   The stager uses them until it has been destroyed and all work that it queued is completed.
 * ring_bytes: size of each of the two rings in bytes. 24 MiB keep a PCIe 5 link busy. */
IBP_API ibp_status ibp_cuda_create_stager(uint8_t *pinned, uint8_t *near, int64_t ring_bytes, ibp_stager **stager);
/* Destroys a stager, whichever device is current. NULL is allowed. */
IBP_API ibp_status ibp_cuda_destroy_stager(ibp_stager *stager);

/* Calls work(state, number) once for every number of [0, count), and returns when all calls have returned. The calls
 * may run on any number of threads, at the same time or one after the other: an OpenMP loop, or a pool of threads. */
typedef void (*ibp_run)(void *runner, int64_t count, void (*work)(void *state, int64_t number), void *state);

/* Gathers items as ibp_cuda_gather_items does. Items must be whole rows. ids->data must be in host memory,
 * ids->positions and ids->addresses must be NULL, and ids->num_dims must be 0, so the output is contiguous. Returns
 * when the last chunk is queued; ids are not read after that. Queued kernels may still read the table's slots
 * if slot_bytes is not a multiple of 16.
 *
 * table: a table with slots, whose pointers are the addresses that the device uses. The device itself reads the bytes
 *   of rows that are not in a slot.
 * slots: the address of the same slots for the CPU.
 * run, runner, num_threads: how the CPU's work is spread over threads. The function calls run(runner, num_threads,
 *   work, state) once. `run` must then call work(state, number) for each number from 0 to num_threads - 1, on different
 *   threads if possible.
 * @return IBP_INVALID_ARGUMENT also if an item's slots and its id do not fit in a twelfth of the ring. */
IBP_API ibp_status ibp_cuda_stage_items(ibp_stager *stager, const ibp_table *table, const uint8_t *slots,
                                        const ibp_ids *ids, uint8_t *out, ibp_fault *fault, int max_sms, ibp_run run,
                                        void *runner, int64_t num_threads, ibp_stream stream);

/* ---- streams of whole tables ------------------------------------------------------------------------------------- */

/* A streamer brings tables from pinned host memory to the GPU. The copy engine copies them chunk by chunk to a ring of
 * staging buffers on the GPU, while earlier chunks are decoded. A streamer owns streams and events of the device that
 * is current when it is created, but no device memory. One host thread at a time may use it, with one caller's stream.
 * If another device is current, the functions that use a streamer return IBP_INVALID_ARGUMENT. */
typedef struct ibp_streamer ibp_streamer;

/* Creates a streamer for the current device. */
IBP_API ibp_status ibp_cuda_create_streamer(ibp_streamer **streamer);
/* Destroys a streamer, whichever device is current. Work that is already queued is still completed. NULL is allowed. */
IBP_API ibp_status ibp_cuda_destroy_streamer(ibp_streamer *streamer);

/* Begins a stream of tables. After it, each call of ibp_cuda_stream_bytes brings one table through `ring`; all these
 * calls must pass the same `stream`. ibp_cuda_begin_stream itself queues nothing.
 *
 * ring: device memory, aligned to 128 bytes. Work that was queued on the caller's stream before the first chunk may use
 *   the ring. So may work that is queued after the calls, because each call makes the caller's stream wait for its
 *   copies.
 * ring_bytes: size of the ring, which is cut into quarters. 32 MiB keep a PCIe 5 link busy. If 32 rows do not fit in a
 *   quarter, the kernel fetches rows from host memory itself. */
IBP_API ibp_status ibp_cuda_begin_stream(ibp_streamer *streamer, uint8_t *ring, int64_t ring_bytes);

/* Begins another stream of tables through the ring of the previous stream. Since then nothing else may have used the
 * ring. The first copies wait only for room in the ring, so that the link stays busy from one stream into the next.
 * Neither of the two streams may be captured in a CUDA graph.
 *
 * @return IBP_INVALID_ARGUMENT if no stream has begun. */
IBP_API ibp_status ibp_cuda_continue_stream(ibp_streamer *streamer);

/* Decodes bytes [start, end) of the next table of a stream, as ibp_cuda_decode_bytes does.
 *
 * table: its slots and overflow are in mapped pinned host memory, which must hold its bytes at the call and must not
 *   change until they have been copied. Lengths, bases and the arrays of the codebook are in device memory. slots_start
 *   and overflow_start must be 0.
 * bases: table->bases in host memory, read before the function returns. A chunk whose bases are out of order is not
 *   copied; kernels read its rows from host memory instead. If bases are wrong in another way, even undamaged rows of
 *   the same chunk may become zeros, and a fault is noted for them.
 * ends: whether this is the last table of the stream. The last chunks of the last table are made small. A wrong value
 *   only costs time.
 *
 * The caller's stream waits for the last chunk. Copies wait for the caller's stream when the stream of tables begins.
 * After four chunks each copy also waits until the earlier chunk in its quarter of the ring has been decoded. So copies
 * for one table run while the previous table is still being decoded. A stream of tables can be captured in a CUDA
 * graph, but only as a whole, from ibp_cuda_begin_stream to its last table. Replays need the ring and the pinned
 * memory, but no longer the streamer. */
IBP_API ibp_status ibp_cuda_stream_bytes(ibp_streamer *streamer, const ibp_table *table, const uint64_t *bases,
                                         int64_t start, int64_t end, bool ends, uint8_t *out, ibp_fault *fault,
                                         int max_sms, ibp_stream stream);

#ifdef __cplusplus
}
#endif
#endif
