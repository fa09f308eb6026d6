#ifndef EDGE_RT_SHA256_H
#define EDGE_RT_SHA256_H

#include <stddef.h>
#include <stdint.h>

void sha256(const uint8_t *data, size_t n_bytes, uint8_t digest[32]);

#endif
