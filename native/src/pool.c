#include "pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

/* How often to look before sleeping. A look takes some 40 ns to 1 ns; the count goes down when looking was in vain. */
enum { MIN_SPINS = 32, MAX_SPINS = 4096 };

typedef struct worker {
    en_pool *pool;
    pthread_t thread;
    int number;
} worker;

/* Chunks that a thread takes one after the other, from the first on; others take from the end what it does not get to.
 * The job's number << 32 | end << 16 | next chunk. Number and chunks in one word: a thread that slept through the end of a
 * job cannot take a chunk of the next one by mistake. */
typedef struct share {
    _Alignas(64) atomic_uint_least64_t chunks;
} share;

struct en_pool {
    _Alignas(64) atomic_int n_left;   /* chunks not yet done */
    _Alignas(64) atomic_uint epoch;   /* changes when a job comes: what workers sleep on */
    atomic_int n_sleeping;
    atomic_int owner_sleeps;
    atomic_int stops;
    en_job_fn *fn; /* written before the ticket, read after a chunk was taken from it */
    void *job;
    int n_threads;
    int owner_spins;
    cpu_set_t maker_cpus;
    uint32_t number;
    worker workers[EN_MAX_THREADS];
    share shares[EN_MAX_THREADS];
};

static void sleep_while(atomic_uint *word, unsigned value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake(void *word, int n) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, n, NULL, NULL, 0); }

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb"); /* about as long as x86's pause; "yield" does nothing on most cores */
#endif
}

static int shorter(int spins) { return spins / 2 < MIN_SPINS ? MIN_SPINS : spins / 2; }
static int longer(int spins) { return spins * 2 > MAX_SPINS ? MAX_SPINS : spins * 2; }

/* Take the next chunk of a share, or its last; -1 if none is left. */
static int take(share *from, int is_own) {
    uint64_t now = atomic_load_explicit(&from->chunks, memory_order_acquire);
    for (;;) {
        int next = now & 0xffff, end = now >> 16 & 0xffff;
        if (next >= end) return -1;
        uint64_t rest = is_own ? now + 1 : now - (1 << 16);
        if (atomic_compare_exchange_weak_explicit(&from->chunks, &now, rest, memory_order_acq_rel, memory_order_acquire))
            return is_own ? next : end - 1;
    }
}

/* Do chunks of the current job until none is left to take: those of this thread's share, then what others have left. */
static void work(en_pool *pool, int thread) {
    for (int i = 0; i < pool->n_threads; i++) {
        share *from = &pool->shares[(thread + i) % pool->n_threads];
        for (int chunk; (chunk = take(from, i == 0)) >= 0;) {
            pool->fn(pool->job, chunk, thread);
            if (atomic_fetch_sub(&pool->n_left, 1) == 1 && atomic_load(&pool->owner_sleeps)) wake(&pool->n_left, 1);
        }
    }
}

static void *run_worker(void *argument) {
    worker *self = argument;
    en_pool *pool = self->pool;
    int spins = MAX_SPINS;
    unsigned seen = 0;
    for (;;) {
        int n = 0;
        while (atomic_load_explicit(&pool->epoch, memory_order_acquire) == seen && n < spins) {
            relax();
            n++;
        }
        if (n < spins) {
            spins = longer(spins);
        } else {
            spins = shorter(spins);
            atomic_fetch_add(&pool->n_sleeping, 1);
            while (atomic_load(&pool->epoch) == seen) sleep_while(&pool->epoch, seen);
            atomic_fetch_sub(&pool->n_sleeping, 1);
        }
        if (atomic_load(&pool->stops)) return NULL;
        seen = atomic_load(&pool->epoch);
        work(pool, self->number);
    }
}

en_pool *en_pool_new(int n_threads) {
    if (n_threads < 1 || n_threads > EN_MAX_THREADS) return NULL;
    en_pool *pool = aligned_alloc(64, (sizeof *pool + 63) / 64 * 64);
    if (!pool) return NULL;
    *pool = (en_pool){.n_threads = 1, .owner_spins = MAX_SPINS};
    pthread_getaffinity_np(pthread_self(), sizeof pool->maker_cpus, &pool->maker_cpus);
    /* Signals are for the threads of the host program. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int i = 1; i < n_threads; i++) {
        pool->workers[i] = (worker){.pool = pool, .number = i};
        if (pthread_create(&pool->workers[i].thread, NULL, run_worker, &pool->workers[i]) != 0) break;
        pool->n_threads++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (pool->n_threads == n_threads) return pool;
    en_pool_free(pool);
    return NULL;
}

void en_pool_free(en_pool *pool) {
    if (!pool) return;
    atomic_store(&pool->stops, 1);
    atomic_fetch_add(&pool->epoch, 1);
    wake(&pool->epoch, INT_MAX);
    for (int i = 1; i < pool->n_threads; i++) pthread_join(pool->workers[i].thread, NULL);
    free(pool);
}

int en_pool_pin(en_pool *pool, const cpu_set_t *cpus) {
    if (!cpus) cpus = &pool->maker_cpus;
    for (int i = 1; i < pool->n_threads; i++)
        if (pthread_setaffinity_np(pool->workers[i].thread, sizeof *cpus, cpus) != 0) return 0;
    return 1;
}

int en_pool_threads(const en_pool *pool) { return pool->n_threads; }

void en_pool_run(en_pool *pool, en_job_fn *fn, void *job, int n_chunks) {
    if (pool->n_threads == 1 || n_chunks <= 1) {
        for (int i = 0; i < n_chunks; i++) fn(job, i, 0);
        return;
    }
    pool->fn = fn;
    pool->job = job;
    atomic_store_explicit(&pool->n_left, n_chunks, memory_order_relaxed);
    pool->number++;
    for (int i = 0; i < pool->n_threads; i++) {
        uint64_t first = (uint64_t)n_chunks * i / pool->n_threads, end = (uint64_t)n_chunks * (i + 1) / pool->n_threads;
        uint64_t chunks = (uint64_t)pool->number << 32 | end << 16 | first;
        atomic_store_explicit(&pool->shares[i].chunks, chunks, memory_order_release);
    }
    atomic_fetch_add(&pool->epoch, 1);
    if (atomic_load(&pool->n_sleeping) > 0) wake(&pool->epoch, INT_MAX);
    work(pool, 0);
    int n = 0, left;
    while ((left = atomic_load_explicit(&pool->n_left, memory_order_acquire)) > 0 && n < pool->owner_spins) {
        relax();
        n++;
    }
    if (left == 0) {
        pool->owner_spins = longer(pool->owner_spins);
        return;
    }
    pool->owner_spins = shorter(pool->owner_spins);
    atomic_store(&pool->owner_sleeps, 1);
    while ((left = atomic_load(&pool->n_left)) > 0)
        syscall(SYS_futex, &pool->n_left, FUTEX_WAIT_PRIVATE, left, NULL, NULL, 0);
    atomic_store(&pool->owner_sleeps, 0);
}
