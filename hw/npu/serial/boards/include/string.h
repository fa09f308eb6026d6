/* The firmware is built without a C library: libc.c has what it uses. */
#ifndef EDGE_RT_STRING_H
#define EDGE_RT_STRING_H

#include <stddef.h>

void *memcpy(void *restrict to, const void *restrict from, size_t n);
void *memmove(void *to, const void *from, size_t n);
void *memset(void *to, int value, size_t n);
int memcmp(const void *left, const void *right, size_t n);
size_t strlen(const char *text);
char *strncpy(char *restrict to, const char *restrict from, size_t n);

#endif
