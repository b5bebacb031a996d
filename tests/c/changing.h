/* changing.h - memory that changes while it is read, always at the same place of a program: for C and C++.
 *
 * The pages of an array are made unreadable. At every look at them a signal handler lets one instruction pass, counts
 * it, and takes the pages away again; after a chosen look it changes all bytes. So each look after the first can be the
 * one that sees others, wherever the compiler has put it. For Linux on x86-64, whose processor stops after a step. */
#ifndef CHANGING_H
#define CHANGING_H

#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__x86_64__) && defined(__linux__)
#define CAN_STEP 1
#include <ucontext.h>
#else
#define CAN_STEP 0
#endif

/* Bytes that end where memory does which nobody may touch, as it may not be touched before their first page. */
typedef struct fenced {
    uint8_t *start, *bytes;
    size_t room, num_bytes; /* room: from start to the end of bytes, in pages */
} fenced;

static inline fenced fenced_new(const void *content, size_t num_bytes)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), room = (num_bytes + page - 1) / page * page;
    uint8_t *const memory =
        (uint8_t *)mmap(NULL, room + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || (room != 0 && mprotect(memory + page, room, PROT_READ | PROT_WRITE) != 0)) abort();
    const fenced made = {memory + page, memory + page + room - num_bytes, room, num_bytes};
    if (content && num_bytes != 0) memcpy(made.bytes, content, num_bytes);
    return made;
}

static inline void fenced_free(const fenced *memory)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    munmap(memory->start - page, memory->room + 2 * page);
}

/* The array that changes. looks_left: 0 once it has changed, or where none is watched. */
static struct {
    fenced memory;
    const void *others;
    long looks_left;
    struct sigaction before[3];
} changing;

static inline void protect_changing(int access)
{
    if (mprotect(changing.memory.start, changing.memory.room, access) != 0) abort();
}

#if CAN_STEP
enum { STEP_FLAG = 0x100 }; /* of the processor: stop after one instruction */

static inline void on_look(int number, siginfo_t *info, void *context)
{
    const uint8_t *const address = (const uint8_t *)info->si_addr, *const start = changing.memory.start;
    if (changing.looks_left == 0 || address < start || address >= start + changing.memory.room) {
        signal(number, SIG_DFL); /* memory that is nobody's: it ends the program when it is touched again */
        return;
    }
    protect_changing(PROT_READ | PROT_WRITE);
    ((ucontext_t *)context)->uc_mcontext.gregs[REG_EFL] |= STEP_FLAG;
}

static inline void on_step(int number, siginfo_t *info, void *context)
{
    (void)number, (void)info;
    ((ucontext_t *)context)->uc_mcontext.gregs[REG_EFL] &= ~(greg_t)STEP_FLAG;
    if (--changing.looks_left == 0)
        memcpy(changing.memory.bytes, changing.others, changing.memory.num_bytes);
    else
        protect_changing(PROT_NONE);
}
#endif

/* Memory that holds bytes for a number of looks at it, and other bytes from then on. */
static inline void *begin_changing(const void *bytes, const void *others, size_t num_bytes, long looks)
{
    changing.memory = fenced_new(bytes, num_bytes);
    changing.others = others;
    changing.looks_left = looks;
#if CAN_STEP
    struct sigaction look, step;
    memset(&look, 0, sizeof look);
    look.sa_flags = SA_SIGINFO;
    step = look;
    look.sa_sigaction = on_look, step.sa_sigaction = on_step;
    sigaction(SIGSEGV, &look, &changing.before[0]);
    sigaction(SIGBUS, &look, &changing.before[1]);
    sigaction(SIGTRAP, &step, &changing.before[2]);
    protect_changing(PROT_NONE);
#endif
    return changing.memory.bytes;
}

/* @return whether the memory has changed. */
static inline bool end_changing(void)
{
    const bool has_changed = changing.looks_left == 0;
    changing.looks_left = 0;
#if CAN_STEP
    sigaction(SIGSEGV, &changing.before[0], NULL);
    sigaction(SIGBUS, &changing.before[1], NULL);
    sigaction(SIGTRAP, &changing.before[2], NULL);
#endif
    fenced_free(&changing.memory);
    return has_changed;
}

/* Calls call(state, array) again and again, each time with an array that changes after another look: after each of the
 * first ones, and then after more and more. @return how many times it has changed. */
static inline long at_each_look(void (*call)(void *state, void *array), void *state, const void *bytes,
                                const void *others, size_t num_bytes)
{
    enum { FIRST = 32 };
    long num_changes = 0;
    for (long looks = 1;; looks += looks < FIRST ? 1 : looks / 4) {
        call(state, begin_changing(bytes, others, num_bytes, looks));
        if (!end_changing()) return num_changes;
        num_changes++;
    }
}

#endif
