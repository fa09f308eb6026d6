#ifndef EDGE_RT_SHA256_H
#define EDGE_RT_SHA256_H

#include <stddef.h>
#include <stdint.h>

/* tick is called now and then, unless it is NULL, and stops it with 1; then sha256 gives 0, and there is no digest. */
int sha256(const uint8_t *data, size_t n_bytes, uint8_t digest[32], int (*tick)(void *owner), void *owner);

#endif
