/* Which CPUs the threads of a context may run on. */
#include "context.h"

#include <sched.h>

int en_set_cpus(en_context *c, const int32_t *cpus, int n) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int i = 0; i < n; i++) {
        if (cpus[i] < 0 || cpus[i] >= CPU_SETSIZE) return EN_BAD_CPUS;
        CPU_SET(cpus[i], &set);
    }
    if (n > 0 && !en_pool_pin(c->pool, &set)) return EN_BAD_CPUS;
    if (n <= 0 && c->is_pinned) en_pool_pin(c->pool, NULL); /* if it fails, the kernel has moved them already */
    c->is_pinned = n > 0;
    c->cpus = set;
    return EN_OK;
}

/* The calling thread computes as much of a step as a worker, so it keeps to the same CPUs; but it belongs to the program
 * around us and gets its own back when the step is done. Where the kernel refuses, it computes wherever it is. */
void en_enter_cpus(const en_context *c, en_home *home) {
    home->was_moved = c->is_pinned && sched_getaffinity(0, sizeof home->cpus, &home->cpus) == 0 &&
                      sched_setaffinity(0, sizeof c->cpus, &c->cpus) == 0;
}

void en_leave_cpus(const en_home *home) {
    if (home->was_moved) sched_setaffinity(0, sizeof home->cpus, &home->cpus);
}
