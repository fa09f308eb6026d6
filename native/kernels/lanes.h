/* For the files of instruction sets that are made of lanes_*.h: parts that take the same shape whatever the number of
 * lanes in a register. Such a file names the types and the primitives (all(), load(), fused(), dots() and so on), then
 * includes the parts. Included after the target pragma, so that all of it is compiled for that instruction set. */
#ifndef EDGE_NATIVE_LANES_H
#define EDGE_NATIVE_LANES_H

#define INLINE static inline __attribute__((always_inline))

/* Loops over registers, which must not remain loops. */
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

#endif
