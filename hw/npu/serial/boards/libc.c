/* What the firmware and its compiler need of a C library. Built with -fno-tree-loop-distribute-patterns: else these loops
 * become calls of themselves. */
#include <stdint.h>
#include <string.h>

void *memcpy(void *restrict to, const void *restrict from, size_t n) {
    uint8_t *target = to;
    const uint8_t *source = from;
    if ((((uintptr_t)target | (uintptr_t)source) & 3) == 0)
        for (; n >= 4; n -= 4, target += 4, source += 4) *(uint32_t *)(void *)target = *(const uint32_t *)(const void *)source;
    while (n--) *target++ = *source++;
    return to;
}

void *memmove(void *to, const void *from, size_t n) {
    uint8_t *target = to;
    const uint8_t *source = from;
    if (target <= source || target >= source + n)
        for (; n; n--) *target++ = *source++;
    else
        while (n--) target[n] = source[n];
    return to;
}

void *memset(void *to, int value, size_t n) {
    uint8_t *target = to;
    while (n--) *target++ = (uint8_t)value;
    return to;
}

int memcmp(const void *left, const void *right, size_t n) {
    const uint8_t *a = left, *b = right;
    for (; n; n--, a++, b++)
        if (*a != *b) return *a < *b ? -1 : 1;
    return 0;
}

size_t strlen(const char *text) {
    size_t n = 0;
    while (text[n]) n++;
    return n;
}

char *strncpy(char *restrict to, const char *restrict from, size_t n) {
    size_t i = 0;
    for (; i < n && from[i]; i++) to[i] = from[i];
    for (; i < n; i++) to[i] = 0;
    return to;
}
