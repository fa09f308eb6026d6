/* What this machine could reach at most, for roofline figures: reading memory, and the dot instruction of an instruction
 * set on registers alone. The sums are independent, enough of them to hide the instruction's latency. */
#include "engine.h"

#include <string.h>

enum { DOTS_PER_ROUND = 12 };

typedef void round_fn(uint64_t n_rounds);

#define TWELVE(dot) dot(0) dot(1) dot(2) dot(3) dot(4) dot(5) dot(6) dot(7) dot(8) dot(9) dot(10) dot(11)

#if defined(__x86_64__)

/* Registers by number, so that no file of flags is needed for an instruction set this compiler was not asked for. */
#define CLOBBERS                                                                                                       \
    "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", \
        "xmm14", "xmm15"
#define ROUNDS(name, dot)                                                                 \
    static void name(uint64_t n_rounds) {                                                 \
        for (; n_rounds > 0; n_rounds--) __asm__ volatile(TWELVE(dot) ::: CLOBBERS);      \
        __asm__ volatile("vzeroupper");                                                   \
    }
#define MADDUBS_256(i) "vpmaddubsw %%ymm13, %%ymm14, %%ymm12\n\tvpaddw %%ymm12, %%ymm" #i ", %%ymm" #i "\n\t"
#define MADDUBS_512(i) "vpmaddubsw %%zmm13, %%zmm14, %%zmm12\n\tvpaddw %%zmm12, %%zmm" #i ", %%zmm" #i "\n\t"
#define DPBUSD_256(i) "%{vex%} vpdpbusd %%ymm13, %%ymm14, %%ymm" #i "\n\t"
#define DPBUSD_512(i) "vpdpbusd %%zmm13, %%zmm14, %%zmm" #i "\n\t"
ROUNDS(maddubs_256, MADDUBS_256)
ROUNDS(maddubs_512, MADDUBS_512)
ROUNDS(dpbusd_256, DPBUSD_256)
ROUNDS(dpbusd_512, DPBUSD_512)

#elif defined(__aarch64__)

#if defined(__clang__)
#define WITH(features, extension) __attribute__((target(features)))
#else
#define WITH(features, extension) __attribute__((target("arch=armv8.2-a+" extension)))
#endif
#define CLOBBERS "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11"
#define ROUNDS(name, dot)                                                                  \
    static void name(uint64_t n_rounds) {                                                  \
        for (; n_rounds > 0; n_rounds--) __asm__ volatile(TWELVE(dot) ::: CLOBBERS);       \
    }
#define SMLAL(i) "smlal v" #i ".8h, v30.8b, v31.8b\n\t"
#define SDOT(i) "sdot v" #i ".4s, v30.16b, v31.16b\n\t"
#define SMMLA(i) "smmla v" #i ".4s, v30.16b, v31.16b\n\t"
ROUNDS(smlal, SMLAL)
WITH("dotprod", "dotprod") ROUNDS(sdot, SDOT)
WITH("dotprod,i8mm", "dotprod+i8mm") ROUNDS(smmla, SMMLA)

#endif

/* A product and its addition are two operations. */
static const struct { const char *isa; round_fn *run; int dot_ops; } peaks[] = {
#if defined(__x86_64__)
    {"avx2", maddubs_256, 64},
    {"avxvnni", dpbusd_256, 64},
    {"avx512", maddubs_512, 128},
    {"avx512vnni", dpbusd_512, 128},
#elif defined(__aarch64__)
    {"neon", smlal, 16},
    {"neon_dotprod", sdot, 32},
    {"neon_i8mm", smmla, 64},
#endif
    {"", NULL, 0},
};

uint64_t en_peak_dots(int isa, uint64_t n_rounds) {
    if (!en_isa_at(isa) || !en_isa_at(isa)->usable()) return 0;
    for (size_t i = 0; peaks[i].run; i++)
        if (strcmp(peaks[i].isa, en_isa_at(isa)->name) == 0) {
            peaks[i].run(n_rounds);
            return n_rounds * DOTS_PER_ROUND * (uint64_t)peaks[i].dot_ops;
        }
    return 0;
}

uint64_t en_peak_read(const uint64_t *memory, uint64_t n_words) {
    uint64_t sum = 0;
    for (uint64_t i = 0; i < n_words; i++) sum += memory[i];
    return sum;
}
