/* Threads that take chunks of one job after the other. */
#ifndef EDGE_NATIVE_POOL_H
#define EDGE_NATIVE_POOL_H

#include <sched.h>
#include <stdint.h>

enum { EN_MAX_THREADS = 256, EN_MAX_CHUNKS = 65535 };

typedef struct en_pool en_pool;
typedef void en_job_fn(void *job, int chunk, int thread);

/* The calling thread of en_pool_run counts as thread 0. NULL if no memory or no thread can be had. */
en_pool *en_pool_new(int n_threads);
void en_pool_free(en_pool *pool);
int en_pool_threads(const en_pool *pool);
/* Let all threads but the caller's run on these CPUs only; NULL: on those that the maker of the pool could use. Gives 0
 * if the kernel refuses. */
int en_pool_pin(en_pool *pool, const cpu_set_t *cpus);

/* Call fn for each chunk, on any thread, and return when all are done. n_chunks is at most EN_MAX_CHUNKS. A thread that
 * the scheduler has taken off its core holds up no more than the chunk it was at. */
void en_pool_run(en_pool *pool, en_job_fn *fn, void *job, int n_chunks);

#endif
