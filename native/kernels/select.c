/* The table of instruction sets; adding one adds a file and a line here. */
#include "kernels.h"

#include "edge_native.h"

static const en_isa *const isas[] = {
    &en_isa_portable,
#if defined(__x86_64__)
    &en_isa_avx2,
#if EN_HAS_AVXVNNI
    &en_isa_avxvnni,
#endif
    &en_isa_avx512,
    &en_isa_avx512vnni,
#endif
#if defined(__aarch64__)
    &en_isa_neon,
#endif
#if defined(EN_NEON_EXTENSIONS)
    &en_isa_neon_dotprod,
    &en_isa_neon_i8mm,
#endif
};

enum { N_ISAS = sizeof isas / sizeof isas[0] };

int en_isa_count(void) { return N_ISAS; }

const en_isa *en_isa_at(int isa) { return isa >= 0 && isa < N_ISAS ? isas[isa] : NULL; }

const char *en_isa_name(int isa) { return en_isa_at(isa) ? en_isa_at(isa)->name : ""; }

int en_isa_usable(int isa) { return en_isa_at(isa) ? en_isa_at(isa)->usable() : 0; }

const en_isa *en_isa_best(void) {
    int best = N_ISAS - 1;
    while (best > 0 && !isas[best]->usable()) best--;
    return isas[best];
}
