/* NEON with dot products, FEAT_DotProd of ARMv8.2 (Cortex-A55, A76, Neoverse N1). */
#include "kernels.h"

#if defined(EN_NEON_EXTENSIONS)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif

#include "neon_sdot.h"

#include "neon_rows.h"

#include <sys/auxv.h>

static int usable(void) { return getauxval(AT_HWCAP) >> 20 & 1; /* HWCAP_ASIMDDP */ }

const en_isa en_isa_neon_dotprod = NEON_ISA("neon_dotprod", usable);

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
